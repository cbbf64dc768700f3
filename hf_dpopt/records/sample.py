"""A sample of a dataset's rows as they are stored, in runs of neighbours, for the checks before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hf_dpopt.records.rows import is_stored, read_rows

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
        if is_stored(dataset):
            schema, heavy = dataset.data.schema, ("struct", "binary", "large_binary")  # pictures and sounds
            names = [name for name in dataset.column_names if not str(schema.field(name).type).startswith(heavy)]
            stored = dataset.with_format("arrow", columns=names)
            parts = [stored[part.start : part.stop].to_pylist() for part in _runs(len(dataset))]
        elif isinstance(dataset, (list, tuple)):
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
