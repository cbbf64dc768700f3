"""Index from users to their rows, made in memory from the column of user ids, and the choice among those rows.

Shape legend: N = rows, U = users.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.source import derive_key

CHUNK = 1_000_000  # rows that are read, and sorted, at once
FIX = "Drop those rows, or give every person who is behind them an id of their own."


class UserIndex:
    """Rows of every user, as one array and its cuts; users are numbered in the order of their first rows.

    It has 4 bytes for each row, and as many more while it is built. It reveals private data (who wrote how much), and
    is kept on no disk.

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
    def build(cls, dataset: Any, column: str) -> UserIndex:
        """Read the ids of a dataset on every process of a run.

        Args:
            dataset: map-style: a `datasets.Dataset`, or anything with a length whose rows are mappings.
            column: name of the column of ids: integers, strings or other plain values.

        Raises:
            DPConfigError: without such a column; for ids that are missing, not plain values, or the same in all rows;
                and if two processes have other ids, or the same in another order.
        """
        read: list[tuple[np.ndarray, str]] = []

        def digest() -> str:
            read.append(_read(dataset, column))
            return read[0][1]

        digests = current_ranks().every(digest)
        other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
        if other is not None:
            raise DPConfigError(
                f"Process {other} reads other user ids in the column {column!r} than process 0, or in another order. "
                "Give all machines the same dataset, prepared in the same way (a shuffle needs a seed)."
            )
        return cls(*_sorted(read[0][0]), digests[0])

    def check_is_of(self, dataset: Any, column: str) -> None:
        """Refuse a dataset whose rows are not in the order that the index was built from.

        Raises:
            DPConfigError: if they differ: rows of several people would be clipped as those of one.
        """
        if _read(dataset, column)[1] != self.digest:
            raise DPConfigError(
                "The training records are not in the order in which their users were read: the dataset was changed "
                "after the trainer was made, or by it. Prepare the dataset before, and make a new trainer."
            )


def _read(dataset: Any, column: str) -> tuple[np.ndarray, str]:
    """Read the number of every row's user, int32, (N,), in the order of first rows; and a digest of the column."""
    import pyarrow as pa  # half a second, which only runs that protect users need
    import pyarrow.compute as pc

    codes_N, first = np.empty(len(dataset), np.int32), 0
    known: pa.Array | None = None  # the distinct ids
    kind = ""
    try:
        for ids in _columns(dataset, column):
            kind = str(ids.type)
            if pa.types.is_dictionary(ids.type):
                ids = ids.dictionary_decode()
            if pa.types.is_floating(ids.type):
                ids = pc.add(ids, pa.scalar(0.0, ids.type))  # -0.0 is 0.0
            known = pa.chunked_array([ids] if known is None else [known, ids]).unique()
            codes_N[first : first + len(ids)] = pc.index_in(ids, value_set=known)
            first += len(ids)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        if not isinstance(error, NotImplementedError):
            kind = "of several types, such as strings and numbers mixed"
        raise DPConfigError(
            f"The ids in column {column!r} are {kind}, which cannot be compared. Use one string or integer per row; a "
            "row that several people wrote needs one id for the group, who are then protected together."
        ) from error
    ids = [] if known is None else known.to_pylist()
    blank = [u for u, v in enumerate(ids) if v is None or v != v or not _strip_invisible(v)]
    if blank:
        row = int(np.isin(codes_N, blank).argmax())
        raise DPConfigError(
            f"The column {column!r} has rows without an id (row {row} is the first), so nobody could say whose they "
            f"are. {FIX}"
        )
    if len(ids) == 1:
        raise DPConfigError(
            f"The column {column!r} has one value in all rows, so there would be one user and nothing to hide in. "
            "Name the column that tells people apart: --user_id_column author."
        )
    digest = hashlib.blake2b(column.encode(), digest_size=16)
    digest.update(codes_N.data)
    digest.update(repr(ids).encode())
    return codes_N, digest.hexdigest()


def _columns(dataset: Any, column: str) -> Iterator[Any]:
    """Yield the ids as Arrow arrays, some rows at a time."""
    import pyarrow as pa

    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "with_format"):
        if column not in names:
            raise _no_column(column, names)
        for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=CHUNK):
            yield table.column(column).combine_chunks()
        return
    for first in range(0, len(dataset), CHUNK):
        rows = [dataset[i] for i in range(first, min(first + CHUNK, len(dataset)))]
        if not all(hasattr(row, "keys") and column in row for row in rows):
            raise _no_column(column, sorted(map(str, rows[0])) if hasattr(rows[0], "keys") else [])
        yield pa.array([row[column].item() if hasattr(row[column], "item") else row[column] for row in rows])


def _strip_invisible(value: Any) -> Any:
    """Remove separators, marks of no width and controls from a string; True for other values."""
    if isinstance(value, bytes):
        return value.strip()
    if not isinstance(value, str):
        return True
    return "".join(c for c in value if unicodedata.category(c)[0] not in "ZC")


def _no_column(column: str, names: list[str]) -> DPConfigError:
    return DPConfigError(
        f"The training dataset has no column {column!r} to tell users apart; it has: {', '.join(names) or 'none'}. "
        "Keep it when you tokenize (map has remove_columns); the model does not see it."
    )


def _sorted(codes_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the row numbers by user (counting sort, some rows at a time); within a user they stay in order."""
    parts, num_users = range(0, len(codes_N), CHUNK), int(codes_N.max()) + 1
    counts_U = sum(np.bincount(codes_N[first : first + CHUNK], minlength=num_users) for first in parts)
    cuts_U = np.concatenate([[0], np.cumsum(counts_U)])
    rows_N = np.empty(len(codes_N), np.uint32 if len(codes_N) < 2**32 else np.int64)
    next_U = cuts_U[:-1].copy()
    for first in parts:
        codes = codes_N[first : first + CHUNK]
        order = np.argsort(codes, kind="stable")
        users, starts, counts = np.unique(codes[order], return_index=True, return_counts=True)
        rows_N[np.repeat(next_U[users] - starts, counts) + np.arange(len(codes))] = order + first
        next_U[users] += counts
    return cuts_U, rows_N


def choose_rows(rows: np.ndarray, limit: int, key: bytes, *labels: str) -> np.ndarray:
    """Choose at most `limit` of the rows of one user, each set of that size equally likely.

    A function of its arguments alone: other users, ranks and the point of resumption do not matter. No amplification
    rests on it.

    Args:
        rows: rows of the user, at least one.
        limit: largest number of rows, >= 1.
        key: 32 secret bytes.
        *labels: purpose of the draw, such as step and user.

    Returns:
        The chosen rows, in ascending order.
    """
    if len(rows) <= limit:
        return rows
    seed = int.from_bytes(derive_key(key, "rows of a user", *labels), "little")
    chosen = np.random.Generator(np.random.PCG64(seed)).choice(len(rows), limit, replace=False, shuffle=False)
    return rows[np.sort(chosen)]
