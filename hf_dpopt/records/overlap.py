"""Overlap of an evaluation set with the training set: metrics on training records are exact, un-noised values.

A view of the training set (a shared Arrow table, `Subset`, `ConcatDataset`, rows of one list) with one common row is
found by where rows are stored. Copies (`map`, `list(dataset)`, another reading of the same file) are found by the hash
of what their columns hold: if, in a column that tells records apart, at least half of a sample of rows is in the
training set. One text that occurs in both by nature is no reason.

Not found: a copy whose columns were all changed (cut to another length, other tokens, random augmentation of another
store), rows without texts or lists unless all their numbers agree, and streams of torch.
"""

from __future__ import annotations

import array
import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.records.positions import num_entries

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

HALF = 0.5  # of the sampled rows, that is too much
NUM_SAMPLED = 512  # rows that are compared, if all of the training set was read
MAX_SAMPLED = 20_000  # if only a part of it was
BLOCK, LAZY_BLOCK = 2048, 64  # rows that are read at once; of a dataset whose rows may take long
SECONDS_STORED, SECONDS_SERVED = 4.0, 1.5  # for reading a training set: from an Arrow table, row by row
DISTINCT = 0.9  # of a sample of the training rows, in a column that tells records apart
SHARE_OF_LARGEST = 0.5  # a column that holds less than that (ids, file names) is no evidence
MIN_BYTES = 8.0  # on average; shorter ones are alike by nature
ENOUGH = 4.0  # matches that half of the rows would make, below which a part of the training set proves nothing
MAX_DEPTH = 8  # of datasets that wrap others
BASE = np.uint64(0x9E3779B97F4A7C15)

Leaf = tuple[Any, np.ndarray]  # a dataset that is no view of another one, and numbers of rows in it
Key = tuple[str, str]  # name of a column (of a field of it), and kind: ints, floats, bytes, or scalar
Hashes = tuple[np.ndarray, np.ndarray]  # hashes, uint64, and sizes in bytes, 4 of an integer, (rows,)


class TrainingRows:
    """The rows of a training set, for comparison; read once, when they are first needed.

    Args:
        dataset: the training set, map-style or a list; None if there is none.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._known: dict[bool, _Known] = {}

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
        if not hasattr(self.dataset, "__len__") or not len(self.dataset):
            return False
        # Arrow tables hold other values than Python reads where something is decoded or transformed on the way.
        is_changed = _is_changed_when_read(dataset) or _is_changed_when_read(self.dataset)
        return any(self._hold(dataset, share, as_stored) for as_stored in ((True, False) if is_changed else (True,)))

    def _hold(self, dataset: Any, share: float, as_stored: bool) -> bool:
        if as_stored not in self._known:
            self._known[as_stored] = _Known(leaves(self.dataset), as_stored)
        known = self._known[as_stored]
        return known.holds(share, *_sample(dataset, known.share_read, as_stored))


class _Known:
    """Hashes of all training rows, or of as many as could be read in time, at random places."""

    def __init__(self, found: list[Leaf], as_stored: bool):
        in_arrow = as_stored and all(is_a(dataset, "Dataset") for dataset, _ in found)
        num_read, merged = _read(found, as_stored, SECONDS_STORED if in_arrow else SECONDS_SERVED)
        self.share_read = num_read / max(1, sum(len(rows) for _, rows in found))
        self._scalars = {name: hashes for (name, kind), (hashes, _) in merged.items() if kind == "scalar"}
        self._carriers = [(kind, np.unique(merged[name, kind][0])) for name, kind in _carriers(merged)]

    def holds(self, share: float, num_rows: int, table: dict[Key, Hashes]) -> bool:
        """Whether that share of the sampled rows is among these, in a column that tells records apart."""
        if not num_rows:
            return False
        needed = share * num_rows * self.share_read
        if self.share_read < 1:
            half = HALF * num_rows * self.share_read
            if share >= HALF and half < ENOUGH:
                return False
            needed = max(needed, min(ENOUGH, half))  # of a few rows, a tenth may be chance
        columns = [(key[1], hashes) for key, (hashes, _) in table.items() if key[1] != "scalar"]
        pairs = [(known, hashes) for kind, hashes in columns for of, known in self._carriers if of == kind]
        if not self._carriers:
            pairs = self._of_numbers({name: hashes for (name, kind), (hashes, _) in table.items() if kind == "scalar"})
        return any(np.isin(hashes, known).sum() >= needed for known, hashes in pairs)

    def _of_numbers(self, scalars: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of hashes for rows that hold single numbers only: all columns that both have, combined."""
        common = sorted(scalars.keys() & self._scalars.keys())
        if len(common) < 2 or len({len(self._scalars[name]) for name in common}) > 1:
            return []
        known, ours = (
            functools.reduce(lambda total, hashes: (total ^ hashes) * BASE, [of[name] for name in common])
            for of in (self._scalars, scalars)
        )
        return [(np.unique(known), ours)] if _distinct(known) >= DISTINCT else []


def _carriers(merged: dict[Key, Hashes]) -> list[Key]:
    """The columns that carry the record."""
    sizes = {
        key: float(sizes.mean())
        for key, (hashes, sizes) in merged.items()
        if key[1] != "scalar" and _distinct(hashes) >= DISTINCT
    }
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


def _sample(dataset: Any, share_read: float, as_stored: bool) -> tuple[int, dict[Key, Hashes]]:
    """Hashes of rows at random places; more rows if less of the training set is known."""
    if not hasattr(dataset, "__len__"):
        # a stream of `datasets` starts anew at each reading; others may not
        head = list(islice(iter(dataset), NUM_SAMPLED)) if is_a(dataset, "IterableDataset") else []
        return len(head), hashes_of(head)
    wanted = min(len(dataset), MAX_SAMPLED, int(NUM_SAMPLED / max(share_read, 1e-9)) + 1)
    places = np.random.default_rng(len(dataset)).permutation(len(dataset))[:wanted]
    return _read(leaves(dataset, places), as_stored, SECONDS_SERVED)


def _read(found: list[Leaf], as_stored: bool, seconds: float) -> tuple[int, dict[Key, Hashes]]:
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
    num_rows, parts, ends = 0, dict[Key, list[Hashes]](), time.monotonic() + seconds
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
        are_neighbours = len(rows) == rows[-1] - rows[0] + 1 and bool((np.diff(rows) == 1).all())
        places = slice(int(rows[0]), int(rows[-1]) + 1) if are_neighbours else rows.tolist()
        return dataset.with_format("arrow")[places].to_pylist()
    read = []
    for i in rows.tolist():
        try:
            read.append(dataset[i])
        except Exception:  # whatever the dataset raises
            continue
    return read


# --- rows that two datasets store together ---------------------------------------------------------------------------


def is_a(dataset: Any, name: str) -> bool:
    """Whether this is a `datasets.Dataset` or `IterableDataset`: whoever holds one has imported that library."""
    return isinstance(dataset, getattr(sys.modules.get("datasets"), name, ()))


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
            is_dataset = isinstance(inner, (list, tuple, torch.utils.data.Dataset)) or is_a(inner, "Dataset")
            if is_dataset and num_entries(inner) == length:
                yield from _unwrapped(leaves(inner, rows), depth + 1)


def _disjoint(ours: Leaf, theirs: Leaf) -> bool:
    """Whether the rows lie in different memory: copies of a table share it, whatever became of its other columns."""
    (mine, my_rows), (other, rows) = ours, theirs
    if mine is other:
        return not np.isin(my_rows, rows).any()
    if not (is_a(mine, "Dataset") and is_a(other, "Dataset")):
        return True
    my_chunks, other_chunks = _chunks(mine._data), _chunks(other._data)
    my_rows, rows = _stored_rows(mine, my_rows), _stored_rows(other, rows)
    common = my_chunks.keys() & other_chunks.keys()
    return not any(np.isin(_at(my_rows, my_chunks[a]), _at(rows, other_chunks[a])).any() for a in common)


def _stored_rows(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Numbers of a dataset's rows in its Arrow table."""
    return rows if dataset._indices is None else dataset._indices.column(0).to_numpy().astype(np.int64)[rows]


def _chunks(table: Any) -> dict[int, list[tuple[int, int, int]]]:
    """Address of a buffer -> the places of the table's rows in it: first row, number of rows, first place.

    Datasets with nothing else in common may share numbers (an array of labels), so texts and lists count where there
    are any.
    """
    columns = [column for column in table.itercolumns() if _may_carry_a_record(column.type)]
    found: dict[int, list[tuple[int, int, int]]] = {}
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


def _at(rows: np.ndarray, chunks: list[tuple[int, int, int]]) -> np.ndarray:
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
        _collect(str(name), value, found, is_scalar=True)
    return {key: parts[0] if len(parts) == 1 else b"".join(parts) for key, parts in found.items()}


def _fields(row: Any) -> Mapping[Any, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, (tuple, list)):
        return dict(enumerate(row))
    is_values = hasattr(row, "__array__") or hasattr(row, "__array_interface__")  # a tensor, an image
    return vars(row) if hasattr(row, "__dict__") and not is_values else {"": row}


def _collect(name: str, value: Any, found: dict[Key, list[bytes]], *, is_scalar: bool) -> None:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            _collect(f"{name}.{field}", inner, found, is_scalar=is_scalar)
    elif isinstance(value, (str, bytes)):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        found.setdefault((name, "bytes"), []).append(content)
    elif isinstance(value, (list, tuple)):
        integers = _integers(value)
        if integers is not None:
            found.setdefault((name, "ints"), []).append(integers)
            return
        for inner in value:
            _collect(name, inner, found, is_scalar=False)
    elif value is not None:
        numbers = _as_array(value)
        if numbers is not None:
            is_float = numbers.dtype.kind == "f"
            kind = "scalar" if is_scalar and numbers.ndim == 0 else "floats" if is_float else "ints"
            # single precision is what file formats keep
            content = numbers.astype(np.float32 if is_float else np.int64).tobytes()
            found.setdefault((name, kind), []).append(content)


def _integers(values: Sequence[Any]) -> bytes | None:
    """Return the integers of a list, the most frequent kind of record; None for anything else."""
    try:
        return array.array("q", values).tobytes() if values else None
    except (TypeError, OverflowError):
        return None


def _as_array(value: Any) -> np.ndarray | None:
    """Return the numbers of a tensor, an array, an image, or one number; None for what holds none."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        if not hasattr(value, "tobytes"):
            return None
        value = np.frombuffer(value.tobytes(), dtype=np.uint8)  # an image
    values = np.asarray(value)
    return values if values.dtype.kind in "biuf" else None
