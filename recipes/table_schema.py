"""A public schema of a table, and its rows as text: ``{"age":43,"city":"Bonn","note":"said \\"no\\", twice"}``.

The schema is a JSON file that the user writes. Nothing in it may be read from the records, since it is published:

    {"age": {"type": "integer", "min": 0, "max": 120},
     "weight": {"type": "number", "min": 1, "max": 300, "optional": true},
     "city": {"type": "category", "values": ["Bonn", "Hamm"]},
     "note": {"type": "text"}}

A row becomes one that fits by itself, whatever the other rows are, so it stays one record: a number outside its range
is clipped to it; where a column is optional, what is not a value of its type is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpopt import DPConfigError
from hf_dpopt.common.log import warn_once
from recipes.synthetic_text import LENGTHS, length_cell
from recipes.tables import Table, check_columns

Row = tuple[Any, ...]  # a value for each column; None where it is missing

KEYS = {"integer": ("min", "max"), "number": ("min", "max"), "category": ("values",), "text": ()}  # of each type
NUMBERS = ("integer", "number")
HALF = re.compile(r"[\ud800-\udfff]")  # of a surrogate pair: JSON can name one alone, UTF-8 cannot hold it
MOST_INTERVALS = 10  # of a range, in a histogram
ID = re.compile(r"(?i:(?:.*[\W_])?(?:id|idx|uuid|guid|key|nr|no|number))|.*[a-z]I[dD]")  # case_no, patientId
LARGE_RANGE = 1000  # numbers


@dataclass(frozen=True)
class Column:
    """A column of the schema.

    Args:
        name, type: as the file has them.
        optional: whether values may be missing.
        values: those of a category.
        min, max: range of a number, both included.
    """

    name: str
    type: str
    optional: bool = False
    values: tuple[Any, ...] = ()
    min: float = 0
    max: float = 0

    def fit(self, given: Any) -> Any:
        """The value of a record in this column, or None where it is missing.

        Raises:
            ValueError: if there is none, and it is not optional.
        """
        value: Any = None
        if self.type == "text":
            is_text = isinstance(given, str) and not HALF.search(given)
            value = given if is_text and (given or not self.optional) else None
        elif self.type == "category" and given is not None:
            same = [one for one in self.values if str(one) == str(given)]
            read = _from_json(str(given).lower())
            kinds = (bool,) if isinstance(read, bool) else (int, float)  # True == 1
            value = next(iter(same or [one for one in self.values if type(one) in kinds and one == read]), None)
        elif self.type in NUMBERS:
            with contextlib.suppress(ValueError):  # of what is not a number
                number = float(str(given))
                if math.isfinite(number) and (self.type == "number" or number.is_integer()):
                    value = min(max(number, self.min), self.max)
                    value = int(value) if self.type == "integer" else float(value) + 0.0  # -0.0
        if value is None and not self.optional:
            raise ValueError(self.name)
        return value

    @property
    def of_json(self) -> dict[str, Any]:
        """JSON schema of a value."""
        if self.values:
            return {"enum": [*self.values, *[None] * self.optional]}
        kinds = [{"text": "string"}.get(self.type, self.type), *["null"] * self.optional]
        return {"type": kinds} | ({"minimum": self.min, "maximum": self.max} if self.type in NUMBERS else {})

    @property
    def num_cells(self) -> int:
        """Of the histogram of the column: values, intervals of a range or of numbers of words, and last: missing."""
        spread = min(MOST_INTERVALS, int(self.max - self.min) + 1)
        sizes = {"integer": spread, "number": MOST_INTERVALS, "category": len(self.values), "text": len(LENGTHS) + 1}
        return sizes[self.type] + self.optional

    def cell(self, value: Any) -> int:
        """Place of a value in the histogram."""
        if value is None:
            return self.num_cells - 1
        if self.type == "category":
            return [*map(str, self.values)].index(str(value))
        if self.type == "text":
            return length_cell(value)
        width, num = self.max - self.min + (self.type == "integer"), self.num_cells - self.optional
        return min(int((value - self.min) * num / width), num - 1)


def _from_json(text: str) -> Any:
    """The value of a text, as of "true" and "1.0", which other programs write for True and 1."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in the order in which a row is written."""

    columns: tuple[Column, ...]

    @classmethod
    def of_file(cls, path: str) -> Schema:
        """Read a file.

        Raises:
            DPConfigError: naming the column that is not described.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_without_doubles)
        except (OSError, ValueError) as error:
            raise DPConfigError(f"schema={path}: cannot be read ({error}). Name a file of JSON.") from None
        if not isinstance(found, dict) or not found:
            raise DPConfigError(f'schema={path}: has no columns. Write {{"note": {{"type": "text"}}, ..}}.')
        return cls(tuple(_column(f"schema={path}: column {name!r}", name, given) for name, given in found.items()))

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def rows(self, table: Table) -> list[Row]:
        """The rows of a table, each made to fit.

        Raises:
            DPConfigError: for a missing column, or a row that cannot be made to fit; without its values.
        """
        check_columns(table, dict.fromkeys(self.names, "schema"), "Correct the schema.")
        found = []
        for i, row in enumerate(zip(*(table.columns[name] for name in self.names), strict=True)):
            try:
                found.append(tuple(column.fit(given) for column, given in zip(self.columns, row, strict=True)))
            except ValueError as error:
                raise DPConfigError(
                    f"{table.where(i)}: {str(error)!r} is missing, or is not what the schema says. Correct the row, "
                    'or give the column "optional": true, with which such values are missing.'
                ) from None
        return found

    def warn_of_ids(self, num_units: int) -> None:
        """Warn once of columns that may tell rows apart, by what is public: names, ranges and the number of units.

        Whether their values differ is not looked at: a line of a log would say something exact of the records.
        """
        most = max(num_units, LARGE_RANGE)
        found = [
            repr(one.name)
            for one in self.columns
            if one.type != "category"
            and (ID.fullmatch(one.name) or one.max - one.min >= most and one.type == "integer")
        ]
        if found:
            warn_once(
                f"ids in {found}",
                f"The schema has {', '.join(found)}, with the name of an id, or more numbers than there are records. "
                "If every record has another value (an id, a number of a case), it cannot be learned, and made-up "
                "ones mean nothing: leave it out of the schema.",
            )

    def write(self, row: Row) -> str:
        """A row as text."""
        return json.dumps(dict(zip(self.names, row, strict=True)), ensure_ascii=False, separators=(",", ":"))

    @property
    def grammar(self) -> str:
        """The texts of rows, each after a space, in Lark with a JSON schema, as llguidance reads it."""
        of_row = {
            "type": "object", "properties": {one.name: one.of_json for one in self.columns}, "required": self.names,
            "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
        }  # fmt: skip
        return f'start: " " row\nrow: %json {json.dumps(of_row)}'

    def parse(self, text: str) -> Row | None:
        """The row of a text; None if it is not JSON, or holds half a character, which no file can hold."""
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            return tuple(one.fit(row[one.name]) for one in self.columns)
        return None

    @property
    def examples(self) -> list[str]:
        """Texts of rows that have, between them, every category and both ends of every range."""
        kinds = [one.values or ((one.min, one.max) if one.type in NUMBERS else ("",)) for one in self.columns]
        rows = ([some[i % len(some)] for some in kinds] for i in range(max(map(len, kinds))))
        return [self.write(tuple(one.fit(end) for one, end in zip(self.columns, row, strict=True))) for row in rows]

    def cells(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """Column -> place of each row's value in its histogram."""
        return {one.name: [one.cell(row[i]) for row in rows] for i, one in enumerate(self.columns)}

    @property
    def sizes(self) -> dict[str, int]:
        """Column -> number of places."""
        return {one.name: one.num_cells for one in self.columns}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which a key that is there twice would silently be the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice among {', '.join(name for name, _ in pairs)}")
    return found


def _column(where: str, name: str, given: Any) -> Column:
    """A column of the file.

    Raises:
        DPConfigError: saying what it must have.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise DPConfigError(f"{where}: type must be one of {', '.join(KEYS)}. Correct it.")
    if not {"type", *KEYS[kind]} <= given.keys() <= {"type", "optional", *KEYS[kind]}:
        raise DPConfigError(
            f"{where} has the keys {', '.join(given)}. Give it {', '.join(('type', *KEYS[kind]))}; it may have "
            "optional, too."
        )
    column = Column(name, **given)
    if not isinstance(column.optional, bool):
        raise DPConfigError(f"{where}: optional must be true or false. Correct it.")
    ends = (column.min, column.max)
    if kind in NUMBERS and not (
        all(type(end) in (int, float)[: 1 + (kind == "number")] and abs(end) < 2**53 for end in ends)
        and column.min < column.max
    ):
        raise DPConfigError(f"{where}: min and max must be of type {kind}, and min below max. Correct them.")
    values = given["values"] if isinstance(given.get("values"), list) else []
    for number in (*ends, *values):
        if isinstance(number, float) and not re.fullmatch(r"-?[0-9]+[.][0-9]+", repr(number)):
            raise DPConfigError(f"{where}: {number} is not a number in plain decimal notation. Use another unit.")
    if kind != "category":
        return column
    texts = {str(value) for value in values if isinstance(value, (str, int, float))}
    if not texts or "" in texts or len(texts) < len(values):
        raise DPConfigError(f"{where}: values must be a list of different strings or numbers. Correct it.")
    return dataclasses.replace(column, values=tuple(values))
