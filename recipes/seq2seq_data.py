"""Sources and targets for a model with an encoder and a decoder: T5, BART."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.clm_data import (
    IGNORED,
    Pairs,
    Record,
    check_rows,
    named_pair,
    recognised_pairs,
)
from recipes.seq2seq_options import DataTrainingArguments
from recipes.tables import Table, columns_in


@dataclass(frozen=True)
class SourceRecord(Record):
    """Tokens of a source, `input_ids`, and of its target, `labels`."""

    @property
    def has_target(self) -> bool:
        return any(label != IGNORED for label in self.labels)


@dataclass(frozen=True)
class SourceTarget(Pairs):
    """The encoder reads the source and an end token; the loss is on the target and its end token.

    Args:
        max_source_length: tokens, the end included; of a longer source the beginning is kept.
    """

    max_source_length: int

    def unit(self, block_size: int) -> str:
        source = f"a source of at most {self.max_source_length} tokens"
        return f"one row: {source} with its target of at most {block_size} tokens"

    def prompt_ids(self, prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Tokens of the sources."""
        rows = _with_end(tokenizer(prompts, verbose=False)["input_ids"], tokenizer)
        return [_cut(row, self.max_source_length) for row in rows]

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        """Source and target of every row; `block_size` is the most tokens of a target."""
        sources = _with_end(tokenizer(self.prompts(rows), verbose=False)["input_ids"], tokenizer)
        targets = _with_end(tokenizer(text_target=list(rows[self.target]), verbose=False)["input_ids"], tokenizer)
        for source, target in zip(sources, targets, strict=True):
            is_cut = len(source) > self.max_source_length or len(target) > block_size
            yield SourceRecord(_cut(source, self.max_source_length), target[:block_size], is_cut)


def _with_end(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens with the special ones of the model, and an end where its tokenizer adds none."""
    end = tokenizer.eos_token_id
    return [row if row[-1:] == [end] else [*row, end] for row in rows]


def _cut(row: list[int], most: int) -> list[int]:
    """The beginning of a source, with its end token."""
    return row if len(row) <= most else [*row[: most - 1], row[-1]]


def find_pairs(
    tables: Mapping[str, Table], args: DataTrainingArguments, user_id_column: str | None = None
) -> SourceTarget:
    """Sources and targets: the named columns, else those whose names say it.

    Args:
        user_id_column: of the training table.

    Raises:
        DPConfigError: if columns are missing, if none or several fit, or if a row does not.
    """
    first = next(iter(tables.values()))
    named = named_pair(first, args)
    pairs = recognised_pairs(first, args) if named is None else [named]
    if len(pairs) != 1:
        raise DPConfigError(
            f"{first.name}: {'no' if not pairs else 'more than one'} source and target recognised among the columns "
            f"{columns_in(first)}. Name them with --prompt_column and --target_column."
        )
    (template, target), *_ = pairs
    kind = SourceTarget(template, target, separator="", max_source_length=args.max_source_length)
    check_rows(kind, tables, user_id_column)
    return kind
