"""From tables to records of a language model: which columns are used, and which tokens carry loss.

There are two kinds of data: `Pairs` (a prompt and its target; `SourceTarget` for a model with an encoder) and
`Documents` (plain text). Each turns rows of a table into `Record`s, one row at a time: what a record holds never
depends on other rows. Conversations: `recipes/sft.py`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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


class Record(NamedTuple):
    """Tokens of one row of a table.

    Args:
        input_ids: at most `block_size`.
        labels: the same ids where a token is learned, -100 elsewhere.
        is_cut: whether the row had more tokens.
    """

    input_ids: list[int]
    labels: list[int]
    is_cut: bool


def _record(input_ids: list[int], labels: list[int], block_size: int) -> Record:
    return Record(input_ids[:block_size], labels[:block_size], len(input_ids) > block_size)


# --- the kinds -------------------------------------------------------------------------------------------------------


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

    shift: ClassVar[int] = 1  # a causal model predicts the label after the one it stands at
    template: str
    target: str
    separator: str

    def __post_init__(self) -> None:
        if not _columns_of(self.template):
            raise DPConfigError(
                f"prompt_template={self.template!r} names no column, so all prompts would be the same. Write columns "
                "in braces: '{mr}'."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return (*_columns_of(self.template), self.target)

    def unit(self, block_size: int) -> str:
        return f"one row: a prompt with its target, at most {block_size} tokens"

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
    """Plain text and an end token, all of which is learned; `text` is the column."""

    shift: ClassVar[int] = 1
    text: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    def unit(self, block_size: int) -> str:
        return f"one document, at most its first {block_size} tokens"

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        start = start_tokens(tokenizer)
        for ids in tokens_of(list(rows[self.text]), tokenizer):
            ids = [*start, *ids, tokenizer.eos_token_id]
            yield _record(ids, list(ids), block_size)


@dataclass(frozen=True)
class SourceTarget(Pairs):
    """The encoder reads the prompt, its source, and an end token; the loss is on the target and its end token.

    Args:
        block_size: tokens of a source, the end included; of a longer one the beginning is kept.
    """

    shift: ClassVar[int] = 0
    block_size: int

    def unit(self, block_size: int) -> str:
        return f"one row: a source of at most {self.block_size} tokens with its target of at most {block_size} tokens"

    def prompt_ids(self, prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        return [_cut(row, self.block_size) for row in _with_end(tokenizer, text=prompts)]

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        sources = _with_end(tokenizer, text=self.prompts(rows))
        targets = _with_end(tokenizer, text_target=list(rows[self.target]))
        for source, target in zip(sources, targets, strict=True):
            is_cut = len(source) > self.block_size or len(target) > block_size
            yield Record(_cut(source, self.block_size), target[:block_size], is_cut)


def _with_end(tokenizer: PreTrainedTokenizerBase, **texts: list[str]) -> list[list[int]]:
    """Tokens with the special ones of the model, and an end where its tokenizer adds none."""
    end = tokenizer.eos_token_id
    return [row if row[-1:] == [end] else [*row, end] for row in tokenizer(**texts, verbose=False)["input_ids"]]


def _cut(row: list[int], most: int) -> list[int]:
    """The beginning of a source, with its end token."""
    return row if len(row) <= most else [*row[: most - 1], row[-1]]


Kind = Pairs | Documents


def with_encoder(kind: Kind, block_size: int) -> SourceTarget:
    """The kind for a model that reads prompts with an encoder.

    Raises:
        DPConfigError: for plain text, which has no source.
    """
    if not isinstance(kind, Pairs):
        raise DPConfigError(
            "A model with an encoder needs prompts and targets, and this is plain text. Name --prompt_column and "
            "--target_column, or finetune a causal model."
        )
    return SourceTarget(kind.template, kind.target, separator="", block_size=block_size)


def _columns_of(template: str) -> list[str]:
    return list(dict.fromkeys(IN_BRACES.findall(template)))


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
    names_pair = bool(args.prompt_column or args.target_column or args.prompt_template)
    if names_pair and args.text_column:
        raise DPConfigError(
            f"--prompt_column or --target_column, and --text_column are given. Keep one kind: {KINDS}."
        )
    kinds: list[Kind] = [Documents(args.text_column)] if args.text_column else []
    if not args.text_column:
        kinds += [Pairs(*pair, args.separator) for pair in find_pairs(first, args)]
        kinds += [Documents(TEXT)] if TEXT in first.columns and not names_pair else []
    if len(kinds) != 1:
        what = "no kind of data is" if not kinds else "several kinds of data are"
        raise DPConfigError(
            f"{first.name}: {what} recognised among the columns {columns_in(first)}. Name what to use: {KINDS}."
        )
    (kind,) = kinds
    if args.generate and not isinstance(kind, Pairs):
        raise DPConfigError("generate needs prompts and targets. Name them with --prompt_column and --target_column.")
    check_rows(kind, tables, user_id_column)
    return kind


def find_pairs(table: Table, args: Any) -> list[tuple[str, str]]:
    """Templates of prompts and columns of targets: the pair that the flags name, else all that are recognised."""
    pairs = [pair for pair in PAIR_COLUMNS if set(pair) <= set(table.columns)]
    if args.prompt_column or args.target_column or args.prompt_template:
        own_prompt, own_target = pairs[0] if pairs else (None, None)
        prompt, target = args.prompt_column or own_prompt, args.target_column or own_target
        if target is None or (prompt is None and args.prompt_template is None):
            raise DPConfigError(
                f"{table.name}: a prompt needs a target and a target a prompt, and only one of them is named. Add "
                f"{'--target_column' if target is None else '--prompt_column'} <one of: {columns_in(table)}>."
            )
        return [(args.prompt_template or _template(table, prompt), target)]
    return [(_template(table, prompt), target) for prompt, target in pairs]


def _template(table: Table, prompt: str) -> str:
    with_input = prompt == "instruction" and ALPACA_INPUT in table.columns
    return f"{{{prompt}}}" + (f"\n{{{ALPACA_INPUT}}}" if with_input else "")


def check_rows(kind: Kind, tables: Mapping[str, Table], user_id_column: str | None = None) -> None:
    """Refuse tables that lack a column, and rows that have something else than text there."""
    for split, table in tables.items():
        wanted = dict.fromkeys(kind.columns, "")
        if split == "train" and user_id_column is not None:
            wanted[user_id_column] = "user_id_column"
        check_columns(table, wanted, f"Needed is {KINDS}.")
        for column in kind.columns:
            for row, value in enumerate(table.columns[column]):
                if not isinstance(value, str):
                    raise DPConfigError(
                        f"{table.where(row)}: column {column!r} holds {type(value).__name__}, not text. Correct the "
                        "row, or name another."
                    )


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


def choose_block_size(asked: int | None, tokenizer: PreTrainedTokenizerBase, model: Any) -> int:
    """Most tokens of a record: what was asked for, within what the model takes."""
    most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    if asked is None:
        return min(DEFAULT_BLOCK_SIZE, most)
    if asked > most:
        logger.warning(f"block_size={asked} is more than the model takes; using {most}.")
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
    rows = {column: table.columns[column][:limit] for column in kind.columns}
    records = list(kind.records(rows, tokenizer, block_size))
    columns: dict[str, Any] = {"input_ids": [r.input_ids for r in records], "labels": [r.labels for r in records]}
    if user_id_column is not None:
        columns[user_id_column] = table.columns[user_id_column][:limit]
    # the first token has nothing before it to be predicted from
    num_without_target = sum(set(r.labels[kind.shift :]) <= {IGNORED} for r in records)
    return Split(Dataset.from_dict(columns), sum(r.is_cut for r in records), num_without_target)


def report(name: str, split: Split, block_size: int, *, counts: bool) -> None:
    """Says how many records lost tokens; without `counts`, which are exact values of the records, only the rule."""
    if not counts:
        logger.info(
            f"{name}: a record is cut to {block_size} tokens, and one without a token to learn contributes nothing; "
            "how many there are is data (--log_unprivatized prints it)."
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
