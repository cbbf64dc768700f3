"""A sample of a dataset's rows as they are stored, in runs of neighbours, for the checks before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hf_dpopt.records.rows import read_rows

NUM_PARTS, PART_SIZE = 4, 1000  # runs of neighbouring rows, spread over the dataset
NUM_LAZY_ROWS = 64  # of a dataset that makes its rows when they are asked for

Part = dict[str, list[Any]]  # column -> values of neighbouring rows


class Sample:
    """Runs of neighbouring rows.

    Args:
        parts: one mapping for each run: column -> one value per row, an array for lists of numbers.
    """

    def __init__(self, parts: list[Part]):
        self.parts = parts

    @classmethod
    def of(cls, dataset: Any) -> Sample | None:
        """Sample the stored rows, or the first rows of a dataset without columns; None if rows are not mappings."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
            return None
        names, form = getattr(dataset, "column_names", None), getattr(dataset, "format", None)
        is_stored = isinstance(names, list) and isinstance(form, dict) and form.get("type") != "custom"
        if is_stored and hasattr(dataset, "with_format"):
            stored = dataset.with_format("arrow")
            return cls([_of_table(stored[part.start : part.stop]) for part in _runs(len(dataset))])
        if isinstance(dataset, (list, tuple)):
            parts = [list(dataset[part.start : part.stop]) for part in _runs(len(dataset))]
        else:
            parts = [[row for rows in read_rows(dataset, range(min(NUM_LAZY_ROWS, len(dataset)))) for row in rows]]
        if not any(parts) or not all(isinstance(row, Mapping) for rows in parts for row in rows):
            return None
        return cls([_of_rows(rows) for rows in parts])

    def has(self, name: str) -> bool:
        """Whether the rows have such a column."""
        return all(name in part for part in self.parts)

    def is_list(self, name: str) -> bool:
        """Whether the values of a column are lists of numbers."""
        return all(isinstance(value, np.ndarray) for part in self.parts for value in part.get(name, [None]))

    def arrays(self, name: str) -> Iterator[list[np.ndarray]]:
        """The lists of numbers in a column, run by run; nothing if it holds anything else."""
        if self.is_list(name):
            yield from (part[name] for part in self.parts)

    def masked(self, name: str) -> Iterator[tuple[list[np.ndarray], list[np.ndarray] | None]]:
        """The lists of a column, with their attention masks where there are any."""
        masks = self.is_list("attention_mask")
        if self.is_list(name):
            yield from ((part[name], part["attention_mask"] if masks else None) for part in self.parts)

    def scalars(self, name: str) -> Iterator[list[Any]]:
        """The plain values in a column, run by run; nothing if it holds lists or missing values."""
        plain = (int, str, bytes)
        if self.has(name) and all(isinstance(value, plain) for part in self.parts for value in part[name]):
            yield from (part[name] for part in self.parts)


def _runs(num_rows: int) -> list[range]:
    if num_rows <= NUM_PARTS * PART_SIZE:
        return [range(num_rows)]
    starts = np.linspace(0, num_rows - PART_SIZE, NUM_PARTS).astype(int)
    return [range(start, start + PART_SIZE) for start in starts.tolist()]


def _of_table(table: Any) -> Part:
    """The columns of an Arrow table that hold lists of numbers or plain values."""
    import pyarrow as pa

    part: Part = {}
    for name in table.column_names:
        column = table.column(name)
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            is_flat = pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
            part[name] = _lists(column) if is_flat and not column.null_count else [None] * len(column)
        elif pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            part[name] = column.to_pylist()
        else:
            part[name] = [None] * len(column)
    return part


def _lists(column: Any) -> list[np.ndarray]:
    import pyarrow.compute as pc

    rows: list[np.ndarray] = []
    whole = column.combine_chunks()  # rows that were shuffled come in chunks of one
    for chunk in getattr(whole, "chunks", [whole]):
        values = pc.list_flatten(chunk).to_numpy(zero_copy_only=False)
        cuts = np.cumsum(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))[:-1]
        rows += np.split(values, cuts) if len(chunk) else []
    return rows


def _of_rows(rows: list[Mapping[str, Any]]) -> Part:
    names = set(rows[0]).intersection(*map(set, rows)) if rows else set()
    return {name: [_plain(row[name]) for row in rows] for name in names}


def _plain(value: Any) -> Any:
    """Lists and tensors of whole numbers as arrays, single ones as numbers; others as they are."""
    if isinstance(value, (str, bytes, int)) or value is None:
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.ndim == 1 and array.dtype.kind in "iub":
        return array
    return array.item() if array.ndim == 0 and array.dtype.kind in "iu" else None
