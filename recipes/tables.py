"""Tables from files: csv, tsv, json, jsonl and txt, each also gzipped, and parquet. An error names file and line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hf_dpopt import DPConfigError

EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")
TEXT_EXTENSIONS = (*EXTENSIONS, ".txt", ".parquet")  # for recipes that need no label
WITH_HEADER = (".csv", ".tsv")
NAME, LONGEST_NAME = re.compile(r"[^\W\d]"), 40  # of a column; values begin with digits, or are long
COLA_HEADER = ["source", "label", "mark", "sentence"]
MAX_FIELD = 2**31 - 1  # the csv module stops at 131,072 characters otherwise


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and where each row came from.

    Args:
        name: file or dataset, for messages.
        columns: column name -> values, one per row.
        lines: line of the file in which each row starts; None where rows have no line.
    """

    name: str
    columns: dict[str, Sequence[Any]]
    lines: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, row: int) -> str:
        """Place of a row in words."""
        return f"{self.name}, " + (f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}")


def columns_in(table: Table) -> str:
    """Their names, for a message.

    Raises:
        DPConfigError: if the first line of a file seems to be a record, which is not shown.
    """
    if Path(table.name.lower().removesuffix(".gz")).suffix not in WITH_HEADER:
        return ", ".join(map(repr, table.columns))
    for number, (name, values) in enumerate(table.columns.items(), start=1):
        if not NAME.match(name) or len(name) > LONGEST_NAME or name in values:
            raise DPConfigError(
                f"{table.name}: the first line has to name the columns, and seems to be a record, which is not shown: "
                f"its field {number} does not begin with a letter, is longer than {LONGEST_NAME} characters, or is a "
                "value of the same column below. Put a line of names first, or give that column a name."
            )
    return f"{', '.join(map(repr, table.columns))} (its first line)"


def check_columns(table: Table, wanted: Mapping[str, str], fix: str) -> None:
    """Refuse a table that lacks columns, and name all of them.

    Args:
        wanted: column -> option that names it; empty where none does.
        fix: end of the message.

    Raises:
        DPConfigError: if one is missing.
    """
    missing = [
        f"{name!r}{option and f' (--{option})'}" for name, option in wanted.items() if name not in table.columns
    ]
    if missing:
        raise DPConfigError(f"{table.name} has no column {' or '.join(missing)}. It has: {columns_in(table)}. {fix}")


def read_table(path: str | Path, *, kinds: tuple[str, ...] = EXTENSIONS, option: str | None = None) -> Table:
    """Reads one file into memory. The extension decides; text files may be gzipped and end in .gz, too.

    * csv: comma-separated, quoted with double quotes, first line is the header.
    * tsv: as GLUE ships it: tab-separated, a quote is an ordinary character, first line is the header. CoLA's four
      columns without a header are recognised.
    * jsonl, and json: one object per line; a .json file may also be one list of objects, or {"data": [...]}.
    * txt: one column, `text`, one row per line; lines of white space alone are left out.
    * parquet: as it is.

    Args:
        kinds: extensions that are read.
        option: what named the file, for messages.

    Raises:
        DPConfigError: if the file is missing, unreadable, damaged, empty or of another kind.
    """
    try:
        return _read(Path(path), kinds)
    except DPConfigError as error:
        raise DPConfigError(f"{option}={error}" if option else str(error)) from None


def _read(path: Path, kinds: tuple[str, ...]) -> Table:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    if kind not in kinds:
        raise DPConfigError(
            f"{path} is neither of {', '.join(kinds)} nor one of these with .gz behind. Convert or rename it."
        )
    try:
        if kind == ".parquet":
            table = _read_parquet(path)
        else:
            with _open(path) as file:
                table = READERS[kind](path, file)
    except FileNotFoundError:
        raise DPConfigError(f"{path} does not exist. Check the path (it is relative to {Path.cwd()}).") from None
    except UnicodeDecodeError as error:
        raise DPConfigError(
            f"{path} is not UTF-8 text ({error.reason}). Convert it, e.g. with iconv -t utf-8."
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DPConfigError(f"{path} is not a complete gzip file ({error}). Fetch or compress it again.") from None
    except OSError as error:
        raise DPConfigError(f"{path} cannot be read: {error.strerror or error}. Name a readable file.") from None
    if len(table) == 0:
        raise DPConfigError(f"{path} holds no rows. Name a file with at least one record.")
    return table


def _open(path: Path) -> TextIO:
    # newline="": the csv module wants the line ends as they are; utf-8-sig drops the mark some editors put first
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _read_csv(path: Path, file: TextIO) -> Table:
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(file, strict=True)

    def rows() -> Iterator[tuple[int, list[str]]]:
        start = 1
        try:
            for row in reader:
                if row:
                    yield start, row
                start = reader.line_num + 1
        except csv.Error as error:
            raise DPConfigError(
                f"{path}, line {start}: not valid csv ({error}). Fix the quotes of that row."
            ) from None

    return _from_rows(path, rows())


def _read_tsv(path: Path, file: TextIO) -> Table:
    stripped = ((number, line.rstrip("\r\n")) for number, line in enumerate(_lines(file), start=1))
    return _from_rows(path, ((number, line.split("\t")) for number, line in stripped if line))


def _lines(file: TextIO) -> Iterator[str]:
    """Lines that end in \\n only: with newline="" a lone carriage return inside a sentence would end one, too."""
    kept = ""
    for piece in file:
        kept += piece
        if kept.endswith("\n"):
            yield kept
            kept = ""
    if kept:
        yield kept


def _from_rows(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Table:
    first_line, header = next(rows, (1, []))
    columns: list[list[str]] = [[] for _ in header]
    lines: list[int] = []

    def add(line: int, row: list[str]) -> None:
        if len(row) != len(header):
            raise DPConfigError(
                f"{path}, line {line}: {len(row)} fields where the first line has {len(header)}. "
                "Remove stray separators from that row, or add what is missing."
            )
        lines.append(line)
        for column, value in zip(columns, row, strict=True):
            column.append(value)

    separator = next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None)
    if separator is not None:
        raise DPConfigError(
            f"{path}: the first line is one column name with {separator!r} in it, so the fields seem to be separated "
            f"by that. A .csv file is separated by commas, a .tsv file by tabs: convert it, e.g. "
            f"pandas.read_csv(.., sep={separator!r}).to_csv('train.csv', index=False)."
        )
    if len(header) == 4 and header[1] in ("0", "1") and header[2] in ("", "*"):
        first_row, header = header, COLA_HEADER
        add(first_line, first_row)
    if twice := [str(i) for i, name in enumerate(header, start=1) if header.count(name) > 1]:
        raise DPConfigError(
            f"{path}: the columns {' and '.join(twice)} share a name. Give each a name of its own in the first line; "
            "if that is a record, put a line of names before it."
        )
    for line, row in rows:
        add(line, row)
    return Table(str(path), dict(zip(header, columns, strict=True)), lines)


def _read_jsonl(path: Path, file: TextIO) -> Table:
    records, lines = [], []
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DPConfigError(
                f"{path}, line {number}: not valid JSON ({error.msg}). Fix or remove that line."
            ) from None
        lines.append(number)
    return _from_records(path, records, lines)


def _read_json(path: Path, file: TextIO) -> Table:
    text = file.read()
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or text.lstrip().startswith("{"):  # one object per line under the name .json
            file.seek(0)
            return _read_jsonl(path, file)
        raise DPConfigError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}). Fix that line.") from None
    if isinstance(whole, dict):
        if whole and all(isinstance(one, dict) for one in whole.values()):  # keys may be ids of people
            raise DPConfigError(f"{path} holds objects in an object. Write a list of objects, or one object per line.")
        whole = whole["data"] if isinstance(whole.get("data"), list) else [whole]
    if not isinstance(whole, list):
        raise DPConfigError(
            f"{path} holds one {type(whole).__name__}. Write a list of objects, or one object per line."
        )
    return _from_records(path, whole, None)


def _from_records(path: Path, records: list[Any], lines: list[int] | None) -> Table:
    columns: dict[str, list[Any]] = {}
    for row, record in enumerate(records):
        where = Table(str(path), {}, lines).where(row)
        if not isinstance(record, dict):
            raise DPConfigError(
                f'{where}: a {type(record).__name__}, not an object. Write {{"sentence": ..., "label": ...}}.'
            )
        if row == 0:
            columns = {name: [] for name in record}
        if record.keys() != columns.keys():
            odd = sorted(record.keys() ^ columns.keys())
            raise DPConfigError(
                f"{where}: keys differ from the first record's in {', '.join(map(repr, odd))}. Give all records the "
                "same keys."
            )
        for name, column in columns.items():
            column.append(record[name])
    return Table(str(path), columns, lines)


def _read_txt(path: Path, file: TextIO) -> Table:
    kept = [(number, line.rstrip("\r\n")) for number, line in enumerate(_lines(file), start=1) if line.strip()]
    return Table(str(path), {"text": [line for _, line in kept]}, [number for number, _ in kept])


def _read_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    if path.suffix.lower() == ".gz":
        raise DPConfigError(f"{path} is a gzipped parquet file. Unpack it with gunzip: parquet is compressed inside.")
    try:
        columns = parquet.read_table(path).to_pydict()
    except pyarrow.ArrowInvalid as error:
        raise DPConfigError(f"{path} is not a parquet file ({error}). Write it again, or rename it.") from None
    return Table(str(path), columns)


READERS = {".csv": _read_csv, ".tsv": _read_tsv, ".json": _read_json, ".jsonl": _read_jsonl, ".txt": _read_txt}
