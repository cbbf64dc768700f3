"""Index from users to their rows, built once by streaming the column of user ids, and read through memory maps.

Shape legend: N = rows, U = users.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import socket
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.durable import open_regular, remove
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.common.log import logger

ARRAYS, ABOUT = ("rows.npy", "cuts.npy"), "index.json"  # files of an index that is kept; the last one has digests
CHUNK = 1_000_000  # rows that are read, and sorted, at once
FIX = "Drop those rows, or give every person who is behind them an id of their own."
PLAIN = (int, str, bytes, float, datetime.date)


class UserIndex:
    """Rows of every user, as one array and its cuts; users are numbered in the order of their first rows.

    The index reveals private data (who wrote how much), so its files belong beside the keys.

    Args:
        cuts_U: user u has the rows ``rows_N[cuts_U[u] : cuts_U[u + 1]]``; int64, (U + 1,).
        rows_N: row numbers, (N,).
        digest: digest of the column of ids that it was made from.
    """

    def __init__(self, cuts_U: np.ndarray, rows_N: np.ndarray, digest: str):
        self._cuts_U, self._rows_N, self.digest = cuts_U, rows_N, digest

    @property
    def num_users(self) -> int:
        return len(self._cuts_U) - 1

    @property
    def num_rows(self) -> int:
        return len(self._rows_N)

    def rows(self, user: int) -> np.ndarray:
        """The rows of a user, ascending; int64, never empty."""
        return self._rows_N[self._cuts_U[user] : self._cuts_U[user + 1]].astype(np.int64)

    def sizes(self, users_B: np.ndarray | None = None) -> np.ndarray:
        """Rows of each of the users, (B,), or of all of them, (U,); int64."""
        if users_B is None:
            return np.diff(self._cuts_U)
        return np.asarray(self._cuts_U[users_B + 1]) - self._cuts_U[users_B]

    def rows_at(self, users_B: np.ndarray, ranks_B: np.ndarray) -> np.ndarray:
        """The row of that rank of each of the users, 0 the first one, (B,), int64; -1 where one has fewer."""
        rows_B = np.full(len(users_B), -1)
        has = ranks_B < self.sizes(users_B)
        rows_B[has] = self._rows_N[self._cuts_U[users_B[has]] + ranks_B[has]]
        return rows_B

    @classmethod
    def build(cls, dataset: Any, column: str, folder: Path | None = None) -> UserIndex:
        """Read the ids of a dataset, a million rows at a time.

        Args:
            dataset: map-style: a `datasets.Dataset`, or anything with a length whose rows are mappings.
            column: name of the column of ids: integers, texts or other plain values.
            folder: folder of the arrays, which go below a name derived from the ids; an index of the same ids that is
                already there is read. None keeps them in memory.

        Raises:
            DPConfigError: without such a column, for ids that are missing, no plain values, or the same in all rows.
        """
        num_rows, on_disk = len(dataset), folder is not None
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            place = Path(scratch)
            codes_N = _array(place / "codes.npy", np.int32, num_rows, on_disk)
            digest = _read_codes(dataset, column, codes_N)
            if folder is not None and _is_whole(folder / digest, digest):
                return cls.load(folder / digest)
            num_users = 1 + max(int(codes_N[part].max()) for part in _chunks(num_rows))
            counts_U = np.zeros(num_users, np.int64)
            for part in _chunks(num_rows):
                counts_U += np.bincount(codes_N[part], minlength=num_users)
            cuts_U = np.concatenate([[0], counts_U.cumsum()])
            rows_N = _array(place / "rows.npy", _row_type(num_rows), num_rows, on_disk)
            _sort(codes_N, cuts_U, rows_N)
            if folder is None:
                return cls(cuts_U, rows_N, digest)
            rows_N.flush()  # type: ignore[attr-defined]
            np.save(place / "cuts.npy", cuts_U)
            about = {"column": column, "num_rows": num_rows, "num_users": num_users, "digest": digest}
            about |= {name: _sha256(place / name) for name in ARRAYS}
            (place / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            made = folder / digest
            remove(made)  # a damaged one
            made.mkdir(mode=0o700)
            for name in (*ARRAYS, ABOUT):  # the last one says that all are there
                shutil.move(place / name, made / name)
        return cls.load(folder / digest)

    @classmethod
    def build_on_every_disk(cls, dataset: Any, column: str, make_folder: Callable[[], Path]) -> UserIndex:
        """Build the index once on every disk that the processes of a run see, and read it on all of them.

        The private folder of each machine may be a disk of its own: paths of one lead nowhere on the others.

        Args:
            dataset: the training set, the same on every process.
            column: name of the column of ids.
            make_folder: makes the folder of the index, on the machine of the process that calls it.

        Raises:
            DPConfigError: as `build`; and if two processes have other ids, or the same in another order.
        """
        ranks = current_ranks()
        places = ranks.every(lambda: _place_of(make_folder()))
        builds = places.index(places[ranks.rank]) == ranks.rank

        def build() -> str | None:
            return cls.build(dataset, column, make_folder()).digest if builds else None

        first = ranks.same(build)
        found = ranks.every(lambda: first if ranks.rank == 0 else build())  # a disk that they share has it by now
        _refuse_unlike(found, column)
        return cls.load(make_folder() / str(first))

    @classmethod
    def build_in_memory(cls, dataset: Any, column: str) -> UserIndex:
        """Build the index on every process, of a dataset that each of them has in memory.

        Raises:
            DPConfigError: as `build_on_every_disk`.
        """
        built: list[UserIndex] = []

        def build() -> str:
            built.append(cls.build(dataset, column))
            return built[0].digest

        _refuse_unlike(current_ranks().every(build), column)
        return built[0]

    @classmethod
    def load(cls, directory: Path) -> UserIndex:
        """Read an index that `build` wrote, memory-mapped."""
        digest = json.loads((directory / ABOUT).read_text(encoding="utf-8"))["digest"]
        return cls(np.load(directory / "cuts.npy"), np.load(directory / "rows.npy", mmap_mode="r"), digest)

    def check_is_of(self, dataset: Any, column: str) -> None:
        """Refuse a dataset whose rows are not in the order that the index was built from.

        Raises:
            DPConfigError: if they differ: rows of several people would be clipped as those of one.
        """
        if _read_codes(dataset, column) != self.digest:
            raise DPConfigError(
                "The training records are not in the order in which their users were read: the dataset was changed, "
                "shuffled or replaced after the trainer was made, or by it. Prepare the dataset before, and make a "
                "new trainer."
            )


def _is_whole(directory: Path, digest: str) -> bool:
    """Whether an index that was kept is there, and what was written.

    Rows of another user would be clipped as one's own, so one that cannot be told to be whole is made again.
    """
    if not os.path.lexists(directory):
        return False
    try:
        with open_regular(directory / ABOUT) as file:
            about = parse_json(file.read())
        if about["digest"] == digest and all(about[name] == _sha256(directory / name) for name in ARRAYS):
            return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    logger.warning(f"{directory} is damaged: the index of users is made again.")
    return False


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_unlike(digests: Sequence[str | None], column: str) -> None:
    """Refuse columns of ids that differ between processes, by their digests; None of one that read no column."""
    other = next((rank for rank, digest in enumerate(digests) if digest not in (None, digests[0])), None)
    if other is not None:
        raise DPConfigError(
            f"Process {other} reads other user ids in the column {column!r} than process 0, or in another order: what "
            "is one person there would be another one here. Give all machines the same dataset, prepared in the same "
            "way (a shuffle needs a seed)."
        )


def _place_of(folder: Path) -> tuple[str, int, int]:
    """Say which folder it is, among those of all machines: processes that are told the same share it."""
    status = folder.stat()
    return socket.gethostname(), status.st_dev, status.st_ino


def _array(path: Path, dtype: Any, size: int, on_disk: bool) -> np.ndarray:
    if on_disk and size:
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    return np.empty(size, dtype)


def _row_type(num_rows: int) -> type:
    return np.uint32 if num_rows < 2**32 else np.int64


def _chunks(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, CHUNK):
        yield slice(first, min(first + CHUNK, num_rows))


def _read_codes(dataset: Any, column: str, codes_N: np.ndarray | None = None) -> str:
    """Write the number of every row's user into `codes_N`, if it is given; return a digest of the whole column."""
    numbers: dict[Any, int] = {}
    digest = hashlib.blake2b(column.encode(), digest_size=16)
    first = 0
    for codes, ids in _encode(dataset, column):
        is_blank = [v is None or v != v or not _strip_invisible(v) for v in ids]
        missing = (codes < 0) | np.array([*is_blank, True])[codes]
        if missing.any():
            raise DPConfigError(
                f"The column {column!r} has rows without an id (row {first + int(missing.argmax())} is the first), so "
                f"nobody could say whose they are. {FIX}"
            )
        part = np.array([numbers.setdefault(v, len(numbers)) for v in ids], np.int32)[codes]
        if codes_N is not None:
            codes_N[first : first + len(codes)] = part
        digest.update(part.tobytes())
        first += len(codes)
    kinds = {isinstance(v, (str, bytes)) for v in numbers}
    if len(kinds) > 1:
        raise _not_plain(column, "texts and numbers mixed")
    if len(numbers) == 1:
        raise DPConfigError(
            f"The column {column!r} has one value in all rows, so there would be one user and nothing to hide in. "
            "Name the column that tells people apart: --user_id_column author."
        )
    digest.update(repr(list(numbers)).encode())
    return digest.hexdigest()


def _strip_invisible(value: Any) -> Any:
    """Remove invisible characters from a text; True for other values."""
    if isinstance(value, bytes):
        return value.strip()
    if not isinstance(value, str):
        return True
    return "".join(
        c for c in value if unicodedata.category(c)[0] not in "ZC"
    )  # separators, marks of no width, controls


def _encode(dataset: Any, column: str) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Yield, some rows at a time, the number of each row's id (-1 for none) and the distinct ids."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "with_format"):
        if column not in names:
            raise _no_column(column, names)
        for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=CHUNK):
            yield _encode_arrow(table.column(column).combine_chunks(), column)
        return
    for part in _chunks(len(dataset)):
        rows = [dataset[i] for i in range(part.start, part.stop)]
        if not all(hasattr(row, "keys") and column in row for row in rows):
            raise _no_column(column, sorted(map(str, rows[0])) if hasattr(rows[0], "keys") else [])
        values = [row[column].item() if hasattr(row[column], "item") else row[column] for row in rows]
        other = next((v for v in values if v is not None and not isinstance(v, PLAIN)), None)
        if other is not None:
            raise _not_plain(column, type(other).__name__)
        numbers: dict[Any, int] = {}
        codes = np.array([-1 if v is None else numbers.setdefault(v, len(numbers)) for v in values])
        yield codes, list(numbers)


def _encode_arrow(ids: Any, column: str) -> tuple[np.ndarray, list[Any]]:
    """Encode an Arrow array of ids as numbers (-1 for none) and distinct ids."""
    kind = str(ids.type)
    if kind.startswith(("list", "large_list", "fixed_size_list", "struct", "map", "extension")):
        raise _not_plain(column, kind)
    if kind == "null":
        return np.full(len(ids), -1), []
    encoded = ids if hasattr(ids, "dictionary") else ids.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return codes.astype(np.int64), encoded.dictionary.to_pylist()


def _not_plain(column: str, kind: str) -> DPConfigError:
    return DPConfigError(
        f"The ids in column {column!r} are {kind}, which cannot be compared. Use one text or integer per row; a row "
        "that several people wrote needs one id for the group, who are then protected together."
    )


def _no_column(column: str, names: list[str]) -> DPConfigError:
    return DPConfigError(
        f"The training dataset has no column {column!r} to tell users apart; it has: {', '.join(names) or 'none'}. "
        "Keep the column when you tokenize (map removes those named in remove_columns); the trainer takes it out of "
        "what the model sees."
    )


def _sort(codes_N: np.ndarray, cuts_U: np.ndarray, rows_N: np.ndarray) -> None:
    """Sort the row numbers by user (counting sort, some rows at a time); within a user they stay in order."""
    next_U = cuts_U[:-1].copy()
    for part in _chunks(len(codes_N)):
        codes = codes_N[part]
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        users, starts, counts = np.unique(ordered, return_index=True, return_counts=True)
        within = np.arange(len(ordered)) - np.repeat(starts, counts)
        rows_N[next_U[ordered] + within] = order + part.start
        next_U[users] += counts
