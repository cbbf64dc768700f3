"""Overlap of an evaluation set with the training set: metrics on training records are exact, un-noised values.

A view of the training set (a shared Arrow table, `Subset`, `ConcatDataset`, rows of one list) with one common row is
found by where rows are stored. Copies (`map`, `list(dataset)`, another reading of the same file) are found by the hash
of what their columns hold: if, in a column that tells records apart, at least half of a sample of rows is in the
training set. One text that occurs in both by nature is no reason.

Not found: a copy whose columns were all changed (cut to another length, other tokens, random augmentation of another
store), rows of single numbers without a text or a list, and streams of torch.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.records.limits import num_entries

if TYPE_CHECKING:
    import pyarrow as pa

HALF = 0.5  # of the sampled rows, that is too much
NUM_SAMPLED = 512  # rows that are compared, if all of the training set was read
MAX_SAMPLED = 20_000  # if only a part of it was
BLOCK, LAZY_BLOCK = 2048, 64  # rows that are read at once; of a dataset whose rows may take long
SECONDS = 2.0  # for reading a dataset
DISTINCT = 0.9  # of a sample of the training rows, in a column that tells records apart
SHARE_OF_LARGEST = 0.5  # a column that holds less than that (ids, file names) is no evidence
MIN_BYTES = 8.0  # on average; shorter ones are alike by nature
ENOUGH = 4.0  # rows that are in a part of the training set; fewer may be chance
MAX_DEPTH = 8  # of datasets that wrap others
BASE = 0x9E3779B97F4A7C15

Leaf = tuple[Any, np.ndarray]  # a dataset that is no view of another one, and numbers of rows in it
Key = tuple[str, str]  # name of a column (of a field of it), and kind: ints, floats or bytes
Hashes = tuple[np.ndarray, np.ndarray]  # hashes, uint64, and sizes in bytes, 4 of an integer, (rows,)


class TrainingRows:
    """The rows of a training set, for comparison; read once, when they are first needed.

    Args:
        dataset: the training set, map-style or a list; None if there is none.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._known = functools.cache(lambda as_stored: _Known(leaves(dataset), as_stored))

    def make_up(self, dataset: Any, share: float = HALF) -> bool:
        """Whether a dataset shares stored rows with these, or at least a share of it consists of copies of them.

        The answer is that of rank 0 on every rank: how much can be read depends on time.

        Args:
            dataset: another dataset; None for none.
            share: part of its rows, in (0, 1].
        """
        if dataset is None or self.dataset is None:
            return False
        return current_ranks().same(lambda: share_rows(dataset, self.dataset) or self._are_copied_in(dataset, share))

    def _are_copied_in(self, dataset: Any, share: float) -> bool:
        # Arrow tables hold other values than Python reads where something is decoded or transformed on the way.
        is_changed = _is_changed_when_read(dataset) or _is_changed_when_read(self.dataset)
        return any(self._known(as_stored).holds(dataset, share) for as_stored in (True, False)[: 1 + is_changed])


class _Known:
    """Hashes of all training rows, or of as many as could be read in time, at random places."""

    def __init__(self, found: list[Leaf], as_stored: bool):
        num_read, merged = _read(found, as_stored)
        self._as_stored, self._share_read = as_stored, num_read / max(1, sum(len(rows) for _, rows in found))
        self._carriers = [(kind, np.unique(merged[name, kind][0])) for name, kind in _carriers(merged)]

    def holds(self, dataset: Any, share: float) -> bool:
        """Whether that share of a sample of rows is among these, in a column that tells records apart."""
        if not self._carriers:
            return False
        num_rows, table = self._sample(dataset)
        needed = max(share * num_rows * self._share_read, ENOUGH if self._share_read < 1 else 1)
        columns = [(kind, hashes) for (_, kind), (hashes, _) in table.items()]
        pairs = ((known, hashes) for kind, hashes in columns for of, known in self._carriers if of == kind)
        return any(np.isin(hashes, known).sum() >= needed for known, hashes in pairs)

    def _sample(self, dataset: Any) -> tuple[int, dict[Key, Hashes]]:
        """Hashes of rows at random places; more rows if less of the training set is known."""
        if not hasattr(dataset, "__len__"):
            # a stream of `datasets` starts anew at each reading; others may not
            head = list(islice(iter(dataset), NUM_SAMPLED)) if is_a(dataset, "IterableDataset") else []
            return len(head), hashes_of(head)
        wanted = min(len(dataset), MAX_SAMPLED, int(NUM_SAMPLED / self._share_read) + 1)
        places = np.random.default_rng(len(dataset)).permutation(len(dataset))[:wanted]
        return _read(leaves(dataset, places), self._as_stored)


def _carriers(merged: dict[Key, Hashes]) -> list[Key]:
    """The columns that carry the record."""
    sizes = {key: float(sizes.mean()) for key, (hashes, sizes) in merged.items() if _distinct(hashes) >= DISTINCT}
    least = max(MIN_BYTES, SHARE_OF_LARGEST * max(sizes.values(), default=0.0))
    return [key for key, size in sizes.items() if size >= least]


def _distinct(hashes: np.ndarray) -> float:
    """Share of distinct hashes in an evenly spaced sample, in [0, 1]."""
    some = hashes[:: max(1, len(hashes) // NUM_SAMPLED)]
    return len(np.unique(some)) / max(1, len(some))


# --- reading ---


def _is_changed_when_read(dataset: Any) -> bool:
    """Whether a transform, or the decoding of images and sounds, lies between the table and what is read."""
    tables = [leaf for leaf, _ in leaves(dataset) if is_a(leaf, "Dataset")]
    return any(
        t._format_type == "custom" or any(t.features._column_requires_decoding.get(name) for name in t.column_names)
        for t in tables
    )


def _read(found: list[Leaf], as_stored: bool) -> tuple[int, dict[Key, Hashes]]:
    """Read rows at random places until the time is over; return their number, hashes and sizes.

    Args:
        found: datasets and numbers of rows in them.
        as_stored: read the Arrow tables, not what the datasets make of them.
    """
    blocks = list[Leaf]()
    for dataset, rows in found:
        if not is_a(dataset, "Dataset"):  # of a table, neighbours are read together
            rows = np.random.default_rng(len(rows)).permutation(rows)
        size = BLOCK if is_a(dataset, "Dataset") or isinstance(dataset, (list, tuple)) else LAZY_BLOCK
        blocks += [(dataset, rows[start : start + size]) for start in range(0, len(rows), size)]
    num_rows, parts, ends = 0, dict[Key, list[Hashes]](), time.monotonic() + SECONDS
    for i in np.random.default_rng(len(blocks)).permutation(len(blocks)).tolist():
        dataset, rows = blocks[i]
        values = _values(dataset, rows, as_stored)
        num_rows += len(values)
        for key, hashes in hashes_of(values).items():
            parts.setdefault(key, []).append(hashes)
        if time.monotonic() > ends:
            break
    return num_rows, {
        key: (np.concatenate([hashes for hashes, _ in some]), np.concatenate([sizes for _, sizes in some]))
        for key, some in parts.items()
    }


def _values(dataset: Any, rows: np.ndarray, as_stored: bool) -> list[Any]:
    """Rows as an Arrow table stores them, or as Python reads them; one that cannot be read is no copy."""
    if as_stored and is_a(dataset, "Dataset"):
        return dataset.with_format("arrow")[rows.tolist()].to_pylist()
    read = []
    for i in rows.tolist():
        try:
            read.append(dataset[i])
        except Exception:  # whatever the dataset raises
            continue
    return read


# --- rows that two datasets store together ---------------------------------------------------------------------------


def is_a(dataset: Any, name: str) -> bool:
    """Whether this is of that class of `datasets`: whoever holds one has imported that library."""
    return isinstance(dataset, getattr(sys.modules.get("datasets"), name, ()))


def share_rows(ours: Any, theirs: Any) -> bool:
    """Whether a stored row belongs to both datasets; copies are not found.

    Args:
        ours, theirs: map-style datasets or lists, nested in `Subset` and `ConcatDataset` as deep as they like.
    """
    mine, other = (_places(_unwrapped(leaves(dataset))) for dataset in (ours, theirs))
    return bool(np.isin(mine, other).any())


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
            is_dataset = isinstance(inner, (list, tuple, torch.utils.data.Dataset)) or is_a(inner, "Dataset")
            if is_dataset and num_entries(inner) == length:
                yield from _unwrapped(leaves(inner, rows), depth + 1)


def _places(found: Iterable[Leaf]) -> np.ndarray:
    """Places of rows in memory, uint64: a row and its views share one, whatever became of their other columns."""
    places = [np.empty(0, np.uint64)]
    for dataset, rows in found:
        places.append(_place(id(dataset), rows))
        if isinstance(dataset, (list, tuple)):  # slices and copies keep its rows; numbers and texts Python shares
            each = (dataset[i] for i in rows.tolist())
            ids = [id(row) for row in each if not isinstance(row, (str, bytes, int, float, type(None)))]
            places.append(np.array(ids, np.uint64))
        elif is_a(dataset, "Dataset"):
            indices = dataset._indices
            rows = np.sort(rows if indices is None else indices.column(0).to_numpy().astype(np.int64)[rows])
            # Datasets with nothing else in common may share numbers (an array of labels), so texts and lists count
            # where there are any.
            columns = [column for column in dataset._data.itercolumns() if _may_carry_a_record(column.type)]
            for column in columns or dataset._data.itercolumns():
                start = 0
                for chunk in column.chunks:
                    first, last = np.searchsorted(rows, [start, start + len(chunk)])
                    buffers = [b for b in chunk.buffers() if b is not None and b.size > 0]
                    if buffers:
                        places.append(_place(buffers[-1].address, rows[first:last] - start + chunk.offset))
                    start += len(chunk)
    return np.concatenate(places)


def _place(address: int, rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.uint64) + np.uint64(address * BASE % 2**64)


def _may_carry_a_record(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return pa.types.is_nested(kind) or any(is_text(kind) for is_text in texts)


# --- contents --------------------------------------------------------------------------------------------------------


def hashes_of(rows: Sequence[Any]) -> dict[Key, Hashes]:
    """Return the hashes of rows, column by column: equal for a row in a table and for the same row read by Python.

    The content of a row in a column is a sequence of numbers: bytes of a string, elements of a list, however nested.
    Hashes hold within one process.

    Args:
        rows: mappings, tuples, or values.
    """
    contents = [content_of(row) for row in rows]
    found = {}
    for key in {key for content in contents for key in content}:
        values = [content.get(key, b"") for content in contents]
        hashes = np.array([hash(value) for value in values], dtype=np.int64).view(np.uint64)
        found[key] = hashes, np.array([len(value) for value in values]) / (2 if key[1] == "ints" else 1)
    return found


def content_of(row: Any) -> dict[Key, bytes]:
    """Return the content of a row, by field."""
    found: dict[Key, list[bytes]] = {}
    for name, value in _fields(row).items():
        _collect(str(name), value, found)
    return {key: parts[0] if len(parts) == 1 else b"".join(parts) for key, parts in found.items()}


def _fields(row: Any) -> Mapping[Any, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, (tuple, list)):
        return dict(enumerate(row))
    is_values = hasattr(row, "__array__") or hasattr(row, "__array_interface__")  # a tensor, an image
    return vars(row) if hasattr(row, "__dict__") and not is_values else {"": row}


def _collect(name: str, value: Any, found: dict[Key, list[bytes]]) -> None:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            _collect(f"{name}.{field}", inner, found)
    elif isinstance(value, (str, bytes)):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        found.setdefault((name, "bytes"), []).append(content)
    elif (numbers := _numbers(value)) is not None:
        is_float = numbers.dtype.kind == "f"
        # single precision is what file formats keep
        content = numbers.astype(np.float32 if is_float else np.int64).tobytes()
        found.setdefault((name, "floats" if is_float else "ints"), []).append(content)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _collect(name, inner, found)


def _numbers(value: Any) -> np.ndarray | None:
    """Return the numbers of a flat list, a tensor, an array, an image, or one number; None for what holds none."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    elif isinstance(value, (list, tuple)):
        if not value or not isinstance(value[0], (int, float, np.generic)):
            return None
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        if not hasattr(value, "tobytes"):
            return None
        value = np.frombuffer(value.tobytes(), dtype=np.uint8)  # an image
    try:
        values = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return values if values.dtype.kind in "biuf" else None
