"""Rows of who wrote what, from the files of the StackOverflow benchmark or a table, and their conversion to ids.

A split is read once, row by row, and written as Arrow files of a million records each. All processes map the same
files, so that the memory of a run does not grow with the split. An interrupted conversion continues after the last
complete file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import lzma
import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import import_extra
from recipes.stackoverflow_data import TITLE, Encoder
from recipes.tables import TEXT_EXTENSIONS, Table, check_columns, read_table

LAYOUTS = (".h5", ".hdf5", ".sqlite", ".sqlite.lzma")
ROWS_PER_FILE, ROWS_AT_ONCE = 1_000_000, 10_000
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
Row = dict[str, Any]


# --- rows ------------------------------------------------------------------------------------------------------------


class TableRows:
    """Rows of a csv, tsv, json(l), txt or parquet file, which is read into memory."""

    def __init__(self, path: Path):
        self._table = read_table(path, kinds=TEXT_EXTENSIONS)

    def count(self) -> int:
        """Number of rows."""
        return len(self._table)

    def rows(self, first: int = 0, columns: Collection[str] | None = None) -> Iterator[Row]:
        """Yield the rows from number `first` on; `columns` are those that have to be there, None for all."""
        names, values = list(self._table.columns), list(self._table.columns.values())
        return (dict(zip(names, row, strict=True)) for row in itertools.islice(zip(*values, strict=True), first, None))


class H5Rows:
    """HDF5: users are groups below ``examples``, with one array for each of tokens, tags, title, type ..."""

    def __init__(self, path: Path):
        self._path = path

    def count(self) -> int:
        return sum(num_rows for _, _, num_rows in self._users())

    def rows(self, first: int = 0, columns: Collection[str] | None = None) -> Iterator[Row]:
        for user, arrays, num_rows in self._users():
            if first < num_rows:
                names = [name for name in arrays if columns is None or name in columns]
                for values in zip(*(arrays[name][first:] for name in names), strict=True):
                    yield {"user": user} | {name: _text(value) for name, value in zip(names, values, strict=True)}
            first = max(0, first - num_rows)

    def _users(self) -> Iterator[tuple[str, Any, int]]:
        try:
            with import_extra("h5py", f"The HDF5 file {self._path}").File(self._path) as file:
                if "examples" not in file:
                    raise DPConfigError(f"{self._path}: no group 'examples'. Use the layout of TensorFlow Federated.")
                for user, arrays in file["examples"].items():
                    yield user, arrays, len(next(iter(arrays.values())))
        except OSError as error:
            raise DPConfigError(f"{self._path} is not a complete HDF5 file ({error}). Fetch it again.") from None


class SqliteRows:
    """sqlite: the tables ``examples`` and ``client_metadata`` of TensorFlow Federated.

    Args:
        split: train, heldout or test.
    """

    def __init__(self, path: Path, split: str):
        self._path, self._split = path, split

    def count(self) -> int:
        query = "SELECT COALESCE(SUM(num_examples), 0) FROM client_metadata WHERE split_name = ?"
        return next(self._select(query))[0]

    def rows(self, first: int = 0, columns: Collection[str] | None = None) -> Iterator[Row]:
        # in the order of the file: an index on users would be followed all over a file of 50 GB
        query = (
            "SELECT client_id, serialized_example_proto FROM examples NOT INDEXED WHERE split_name = ? "
            f"ORDER BY rowid LIMIT -1 OFFSET {first}"
        )
        for user, example in self._select(query):
            try:
                found = parse_example(example, columns)
            except (ValueError, IndexError, KeyError) as error:
                raise DPConfigError(
                    f"{self._path}: an example of the user {user!r} is not a complete tf.train.Example ({error}). "
                    "Fetch the file again."
                ) from None
            yield {"user": user} | {name: _text(value) for name, value in found.items()}

    def _select(self, query: str) -> Iterator[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            try:
                yield from connection.execute(query, (self._split,))
            except sqlite3.DatabaseError as error:
                raise DPConfigError(
                    f"{self._path} does not have the layout of TensorFlow Federated ({error}): a table 'examples' of "
                    "split_name, client_id, serialized_example_proto, and a table 'client_metadata'."
                ) from None


Source = TableRows | H5Rows | SqliteRows


def open_source(path: Path, split: str, folder: Path) -> Source:
    """Open a file by its extension.

    Args:
        split: which rows of an sqlite file.
        folder: where an sqlite file that is compressed is unpacked, once.

    Raises:
        DPConfigError: if it is missing or of another kind.
    """
    name = path.name.lower()
    if not path.is_file():
        raise DPConfigError(f"{path} is not a file. Name one of: {', '.join((*LAYOUTS, *TEXT_EXTENSIONS))}.")
    if name.endswith(".sqlite.lzma"):
        return SqliteRows(_unpacked(path, folder), split)
    if name.endswith(".sqlite"):
        return SqliteRows(path, split)
    return H5Rows(path) if name.endswith((".h5", ".hdf5")) else TableRows(path)


def _unpacked(path: Path, folder: Path) -> Path:
    plain = folder / path.stem
    if not plain.is_file():
        try:
            with lzma.open(path) as packed, _whole(plain) as part, part.open("wb") as file:
                with tqdm(desc=f"unpacking {path.name}", unit="B", unit_scale=True) as bar:
                    while block := packed.read(2**24):
                        bar.update(file.write(block))
        except (lzma.LZMAError, EOFError) as error:
            raise DPConfigError(f"{path} is not a complete lzma file ({error}). Fetch it again.") from None
    return plain


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Give the name of a new file, and rename it to `path` when it is complete."""
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        part = Path(scratch, path.name)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)


def _text(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def parse_example(data: bytes, names: Collection[str] | None = None) -> dict[str, Any]:
    """First value of every feature of a serialized ``tf.train.Example``: bytes or an integer; floats are left out.

    Args:
        names: features that are needed; None for all.

    Raises:
        ValueError, IndexError, KeyError: if it is damaged.
    """
    found: dict[str, Any] = {}
    for _, features in _fields(data):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            name = parts[1].decode()
            if names is not None and name not in names:
                continue
            for kind, values in _fields(parts.get(2, b"")):
                value = next((v for _, v in _fields(values)), None)
                if kind == 1 and value is not None:
                    found[name] = value
                elif kind == 3 and value is not None:
                    found[name] = value if isinstance(value, int) else _varint(value, 0)[0]
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a protocol buffer message; those of fixed width are skipped."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it is cut off")
            yield key >> 3, data[at : at + size]
            at += size
        elif wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value, shift = value & 127, 7
    while True:
        at += 1
        value |= (data[at] & 127) << shift
        if data[at] < 128:
            return value, at + 1
        shift += 7


# --- conversion ------------------------------------------------------------------------------------------------------


def convert(
    path: Path, split: str, encoder: Encoder, user_column: str, *, folder: Path | None = None, limit: int | None = None
) -> Dataset:
    """Encode a split, or map the files of an earlier conversion of the same file by the same encoder.

    Args:
        path: file of the layouts of TensorFlow Federated, or a table.
        split: which rows of an sqlite file: train, heldout or test.
        encoder: makes ids of rows.
        user_column: column of the user ids; of the layouts ``user``.
        folder: where the files are kept; private, as they hold the records. None: a folder next to `path`.
        limit: only the first so many rows are read.

    Returns:
        The columns of the encoder and the user ids, as strings.

    Raises:
        DPConfigError: for files that cannot be read, or that have nothing the encoder knows.
    """
    folder = folder or path.with_name(f"{path.name}.converted")
    source = open_source(path, split, folder)
    first_row = next(source.rows(), None)
    if first_row is None:
        raise DPConfigError(f"{path} holds no examples of the split {split!r}. Check the file, and the split.")
    wanted = {user_column: "user_id_column"} | encoder.columns
    check_columns(Table(str(path), {name: [] for name in first_row}), wanted, "Name columns that are there.")
    num_rows = min(source.count(), limit or 2**63)
    status = path.stat()
    about = repr((path.resolve(), status.st_size, status.st_mtime_ns, split, encoder, user_column, num_rows))
    folder = folder / hashlib.sha256(about.encode()).hexdigest()[:16]
    sizes = {
        folder / f"{first // ROWS_PER_FILE:05}.arrow": min(ROWS_PER_FILE, num_rows - first)
        for first in range(0, num_rows, ROWS_PER_FILE)
    }
    missing = list(itertools.dropwhile(Path.is_file, sizes))
    done = num_rows - sum(sizes[file] for file in missing)
    rows = source.rows(done, {*wanted, TITLE}) if missing else iter(())
    # without counts: how many records the users have is private
    bar = tqdm(total=num_rows, initial=done, desc=f"converting {path.name}", bar_format=BAR, disable=not missing)
    try:
        for file in missing:
            with _whole(file) as part:
                _write(part, itertools.islice(rows, sizes[file]), encoder, user_column, bar)
                written = Dataset.from_file(str(part))
                if len(written) < sizes[file]:
                    raise DPConfigError(f"{path} ends after {bar.n} of {num_rows} rows. Fetch it again.")
                encoder.check(str(path), written.data)
    except DPConfigError:
        for emptied in (folder, folder.parent):
            with contextlib.suppress(OSError):
                emptied.rmdir()
        raise
    finally:
        bar.close()
    return concatenate_datasets([Dataset.from_file(str(file)) for file in sizes])


def _write(file: Path, rows: Iterator[Row], encoder: Encoder, user_column: str, bar: Any) -> None:
    ids = pa.list_(pa.int16() if encoder.num_ids <= 2**15 else pa.int32())
    schema = pa.schema({user_column: pa.string(), **dict.fromkeys(encoder.encode([]), ids)})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            users = [_user_id(row[user_column], user_column) for row in some]
            writer.write_batch(pa.record_batch({user_column: users, **encoder.encode(some)}, schema=schema))
            bar.update(len(some))


def _user_id(value: Any, column: str) -> str | None:
    if value is not None and not isinstance(value, (str, int)):
        raise DPConfigError(f"user_id_column={column}: {type(value).__name__} is not an id. Use strings or integers.")
    return None if value is None else str(value)
