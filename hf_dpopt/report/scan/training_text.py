"""Training text in files: stretches of letters, and of token ids, that stand in a training record as well.

Both sides are reduced to lower-case letters and digits, so that case, spaces, line ends, punctuation and markup do not
matter. A file's stretches of `LETTERS` letters are indexed (every `STRIDE`-th place); then training records are read
in a secret random order, as many as the budget allows, and looked up.

Law of finding: a copy of `ENOUGH` letters in a row of a record, or of all of it if it has `SHORTEST` or more, is found
if the record is read; that is a share min(1, budget / size) of them, and how many were read is told to the caller. Law
of false alarms: an equal hash by chance has probability below (places of files) x (places of records) / 2**61; what
is common to many records by nature (a template, a prompt, a licence) is left out where 3 or more of the records read,
and more than `COMMON` of them, share the stretch. A phrase of `ENOUGH` letters (10 to 12 words) that a file shares
with one or two records alone is reported: nobody can tell such a phrase from a quotation.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

LETTERS, STRIDE = 32, 4
SHORTEST = LETTERS + STRIDE - 1  # letters of the shortest record that is compared
ENOUGH_HITS = 5
ENOUGH = SHORTEST + (ENOUGH_HITS - 1) * STRIDE  # 51 letters in a row
IDS = 12  # token ids in a row
COMMON = 1e-3  # share of the records above which a stretch is a template
MAX_TEXT = 64 * 2**20  # letters of all files together that are indexed
MAX_LETTERS, MAX_SECONDS = 50_000_000, 2.0  # of the records that are read

_BASE = 0x9E3779B97F4A7C15
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrtbf])")
_END = 0  # byte between records
_DROP = bytes(b for b in range(1, 128) if not chr(b).isalnum())
_BLOCK = 2**20  # places that are hashed at once
_MIN_TURNS = 6  # changes of the step between neighbouring ids: ranges, masks and padding have none


@dataclasses.dataclass(frozen=True)
class Block:
    """Some training records: their texts, and their lists of token ids."""

    texts: Sequence[str]
    ids: Sequence[np.ndarray] = ()


@dataclasses.dataclass(frozen=True)
class TrainingRecords:
    """The training records of a run, for comparison with what is about to be released.

    Attributes:
        blocks: makes an iterator over the records in an order nobody can predict; called when there is text to
            compare.
        users: ids of users, or some of them.
    """

    blocks: Callable[[], Iterator[Block]]
    users: Sequence[str] = ()


class FileTexts:
    """Text and token ids of the files that are scanned, kept until they are compared."""

    def __init__(self) -> None:
        self._letters: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._of_letters: list[str] = []
        self._of_ids: list[str] = []
        self._room = MAX_TEXT

    def add_text(self, path: str, text: str) -> None:
        """Index a text of a file."""
        letters = normalise(text)[: self._room]
        if len(letters) >= SHORTEST:
            self._room -= len(letters)
            self._letters.append(_hashes(np.frombuffer(letters, np.uint8), LETTERS)[::STRIDE])
            self._of_letters.append(path)

    def add_ids(self, path: str, ids: np.ndarray) -> None:
        """Index whole numbers of a file, (n,), which may be token ids."""
        ids = ids[: self._room].astype(np.int64, copy=False)
        if len(ids) >= IDS and (found := _id_hashes(ids)).size:
            self._room -= len(ids)
            self._ids.append(found)
            self._of_ids.append(path)

    def __bool__(self) -> bool:
        return bool(self._letters or self._ids)

    def compare(self, records: TrainingRecords) -> dict[str, str]:
        """Files that hold training records -> what of them, in words.

        Args:
            records: training records of the run; read until the budget ends, or all.
        """
        texts, ids = _Index(self._letters, self._of_letters), _Index(self._ids, self._of_ids)
        ends, read = time.monotonic() + MAX_SECONDS, 0
        for block in records.blocks():
            if texts:
                letters = normalise("\0".join(text.replace("\0", " ") for text in block.texts) + "\0")
                read += len(letters)
                texts.add(np.frombuffer(letters, np.uint8), LETTERS, len(block.texts))
            if ids:
                flat, read = _flatten(block.ids), read + sum(map(len, block.ids))
                ids.add(flat, IDS, len(block.ids))
            if read > MAX_LETTERS or time.monotonic() > ends:
                break
        found = dict.fromkeys(ids.files(lambda size: 1), "token ids of a training record")
        return found | dict.fromkeys(texts.files(_needed), "text of a training record")


def _needed(size: np.ndarray) -> np.ndarray:
    """Stretches that must be in a file for a record of so many letters to be reported."""
    return np.where(size < SHORTEST, LETTERS, np.clip((size - SHORTEST) // STRIDE + 1, 1, ENOUGH_HITS))


class _Index:
    """Hashes of the files' stretches, and the records that have some of them."""

    def __init__(self, hashes: list[np.ndarray], paths: list[str]):
        self._paths = list(dict.fromkeys(paths))
        number = {path: i for i, path in enumerate(self._paths)}
        every = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
        owners = np.repeat([number[path] for path in paths], [len(one) for one in hashes]) if hashes else every
        order = np.argsort(every, kind="stable")
        self._hashes, self._owners = every[order], owners[order].astype(np.int64)
        self._filter = np.zeros(2**22, dtype=bool)
        self._filter[(self._hashes >> np.uint64(42)).astype(np.int64)] = True
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # hashes, numbers and sizes of records
        self._records = 0

    def __bool__(self) -> bool:
        return bool(len(self._hashes))

    def add(self, values: np.ndarray, length: int, count: int) -> None:
        """Look up the stretches of some records, each ended by `_END`."""
        ends = np.flatnonzero(values == _END)
        hashes = _hashes(values, length)
        places = np.flatnonzero(self._filter[(hashes >> np.uint64(42)).astype(np.int64)])
        at = np.searchsorted(self._hashes, hashes[places])
        places = places[self._hashes[np.minimum(at, len(self._hashes) - 1)] == hashes[places]]
        record = np.searchsorted(ends, places)
        inside = ends[np.minimum(record, len(ends) - 1)] >= places + length
        places, record = places[inside], record[inside]
        if len(places):
            sizes = np.diff(ends, prepend=-1) - 1
            self._found.append((hashes[places], record + self._records, sizes[record]))
        self._records += count

    def files(self, needed: Callable[[np.ndarray], np.ndarray | int]) -> Iterable[str]:
        """Files that hold enough of a record, templates left out."""
        if not self._found:
            return []
        hashes, records, sizes = (np.concatenate(column) for column in zip(*self._found, strict=True))
        pairs, first = np.unique(np.stack([hashes, records.astype(np.uint64)]), axis=1, return_index=True)
        kinds, inverse, counts = np.unique(pairs[0], return_inverse=True, return_counts=True)
        is_common = (counts >= 3) & (counts > COMMON * self._records)
        keep = ~is_common[inverse]
        hashes, records, sizes = hashes[first][keep], records[first][keep], sizes[first][keep]
        found = set()
        low, high = (np.searchsorted(self._hashes, hashes, side=side) for side in ("left", "right"))
        counted: dict[tuple[int, int], int] = {}
        enough = np.broadcast_to(needed(sizes), sizes.shape).tolist()
        limits: dict[int, int] = dict(zip(records.tolist(), enough, strict=True))
        for one, start, stop in zip(records.tolist(), low.tolist(), high.tolist(), strict=True):
            for owner in set(self._owners[start:stop].tolist()):
                counted[one, owner] = counted.get((one, owner), 0) + 1
                if counted[one, owner] >= limits[one]:
                    found.add(self._paths[owner])
        return sorted(found)


def normalise(text: str) -> bytes:
    """Lower-case letters and digits of a text, escapes of JSON resolved; NUL bytes stay, as ends of records."""
    if "\\" in text:
        text = _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)) if match.group(1) else " ", text)
    return text.lower().encode("utf-8", "replace").translate(None, _DROP)


def _flatten(ids: Sequence[np.ndarray]) -> np.ndarray:
    """Token ids plus one, so that 0 stands between records."""
    parts = [part for one in ids for part in (np.asarray(one, np.int64) + 1, np.zeros(1, np.int64))]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_UP, _DOWN = _powers(_BASE, _BLOCK + 64), _powers(pow(_BASE, -1, 2**64), _BLOCK + 64)


def _hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Polynomial hashes modulo 2**64 of every `length` neighbouring values, (n - length + 1,)."""
    count = len(values) - length + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    found = np.empty(count, np.uint64)
    for start in range(0, count, _BLOCK):
        part = _mix(values[start : start + _BLOCK + length - 1].astype(np.uint64))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(part * _UP[: len(part)], dtype=np.uint64)])
        num = len(part) - length + 1
        found[start : start + num] = (total[length : length + num] - total[:num]) * _DOWN[:num]
    return _mix(found)


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread the values over all 64 bits (finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _id_hashes(ids: np.ndarray) -> np.ndarray:
    """Hashes of the stretches that may be token ids: no masks, ranges, padding, nor class labels."""
    hashes = _hashes(ids + 1, IDS)
    steps = np.diff(ids)
    turns = np.concatenate([[0], np.cumsum(steps[1:] != steps[:-1])])
    large = np.concatenate([[0], np.cumsum((ids >= 16) & (ids < 2**24))])
    places = np.arange(len(hashes))
    is_text = (turns[places + IDS - 2] - turns[places] >= _MIN_TURNS) & (
        large[places + IDS] - large[places] >= IDS // 2
    )
    return hashes[is_text]
