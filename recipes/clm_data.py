"""From tables to records of a causal language model: which columns are used, and which tokens carry loss.

There are two kinds of data: `Pairs` (a prompt and its target) and `Documents` (plain text). Each turns rows of a table
into `Record`s, one row at a time: what a record holds never depends on other rows. Conversations: `recipes/sft.py`.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.tables import Table, check_columns, columns_in

logger = logging.getLogger(__name__)

IGNORED = -100
DEFAULT_BLOCK_SIZE = 1024
PAIR_COLUMNS = (("mr", "ref"), ("prompt", "completion"), ("instruction", "output"))
TEXT, ALPACA_INPUT = "text", "input"
KINDS = (
    f"a prompt and a target column ({', '.join(' and '.join(pair) for pair in PAIR_COLUMNS)}, or --prompt_column and "
    f"--target_column), or a column of plain text ({TEXT}, or --text_column); recipes/sft.py takes conversations"
)
IN_BRACES = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Record:
    """Tokens of one record.

    Args:
        input_ids: at most `block_size`.
        labels: the same ids where a token is learned, -100 elsewhere.
        is_cut: whether the row had more tokens.
        starts_row: whether this is the first record of its row.
    """

    input_ids: list[int]
    labels: list[int]
    is_cut: bool
    starts_row: bool = True

    @property
    def has_target(self) -> bool:
        """Whether any token is predicted and learned; the first one has nothing before it to be predicted from."""
        return any(label != IGNORED for label in self.labels[1:])


def _record(input_ids: list[int], labels: list[int], block_size: int) -> Record:
    return Record(input_ids[:block_size], labels[:block_size], len(input_ids) > block_size)


# --- the two kinds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """`prompt`, separator, `target`, end token; the loss is on the target and the end token.

    Prompt and target are tokenized apart, so the border is exact and a prompt has the same tokens when it is generated
    from.

    Args:
        template: makes the prompt; columns stand in braces.
        target: column.
        separator: between the two.
    """

    template: str
    target: str
    separator: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (*_columns_of(self.template), self.target)

    def unit(self, block_size: int) -> str:
        return f"one row: a prompt with its target, at most {block_size} tokens"

    def check_row(self, table: Table, row: int) -> None:
        for column in self.columns:
            _check_text(table, row, column)

    def prompts(self, rows: Mapping[str, Sequence[Any]]) -> list[str]:
        """The prompts of some rows, without the separator."""
        names = _columns_of(self.template)
        prompts = []
        for row in zip(*(rows[name] for name in names), strict=True):
            values = dict(zip(names, row, strict=True))
            prompts.append(IN_BRACES.sub(lambda match, values=values: values[match[1]], self.template).strip())
        return prompts

    def prompt_ids(self, prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Tokens of the prompts, the separator included."""
        start = start_tokens(tokenizer)
        return [start + ids for ids in tokens_of([prompt + self.separator for prompt in prompts], tokenizer)]

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        prompts = self.prompt_ids(self.prompts(rows), tokenizer)
        for prompt, target in zip(prompts, tokens_of(list(rows[self.target]), tokenizer), strict=True):
            target = [*target, tokenizer.eos_token_id]
            yield _record(prompt + target, [IGNORED] * len(prompt) + target, block_size)


@dataclass(frozen=True)
class Documents:
    """Plain text and an end token, all of which is learned.

    Args:
        text: column.
        chunked: whether each piece of `block_size` tokens is a record of its own; else the rest is cut off.
    """

    text: str
    chunked: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    def unit(self, block_size: int) -> str:
        if self.chunked:
            return (
                f"one chunk of at most {block_size} tokens; a document of several chunks is not protected as a whole"
            )
        return f"one document, at most its first {block_size} tokens"

    def check_row(self, table: Table, row: int) -> None:
        _check_text(table, row, self.text)

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        start = start_tokens(tokenizer)
        for ids in tokens_of(list(rows[self.text]), tokenizer):
            ids = [*start, *ids, tokenizer.eos_token_id]
            if self.chunked:
                starts = range(0, len(ids), block_size)
                chunks = ((i, ids[i : i + block_size]) for i in starts)
                yield from (Record(chunk, list(chunk), False, starts_row=i == 0) for i, chunk in chunks)
            else:
                yield _record(ids, list(ids), block_size)


Kind = Pairs | Documents


def _columns_of(template: str) -> list[str]:
    return list(dict.fromkeys(IN_BRACES.findall(template)))


def _check_text(table: Table, row: int, column: str) -> None:
    value = table.columns[column][row]
    if not isinstance(value, str):
        raise DPConfigError(
            f"{table.where(row)}: column {column!r} holds {type(value).__name__}, not text. Correct the row, or name "
            "another."
        )


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The start token, for tokenizers that put one before every text."""
    own = tokenizer("")["input_ids"]
    return own[:1] if own[:1] == [tokenizer.bos_token_id] else []


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of each text alone, without special ones."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]  # else it warns of long texts


# --- which kind ------------------------------------------------------------------------------------------------------


def find_kind(tables: Mapping[str, Table], args: Any, user_id_column: str | None = None) -> Kind:
    """The kind of data: what the named columns say, else what the columns' names say.

    Args:
        user_id_column: of the training table.

    Raises:
        DPConfigError: if columns are missing, if no kind or several fit, or if a row does not.
    """
    first = next(iter(tables.values()))
    kind = _named_kind(first, args) or _recognised_kind(first, args)
    if args.chunk_documents and not isinstance(kind, Documents):
        raise DPConfigError(
            "chunk_documents is for plain text, but these are prompts and targets. Remove it, or name a column of "
            "plain text with --text_column."
        )
    if args.generate and not isinstance(kind, Pairs):
        raise DPConfigError("generate needs prompts and targets. Name them with --prompt_column and --target_column.")
    check_rows(kind, tables, user_id_column)
    return kind


def check_rows(kind: Kind, tables: Mapping[str, Table], user_id_column: str | None = None) -> None:
    """Whether every table has the columns, and every row what a record needs."""
    for split, table in tables.items():
        wanted = dict.fromkeys(kind.columns, "")
        if split == "train" and user_id_column is not None:
            wanted[user_id_column] = "user_id_column"
        check_columns(table, wanted, f"Needed is {KINDS}.")
        for row in range(len(table)):
            kind.check_row(table, row)


def _named_kind(table: Table, args: Any) -> Kind | None:
    """The kind that the flags name."""
    named = {
        "--prompt_column and --target_column": bool(args.prompt_column or args.target_column or args.prompt_template),
        "--text_column": bool(args.text_column),
    }
    if sum(named.values()) > 1:
        raise DPConfigError(
            f"{' and '.join(name for name, is_named in named.items() if is_named)} are given. Keep one kind: {KINDS}."
        )
    if args.text_column:
        return Documents(args.text_column, args.chunk_documents)
    pair = named_pair(table, args)
    return None if pair is None else Pairs(*pair, args.separator)


class NamesPairs(Protocol):
    """The flags that name a prompt and a target."""

    prompt_column: str | None
    target_column: str | None
    prompt_template: str | None


def named_pair(table: Table, args: NamesPairs) -> tuple[str, str] | None:
    """Template of the prompt and column of the target, if flags name any of them."""
    if not (args.prompt_column or args.target_column or args.prompt_template):
        return None
    found = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(table.columns)), (None, None))
    prompt, target = args.prompt_column or found[0], args.target_column or found[1]
    if target is None or (prompt is None and args.prompt_template is None):
        raise DPConfigError(
            f"{table.name}: a prompt needs a target and a target a prompt, and only one of them is named. Add "
            f"{'--target_column' if target is None else '--prompt_column'} <one of: "
            f"{columns_in(table)}>."
        )
    return _template(table, args, prompt), target


def recognised_pairs(table: Table, args: NamesPairs) -> list[tuple[str, str]]:
    """The same for every pair of columns whose names say what they are."""
    there = [pair for pair in PAIR_COLUMNS if set(pair) <= set(table.columns)]
    return [(_template(table, args, prompt), target) for prompt, target in there]


def _recognised_kind(table: Table, args: Any) -> Kind:
    """The one kind whose columns are there."""
    kinds: list[Kind] = [Pairs(*pair, args.separator) for pair in recognised_pairs(table, args)]
    if TEXT in table.columns:
        kinds.append(Documents(TEXT, args.chunk_documents))
    if len(kinds) != 1:
        what = "no kind of data is" if not kinds else "several kinds of data are"
        raise DPConfigError(
            f"{table.name}: {what} recognised among the columns {columns_in(table)}. Name what to use: {KINDS}. A "
            "file without a line of column names needs one."
        )
    return kinds[0]


def _template(table: Table, args: NamesPairs, prompt: str | None) -> str:
    template = args.prompt_template
    if template is None:
        assert prompt is not None
        template = f"{{{prompt}}}"
        if prompt == "instruction" and ALPACA_INPUT in table.columns:
            template += f"\n{{{ALPACA_INPUT}}}"
    if not _columns_of(template):
        raise DPConfigError(
            f"prompt_template={template!r} names no column, so all prompts would be the same. Write columns in "
            "braces: '{mr}'."
        )
    return template


# --- tokenizing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Tokenized records of one split.

    Args:
        dataset: columns `input_ids` and `labels`.
        num_cut: records that lost tokens to `block_size`.
        num_without_target: records in which no token is learned; they contribute nothing.
    """

    dataset: Dataset
    num_cut: int
    num_without_target: int


def choose_block_size(
    asked: int | None, tokenizer: PreTrainedTokenizerBase, model: Any, name: str = "block_size"
) -> int:
    """Most tokens of a record: what was asked for under that name, within what the model takes."""
    most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    if asked is None:
        return min(DEFAULT_BLOCK_SIZE, most)
    if asked > most:
        logger.warning(f"{name}={asked} is more than the model takes; using {most}.")
    return min(asked, most)


def tokenize(
    table: Table,
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block_size: int,
    limit: int | None = None,
    user_id_column: str | None = None,
) -> Split:
    """Records of a table, in its order; only the first `limit`, with the user ids of their rows if those are named.

    Raises:
        DPConfigError: if the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise DPConfigError(
            "The tokenizer has no end token (eos_token), so a text would have no end. Use the tokenizer of a causal "
            "language model, e.g. with --tokenizer_name."
        )
    num_rows = len(table) if limit is None else min(limit, len(table))  # a row gives one record or more
    rows = {column: table.columns[column][:num_rows] for column in kind.columns}
    records = list(kind.records(rows, tokenizer, block_size))[:limit]
    columns = {"input_ids": [r.input_ids for r in records], "labels": [r.labels for r in records]}
    if user_id_column is not None:
        row_of = itertools.accumulate((r.starts_row for r in records), initial=-1)
        columns[user_id_column] = [table.columns[user_id_column][row] for row in list(row_of)[1:]]
    dataset = Dataset.from_dict(columns)
    return Split(dataset, sum(r.is_cut for r in records), sum(not r.has_target for r in records))


def report(name: str, split: Split, block_size: int, *, counts: bool) -> None:
    """Says how many records lost tokens; without `counts`, which are exact values of the records, only the rule."""
    if not counts:
        logger.info(
            f"{name}: {len(split.dataset)} records. Longer ones are cut to {block_size} tokens, and one without a "
            "token to learn contributes nothing; how many there are is data (--log_unprivatized prints it)."
        )
        return
    lost = []
    if split.num_cut:
        lost.append(f"{split.num_cut} were cut to {block_size} tokens")
    if split.num_without_target:
        lost.append(f"{split.num_without_target} have no token to learn and contribute nothing")
    text = f"{name}: {len(split.dataset)} records; {', '.join(lost) or 'none was cut'}."
    if not lost:
        logger.info(text)
    elif split.num_without_target:
        fix = " Raise --block_size, or shorten what stands before the target." if split.num_cut else ""
        logger.warning(f"{text}{fix} {CONSOLE_ONLY}")
    else:
        logger.info(f"{text} {CONSOLE_ONLY}")


CONSOLE_ONLY = "(Exact counts over the records: keep this line with the data.)"
