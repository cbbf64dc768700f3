"""Detection of evaluation on training records: metrics on those are exact, un-noised values.

A view of the training set (a shared Arrow table, `Subset`, `ConcatDataset`, rows of one list) with one common row is
found by where rows are stored. Copies (`map`, `list(dataset)`, another reading of the same file) are found by the hash
of what their columns hold: if, in a column that tells records apart, at least half of a sample of rows is in the
training set. One text that occurs in both by nature is no reason.

Not found: a copy whose columns were all changed (cut to another length, other tokens, random augmentation of another
store), rows without texts or lists unless all their numbers agree, and streams of torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.records import row_hashes
from hf_dpopt.records.arrow import is_arrow, is_stream
from hf_dpopt.records.row_hashes import Hashes, Key
from hf_dpopt.records.views import Leaf, leaves, share_rows, stored_rows

if TYPE_CHECKING:
    from datasets import Dataset

HALF = 0.5  # of the sampled rows, that is too much
NUM_SAMPLED = 512  # rows that are compared, if all of the training set was read
MAX_SAMPLED = 20_000  # if only a part of it was
BLOCK = 2048  # rows that are hashed at once
SECONDS_STORED, SECONDS_SERVED = 4.0, 1.5  # for reading a training set: from an Arrow table, row by row
DISTINCT = 0.9  # of a sample of the training rows, in a column that tells records apart
SHARE_OF_LARGEST = 0.5  # a column that holds less than that (ids, file names) is no evidence
MIN_BYTES = 8.0  # on average; shorter ones are alike by nature
ENOUGH = 4.0  # matches that half of the rows would make, below which a part of the training set proves nothing

Table = dict[Key, Hashes]


class TrainingRows:
    """The rows of a training set, for comparison; read once, when they are first needed.

    Args:
        dataset: the training set, map-style or a list; None if there is none.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._stored: _Known | None = None
        self._served: _Known | None = None

    def make_up(self, dataset: Any) -> bool:
        """Whether a dataset shares stored rows with these, or at least half of it consists of copies of them.

        The answer is that of rank 0 on every rank: how much can be read depends on time.

        Args:
            dataset: the evaluation set; None for none.
        """
        if dataset is None or self.dataset is None:
            return False
        return current_ranks().same(lambda: share_rows(dataset, self.dataset) or self._are_copied_in(dataset))

    def _are_copied_in(self, dataset: Any) -> bool:
        if not hasattr(self.dataset, "__len__") or not len(self.dataset):
            return False
        if self._stored is None:
            self._stored = _Known(leaves(self.dataset), as_stored=True)
        sample = _sample(dataset, self._stored.share_read, as_stored=True)
        if self._stored.holds_half(sample):
            return True
        # Arrow tables hold other values than Python reads where something is decoded or transformed on the way.
        if _is_changed_when_read(dataset) and not _is_all_arrow(self.dataset):
            return self._stored.holds_half(_sample(dataset, self._stored.share_read, as_stored=False))
        if _is_changed_when_read(self.dataset) and not (
            _is_all_arrow(dataset) and self._stored.names & _names(sample)
        ):
            if self._served is None:
                self._served = _Known(leaves(self.dataset), as_stored=False)
            return self._served.holds_half(_sample(dataset, self._served.share_read, as_stored=False))
        return False


class _Known:
    """Hashes of all training rows, or of as many as could be read in time, at random places."""

    def __init__(self, found: list[Leaf], *, as_stored: bool):
        total, num_read = sum(len(rows) for _, rows in found), 0
        parts: dict[Key, list[Hashes]] = {}
        in_arrow = as_stored and all(is_arrow(dataset) for dataset, _ in found)
        ends = time.monotonic() + (SECONDS_STORED if in_arrow else SECONDS_SERVED)
        useless: set[Key] = set()
        for num_rows, table in _blocks(found, as_stored, useless):
            if not num_read:
                useless |= {key for key, (hashes, _) in table.items() if _is_useless(key, hashes)}
            num_read += num_rows
            for key, hashes in table.items():
                parts.setdefault(key, []).append(hashes)
            if time.monotonic() > ends:
                break
        self.share_read = num_read / max(1, total)
        merged = _concatenate(parts)
        self._scalars = {name: hashes for (name, kind), (hashes, _) in merged.items() if kind == "scalar"}
        carriers = _carriers({key: both for key, both in merged.items() if key[1] != "scalar"})
        self.names = {name for name, _ in carriers}
        self._carriers = [(kind, np.unique(merged[name, kind][0])) for name, kind in carriers]

    def holds_half(self, sample: tuple[int, Table]) -> bool:
        """Whether half of the sampled rows are among these, in a column that tells records apart."""
        num_rows, table = sample
        if not num_rows:
            return False
        needed = HALF * num_rows * self.share_read
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


def _carriers(merged: dict[Key, Any]) -> list[Key]:
    """The columns that carry the record."""
    sizes = {key: float(sizes.mean()) for key, (hashes, sizes) in merged.items() if _distinct(hashes) >= DISTINCT}
    least = max(MIN_BYTES, SHARE_OF_LARGEST * max(sizes.values(), default=0.0))
    return [key for key, size in sizes.items() if size >= least]


def _names(sample: tuple[int, Table]) -> set[str]:
    return {name for name, kind in sample[1] if kind != "scalar"}


def _concatenate(parts: dict[Key, list[Hashes]]) -> Table:
    """Concatenate the hashes and sizes of all blocks."""
    return {
        key: (np.concatenate([hashes for hashes, _ in some]), np.concatenate([sizes for _, sizes in some]))
        for key, some in parts.items()
    }


def _is_useless(key: Key, hashes: np.ndarray) -> bool:
    """Whether a first block shows that a column cannot carry the record (masks)."""
    return key[1] != "scalar" and len(hashes) >= BLOCK // 2 and len(np.unique(hashes)) < 0.1 * len(hashes)


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


def _is_all_arrow(dataset: Any) -> bool:
    return all(is_arrow(leaf) for leaf, _ in leaves(dataset))


def _is_changed_when_read(dataset: Any) -> bool:
    """Whether a transform, or the decoding of images and sounds, lies between the table and what is read."""
    tables = [leaf for leaf, _ in leaves(dataset) if is_arrow(leaf)]
    return any(
        t._format_type == "custom" or any(t.features._column_requires_decoding.get(name) for name in t.column_names)
        for t in tables
    )


def _blocks(found: list[Leaf], as_stored: bool, useless: set[Key]) -> Iterator[tuple[int, Table]]:
    """Hashes of the rows, block after block, in an order that depends on the number of rows alone.

    Args:
        found: the datasets and row numbers to read.
        as_stored: read the Arrow tables, not what the datasets make of them.
        useless: columns of tables to leave out; may grow on the way.
    """
    jobs: list[Callable[[], tuple[int, Table]]] = []
    for dataset, rows in found:
        if as_stored and is_arrow(dataset):
            jobs += _stored_blocks(dataset, stored_rows(dataset, rows), useless)
        else:
            size = BLOCK if isinstance(dataset, (list, tuple)) else 64  # a row of others may take long
            shuffled = np.random.default_rng(len(rows)).permutation(rows)
            places = [shuffled[i : i + size] for i in range(0, len(rows), size)]
            jobs += [functools.partial(_served_block, dataset, some) for some in places]
    for i in np.random.default_rng(len(jobs)).permutation(len(jobs)).tolist():
        yield jobs[i]()


def _stored_blocks(dataset: Dataset, rows: np.ndarray, useless: set[Key]) -> list[Callable[[], tuple[int, Table]]]:
    ordered = np.sort(rows)
    starts = np.unique(ordered // BLOCK) * BLOCK
    bounds = np.searchsorted(ordered, np.append(starts, ordered[-1] + BLOCK))
    places = [ordered[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    return [
        functools.partial(_stored_block, dataset, int(start), some, useless)
        for start, some in zip(starts, places, strict=True)
    ]


def _stored_block(dataset: Dataset, start: int, rows: np.ndarray, useless: set[Key]) -> tuple[int, Table]:
    table = dataset._data.fast_slice(start, min(BLOCK, dataset._data.num_rows - start))
    if len(rows) < table.num_rows:
        table = table.take(rows - start)
    return len(rows), row_hashes.of_table(table, but=useless)


def _served_block(dataset: Any, rows: np.ndarray) -> tuple[int, Table]:
    """Hashes of rows as Python reads them; a row that cannot be read is no copy, whatever the dataset raises."""
    read = []
    for i in rows.tolist():
        try:
            read.append(dataset[i])
        except Exception:
            continue
    return len(rows), row_hashes.of_rows(read)


def _sample(dataset: Any, share_read: float, *, as_stored: bool) -> tuple[int, Table]:
    """Hashes of rows at random places; more rows if less of the training set is known."""
    if not hasattr(dataset, "__len__"):
        # a stream of `datasets` starts anew at each reading; others may not
        head = list(islice(iter(dataset), NUM_SAMPLED)) if is_stream(dataset) else []
        return len(head), row_hashes.of_rows(head)
    wanted = min(len(dataset), MAX_SAMPLED, int(NUM_SAMPLED / max(share_read, 1e-9)) + 1)
    places = np.random.default_rng(len(dataset)).permutation(len(dataset))[:wanted]
    num_rows = 0
    parts: dict[Key, list[Hashes]] = {}
    ends = time.monotonic() + SECONDS_SERVED
    for leaf, rows in leaves(dataset, places):
        in_arrow = as_stored and is_arrow(leaf)
        for start in range(0, len(rows), step := BLOCK if in_arrow else 64):
            some = rows[start : start + step]
            if in_arrow:
                table = leaf._data.fast_gather(stored_rows(leaf, some).tolist())
                count, found = len(some), row_hashes.of_table(table)
            else:
                _, found = _served_block(leaf, some)
                count = max((len(hashes) for hashes, _ in found.values()), default=0)
            num_rows += count
            for key, hashes in found.items():
                parts.setdefault(key, []).append(hashes)
            if time.monotonic() > ends:
                return num_rows, _concatenate(parts)
    return num_rows, _concatenate(parts)
