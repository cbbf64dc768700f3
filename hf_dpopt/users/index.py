"""Whose rows are whose: built once from the column of user ids, streaming, and read through memory maps.

Shape legend: N = rows, U = users.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_dpopt.errors import DPConfigError

CHUNK = 1_000_000  # rows that are read, and sorted, at once
MEND = "Drop those rows, or give every person who is behind them an id of their own."
SCALARS = (
    pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean, pa.types.is_floating,
    pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_temporal,
    pa.types.is_decimal, pa.types.is_dictionary,
)  # fmt: skip


class UserIndex:
    """Users are numbered in the order in which they first appear; their rows are kept as one array and its cuts.

    The index is made of private data (who wrote how much), so its files belong beside the keys.

    Args:
        cuts_U: user u has the rows ``rows_N[cuts_U[u] : cuts_U[u + 1]]``; int64, (U + 1,).
        rows_N: row numbers, (N,).
    """

    def __init__(self, cuts_U: np.ndarray, rows_N: np.ndarray):
        self._cuts_U, self._rows_N = cuts_U, rows_N

    @property
    def num_users(self) -> int:
        return len(self._cuts_U) - 1

    @property
    def num_rows(self) -> int:
        return len(self._rows_N)

    def rows(self, user: int) -> np.ndarray:
        """The rows of a user, ascending; int64, never empty."""
        return self._rows_N[self._cuts_U[user] : self._cuts_U[user + 1]].astype(np.int64)

    def sizes(self) -> np.ndarray:
        """Rows of every user, (U,), int64."""
        return np.diff(self._cuts_U)

    @classmethod
    def build(cls, dataset: Any, column: str, directory: Path | None = None) -> UserIndex:
        """Reads the ids of a dataset, a million rows at a time.

        Args:
            dataset: map-style: a `datasets.Dataset`, or anything with a length whose rows are mappings.
            column: of the ids: integers, texts or other plain values.
            directory: where the arrays go; None keeps them in memory. An index that is already there is read.

        Raises:
            DPConfigError: without such a column, for ids that are missing, no plain values, or the same in all rows.
        """
        if directory is not None and (directory / "index.json").exists():
            return cls.load(directory)
        num_rows = len(dataset)
        with tempfile.TemporaryDirectory(dir=directory.parent if directory else None) as scratch:
            place = Path(scratch)
            codes_N = _array(place / "codes.npy", np.int32, num_rows, directory is not None)
            num_users = _read_codes(dataset, column, codes_N)
            counts_U = np.zeros(num_users, np.int64)
            for part in _chunks(num_rows):
                counts_U += np.bincount(codes_N[part], minlength=num_users)
            cuts_U = np.concatenate([[0], counts_U.cumsum()])
            rows_N = _array(place / "rows.npy", _row_type(num_rows), num_rows, directory is not None)
            _sort(codes_N, cuts_U, rows_N)
            if directory is None:
                return cls(cuts_U, rows_N)
            rows_N.flush()  # type: ignore[attr-defined]
            np.save(place / "cuts.npy", cuts_U)
            about = {"column": column, "num_rows": num_rows, "num_users": num_users}
            (place / "index.json").write_text(json.dumps(about), encoding="utf-8")
            directory.mkdir(parents=True, exist_ok=True)
            for name in ("rows.npy", "cuts.npy", "index.json"):  # the last one says that all are there
                shutil.move(place / name, directory / name)
        return cls.load(directory)

    @classmethod
    def load(cls, directory: Path) -> UserIndex:
        """An index that `build` wrote, memory-mapped."""
        return cls(np.load(directory / "cuts.npy"), np.load(directory / "rows.npy", mmap_mode="r"))


def _array(path: Path, dtype: Any, size: int, on_disk: bool) -> np.ndarray:
    if on_disk and size:
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    return np.empty(size, dtype)


def _row_type(num_rows: int) -> type:
    return np.uint32 if num_rows < 2**32 else np.int64


def _chunks(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, CHUNK):
        yield slice(first, min(first + CHUNK, num_rows))


def _read_codes(dataset: Any, column: str, codes_N: np.ndarray) -> int:
    """Fills in a number for the user of every row, and returns how many users there are."""
    numbers: dict[Any, int] = {}
    first = 0
    for ids in _id_arrays(dataset, column):
        encoded = ids.dictionary_encode() if not isinstance(ids, pa.DictionaryArray) else ids
        values = encoded.dictionary
        missing = pc.sum(pc.is_null(encoded, nan_is_null=True)).as_py() or 0
        known = values.to_pylist()
        is_blank = [v is None or v != v or (isinstance(v, str) and not v.strip()) for v in known]
        if missing or any(is_blank):
            codes = np.asarray(encoded.indices.fill_null(-1))
            blank = np.array([-1, *(i for i, b in enumerate(is_blank) if b)])
            row = first + int(np.flatnonzero(np.isin(codes, blank))[0])
            raise DPConfigError(
                f"The column {column!r} has rows without an id (row {row} is the first), so nobody could say whose "
                f"they are. {MEND}"
            )
        of_dictionary = np.array([numbers.setdefault(v, len(numbers)) for v in known], np.int32)
        codes_N[first : first + len(encoded)] = of_dictionary[np.asarray(encoded.indices)]
        first += len(encoded)
    if len(numbers) == 1:
        raise DPConfigError(
            f"The column {column!r} has one value in all rows, so there would be one user and nothing to hide in. "
            "Name "
            "the column that tells people apart: --user_id_column author."
        )
    return len(numbers)


def _id_arrays(dataset: Any, column: str) -> Iterator[pa.Array]:
    """The ids as Arrow arrays, in the order of the rows."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "with_format"):
        if column not in names:
            raise _no_column(column, names)
        for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=CHUNK):
            yield _plain(table.column(column).combine_chunks(), column)
        return
    for part in _chunks(len(dataset)):
        rows = [dataset[i] for i in range(part.start, part.stop)]
        if not all(hasattr(row, "keys") and column in row for row in rows):
            raise _no_column(column, sorted(map(str, rows[0])) if hasattr(rows[0], "keys") else [])
        values = [row[column].item() if hasattr(row[column], "item") else row[column] for row in rows]
        try:
            ids = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DPConfigError(
                f"The ids in column {column!r} are of different kinds ({error}). Convert them to one: texts, or "
                "integers."
            ) from None
        yield _plain(ids, column)


def _plain(ids: Any, column: str) -> pa.Array:
    if isinstance(ids, pa.ChunkedArray):
        ids = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], ids.type)
    if pa.types.is_null(ids.type):
        raise DPConfigError(f"The column {column!r} is empty in all rows, so nobody could say whose they are. {MEND}")
    if not any(is_kind(ids.type) for is_kind in SCALARS):
        raise DPConfigError(
            f"The ids in column {column!r} are {ids.type}, which cannot be compared. Use one text or integer per "
            "row; a "
            "row that several people wrote needs one id for the group, who are then protected together."
        )
    return ids


def _no_column(column: str, names: list[str]) -> DPConfigError:
    return DPConfigError(
        f"The training dataset has no column {column!r} to tell users apart; it has: {', '.join(names) or 'none'}. "
        "Keep "
        "the column when you tokenize (map removes those named in remove_columns); the trainer takes it out of what "
        "the "
        "model sees."
    )


def _sort(codes_N: np.ndarray, cuts_U: np.ndarray, rows_N: np.ndarray) -> None:
    """Counting sort of the row numbers by user, some rows at a time; within a user they stay in order."""
    next_U = cuts_U[:-1].copy()
    for part in _chunks(len(codes_N)):
        codes = codes_N[part]
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        users, starts, counts = np.unique(ordered, return_index=True, return_counts=True)
        within = np.arange(len(ordered)) - np.repeat(starts, counts)
        rows_N[next_U[ordered] + within] = order + part.start
        next_U[users] += counts
