"""Records longer than the table in which a model looks up positions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import class_of

WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)")  # what adapters put around a layer
POSITION_TABLE = re.compile(r"(^|\.)(position_embeddings|wpe|embed_positions|positions_embed)$")


@dataclasses.dataclass(frozen=True)
class Positions:
    """A table in which positions are looked up.

    Args:
        most: largest number of tokens of a record that have a position.
        padding: token that takes no position (RoBERTa); None if every token takes one.
    """

    most: int
    padding: int | None


def positions(model: nn.Module, column: str) -> Positions | None:
    """The smallest table that reads the tokens of `column` (input_ids, or labels of a decoder); None if computed."""
    config = getattr(model, "config", None)
    has_encoder = getattr(config, "is_encoder_decoder", False)
    found = []
    for path, module in model.named_modules():
        name = WRAPPED.sub("", path)
        of_decoder = re.search(r"(^|\.)decoder\.", name) is not None
        if not POSITION_TABLE.search(name) or (has_encoder and of_decoder != (column == "labels")):
            continue
        # subclasses may grow or clamp; learned tables that start at an offset are looked up as they are
        if class_of(module) is not nn.Embedding and not class_of(module).__name__.endswith(
            "LearnedPositionalEmbedding"
        ):
            continue
        first = getattr(module, "offset", None)
        padding = module.padding_idx if first is None else None  # type: ignore[union-attr]
        rows = module.num_embeddings - (first or 0 if padding is None else padding + 1)  # type: ignore[operator]
        declared = getattr(config, "max_position_embeddings", None) or rows
        found.append(Positions(min(rows, declared) - _num_virtual_tokens(model), padding))
    return min(found, key=lambda table: table.most, default=None)


def _num_virtual_tokens(model: nn.Module) -> int:
    """Number of positions that prompts and prefixes of adapters take."""
    configs = getattr(model, "peft_config", None)
    return sum(
        getattr(c, "num_virtual_tokens", 0) or 0 for c in (configs.values() if isinstance(configs, dict) else ())
    )


def check_lengths(train_dataset: Any, model: nn.Module) -> None:
    """Refuse records longer than a table of positions, which would end the run in the step that samples them.

    Checks what is tokenized: columns of a dataset, or records in a list; input_ids, and labels of a decoder.
    """
    columns = ["input_ids"]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        columns.append("labels")
    for column in columns:
        table = positions(model, column)
        if table is not None and any(
            _length(row, table) > table.most for row in _long_rows(train_dataset, column, table)
        ):
            raise DPConfigError(
                f"The {column} of some training records are longer than the {table.most} positions of the model. "
                f"Cut them when they are tokenized: tokenizer(..., truncation=True, max_length={table.most})."
            )


def _length(row: Any, table: Positions) -> int:
    return len(row) if table.padding is None else sum(int(token) != table.padding for token in row)


def num_entries(row: Any) -> int:
    """Length of a row; 0 of what has none, such as a number, also where it is a tensor."""
    try:
        return len(row) if isinstance(row, Sized) else 0
    except TypeError:
        return 0


def _long_rows(train_dataset: Any, column: str, table: Positions) -> Iterator[Any]:
    """Values of the column with more entries than the table; records that are made on request are not examined."""
    names, form = getattr(train_dataset, "column_names", None), getattr(train_dataset, "format", None)
    if isinstance(train_dataset, list):
        rows = (row.get(column) for row in train_dataset if isinstance(row, Mapping))
        yield from (row for row in rows if num_entries(row) > table.most)
    elif isinstance(names, list) and column in names and isinstance(form, dict) and form.get("type") != "custom":
        import pyarrow as pa
        import pyarrow.compute as pc

        for batch in train_dataset.with_format("arrow", columns=[column]).iter(10_000):
            values = batch.column(column)
            kind = values.type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
                return
            yield from values.filter(pc.greater(pc.list_value_length(values), table.most)).to_pylist()
