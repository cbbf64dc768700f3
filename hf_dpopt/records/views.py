"""Detection of datasets that view one store: a shared Arrow table, `Subset`, `ConcatDataset`, rows of one list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_dpopt.records.arrow import is_arrow

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Leaf = tuple[Any, np.ndarray]  # a dataset that is no view of another one, and numbers of rows in it
MAX_DEPTH = 8  # of datasets that wrap others

_Chunk = tuple[int, int, int]  # first row in the table, number of rows, position of the first row in the buffer


def share_rows(ours: Any, theirs: Any) -> bool:
    """Whether a stored row belongs to both datasets; copies are not found.

    Args:
        ours, theirs: map-style datasets or lists, nested in `Subset` and `ConcatDataset` as deep as they like.
    """
    fingerprint = getattr(ours, "_fingerprint", None)
    if ours is theirs or (fingerprint is not None and fingerprint == getattr(theirs, "_fingerprint", None)):
        return True
    mine, other = (list(_unwrapped(leaves(x))) for x in (ours, theirs))
    if any(not _disjoint(a, b) for a in mine for b in other):
        return True
    return not _identities(mine).isdisjoint(_identities(other))


def leaves(dataset: Any, rows: np.ndarray | None = None) -> list[Leaf]:
    """The datasets that `dataset` is a view of, with the numbers of its rows in them; none if it has no length."""
    if rows is None:
        if not hasattr(dataset, "__len__"):
            return []
        rows = np.arange(len(dataset))
    if isinstance(dataset, torch.utils.data.Subset):
        return leaves(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[rows])
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes, dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        rows = np.where(rows < 0, rows + ends[-1], rows)
        part = np.searchsorted(ends, rows, side="right")
        split = [leaves(d, rows[part == i] - starts[i]) for i, d in enumerate(dataset.datasets)]
        return [leaf for found in split for leaf in found]
    return [(dataset, np.where(rows < 0, rows + len(dataset), rows))] if len(rows) else []


def _unwrapped(found: Iterable[Leaf], depth: int = 0) -> Iterable[Leaf]:
    """The leaves, and the datasets of the same length that they wrap.

    A dataset that augments at random gives other contents at each reading; the dataset it wraps does not.
    """
    for dataset, rows in found:
        yield dataset, rows
        if depth == MAX_DEPTH or not isinstance(dataset, torch.utils.data.Dataset):
            continue
        length = len(rows) and len(dataset)  # type: ignore[arg-type]  # a leaf has one
        for inner in vars(dataset).values():
            is_dataset = isinstance(inner, (list, tuple, torch.utils.data.Dataset)) or is_arrow(inner)
            if is_dataset and _has_length(inner, length):
                yield from _unwrapped(leaves(inner, rows), depth + 1)


def _has_length(inner: Any, length: int) -> bool:
    try:
        return len(inner) == length
    except TypeError:
        return False


def _disjoint(ours: Leaf, theirs: Leaf) -> bool:
    (mine, my_rows), (other, other_rows) = ours, theirs
    if mine is other:
        return not np.isin(my_rows, other_rows).any()
    if is_arrow(mine) and is_arrow(other):
        return _disjoint_tables(mine, my_rows, other, other_rows)
    return True


def _disjoint_tables(mine: Dataset, my_rows: np.ndarray, other: Dataset, rows: np.ndarray) -> bool:
    """Whether the rows lie in different memory: copies of a table share it, whatever became of its other columns."""
    my_chunks, other_chunks = _chunks(mine._data), _chunks(other._data)
    common = my_chunks.keys() & other_chunks.keys()
    if not common:
        return True
    my_rows, rows = stored_rows(mine, my_rows), stored_rows(other, rows)
    return not any(np.isin(_at(my_rows, my_chunks[a]), _at(rows, other_chunks[a])).any() for a in common)


def stored_rows(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Numbers of a dataset's rows in its Arrow table."""
    return rows if dataset._indices is None else dataset._indices.column(0).to_numpy().astype(np.int64)[rows]


def _chunks(table: Any) -> dict[int, list[_Chunk]]:
    """Address of a buffer -> the places of the table's rows in it.

    Datasets with nothing else in common may share numbers (an array of labels), so texts and lists count where there
    are any.
    """
    columns = [column for column in table.itercolumns() if _may_carry_a_record(column.type)]
    found: dict[int, list[_Chunk]] = {}
    for column in columns or table.itercolumns():
        start = 0
        for chunk in column.chunks:
            buffers = [b for b in chunk.buffers() if b is not None and b.size > 0]
            if len(chunk) and buffers:
                found.setdefault(buffers[-1].address, []).append((start, len(chunk), chunk.offset))
            start += len(chunk)
    return found


def _may_carry_a_record(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return pa.types.is_nested(kind) or any(is_text(kind) for is_text in texts)


def _at(rows: np.ndarray, chunks: list[_Chunk]) -> np.ndarray:
    """Positions of rows in a buffer."""
    places = [rows[(rows >= start) & (rows < start + length)] - start + offset for start, length, offset in chunks]
    return np.concatenate(places)


def _identities(found: Iterable[Leaf]) -> set[int]:
    """Identities of the rows of lists, which slices and copies keep; not of numbers and texts, which Python shares."""
    return {
        id(row)
        for dataset, rows in found
        if isinstance(dataset, (list, tuple))
        for row in (dataset[i] for i in rows.tolist())
        if not isinstance(row, (str, bytes, int, float, type(None)))
    }
