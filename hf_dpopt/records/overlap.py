"""Overlap of an evaluation set with the training set: metrics on training records are exact, un-noised values.

A view of the training set (a shared Arrow table, `Subset`, `ConcatDataset`, rows of one list) with one common row is
found by where rows are stored. Copies (`map`, `list(dataset)`, another reading of the same file) are found by the hash
of what their columns hold: if, in a column that tells records apart, at least half of a sample of rows is in the
training set. One text that occurs in both by nature is no reason.

Not found: a copy whose columns were all changed (cut to another length, other tokens, random augmentation of another
store), rows without texts or lists unless all their numbers agree, and streams of torch.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.records import row_hashes
from hf_dpopt.records.arrow import is_arrow, is_stream
from hf_dpopt.records.row_hashes import Hashes, Key
from hf_dpopt.records.views import Leaf, leaves, share_rows

HALF = 0.5  # of the sampled rows, that is too much
NUM_SAMPLED = 512  # rows that are compared, if all of the training set was read
MAX_SAMPLED = 20_000  # if only a part of it was
BLOCK, LAZY_BLOCK = 2048, 64  # rows that are read at once; of a dataset whose rows may take long
SECONDS_STORED, SECONDS_SERVED = 4.0, 1.5  # for reading a training set: from an Arrow table, row by row
DISTINCT = 0.9  # of a sample of the training rows, in a column that tells records apart
SHARE_OF_LARGEST = 0.5  # a column that holds less than that (ids, file names) is no evidence
MIN_BYTES = 8.0  # on average; shorter ones are alike by nature
ENOUGH = 4.0  # matches that half of the rows would make, below which a part of the training set proves nothing


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
        in_arrow = as_stored and all(is_arrow(dataset) for dataset, _ in found)
        num_read, merged = _read(found, as_stored, SECONDS_STORED if in_arrow else SECONDS_SERVED)
        self.share_read = num_read / max(1, sum(len(rows) for _, rows in found))
        self._scalars = {name: hashes for (name, kind), (hashes, _) in merged.items() if kind == "scalar"}
        self._carriers = [(kind, np.unique(merged[name, kind][0])) for name, kind in _carriers(merged)]

    def holds(self, share: float, num_rows: int, table: dict[Key, Hashes]) -> bool:
        """Whether that share of the sampled rows is among these, in a column that tells records apart."""
        if not num_rows:
            return False
        needed = share * num_rows * self.share_read
        if self.share_read < 1 and needed < ENOUGH:
            return False
        columns = [(key[1], hashes) for key, (hashes, _) in table.items() if key[1] != "scalar"]
        pairs = [(known, hashes) for kind, hashes in columns for of, known in self._carriers if of == kind]
        if not self._carriers:
            pairs = self._of_numbers({name: hashes for (name, kind), (hashes, _) in table.items() if kind == "scalar"})
        return any(_num_in(hashes, known) >= needed for known, hashes in pairs)

    def _of_numbers(self, scalars: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of hashes for rows that hold single numbers only: all columns that both have, combined."""
        common = sorted(scalars.keys() & self._scalars.keys())
        if len(common) < 2 or len({len(self._scalars[name]) for name in common}) > 1:
            return []
        known, ours = (_combine_hashes([of[name] for name in common]) for of in (self._scalars, scalars))
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


def _num_in(hashes: np.ndarray, known: np.ndarray) -> int:
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return int((known[places] == hashes).sum())


def _combine_hashes(columns: list[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(columns[0])
    for hashes in columns:
        total = (total ^ hashes) * row_hashes.BASE
    return total


# --- reading ---


def _is_changed_when_read(dataset: Any) -> bool:
    """Whether a transform, or the decoding of images and sounds, lies between the table and what is read."""
    tables = [leaf for leaf, _ in leaves(dataset) if is_arrow(leaf)]
    return any(
        t._format_type == "custom" or any(t.features._column_requires_decoding.get(name) for name in t.column_names)
        for t in tables
    )


def _sample(dataset: Any, share_read: float, as_stored: bool) -> tuple[int, dict[Key, Hashes]]:
    """Hashes of rows at random places; more rows if less of the training set is known."""
    if not hasattr(dataset, "__len__"):
        # a stream of `datasets` starts anew at each reading; others may not
        head = list(islice(iter(dataset), NUM_SAMPLED)) if is_stream(dataset) else []
        return len(head), row_hashes.of_rows(head)
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
        if not is_arrow(dataset):  # of a table, neighbours are read together
            rows = np.random.default_rng(len(rows)).permutation(rows)
        size = BLOCK if is_arrow(dataset) or isinstance(dataset, (list, tuple)) else LAZY_BLOCK
        blocks += [(dataset, rows[start : start + size]) for start in range(0, len(rows), size)]
    num_rows, parts, ends = 0, dict[Key, list[Hashes]](), time.monotonic() + seconds
    for i in np.random.default_rng(len(blocks)).permutation(len(blocks)).tolist():
        dataset, rows = blocks[i]
        values = _values(dataset, rows, as_stored)
        num_rows += len(values)
        for key, hashes in row_hashes.of_rows(values).items():
            parts.setdefault(key, []).append(hashes)
        if time.monotonic() > ends:
            break
    return num_rows, {
        key: (np.concatenate([hashes for hashes, _ in some]), np.concatenate([sizes for _, sizes in some]))
        for key, some in parts.items()
    }


def _values(dataset: Any, rows: np.ndarray, as_stored: bool) -> list[Any]:
    """Rows as an Arrow table stores them, or as Python reads them; one that cannot be read is no copy."""
    if as_stored and is_arrow(dataset):
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
