"""The form of a record: which columns it has, and what kind of values, decided record by record.

A collator takes the type of a whole batch from its first record (`default_data_collator` does: an integer label in
front truncates the fractions of all others). So every record is brought into one form before it meets another, by
a function of that record alone, and one that does not fit is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

KINDS = {"b": "int", "i": "int", "u": "int", "f": "float"}


@dataclasses.dataclass(frozen=True)
class Column:
    """Kind ("int", "float" or "other") and depth of nesting of the values of a column."""

    kind: str
    depth: int


ANYTHING = Column("other", -1)  # text, images, messages: only the collator can tell


def describe(value: Any) -> Column | None:
    """Kind and depth of a value; None for numbers that are no array (None among them, or texts beside numbers)."""
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        return Column("int", 0)
    if isinstance(value, (float, np.floating)):
        return Column("float", 0)
    if isinstance(value, torch.Tensor):
        return Column("float" if value.is_floating_point() else "int", value.dim())
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
        return Column(KINDS[value.dtype.kind], value.ndim)
    if isinstance(value, (list, tuple)) and value:
        return _describe_list(value)
    return Column("empty", 1) if isinstance(value, (list, tuple)) else ANYTHING


def _describe_list(value: list[Any] | tuple[Any, ...]) -> Column | None:
    first = value[0]
    if isinstance(first, (list, tuple, np.ndarray, torch.Tensor)):
        inner = [describe(item) for item in value]
        kinds = {c.kind for c in inner if c is not None and c.kind != "empty"}
        depths = {c.depth for c in inner if c is not None and c.kind != "empty"}
        if None in inner or len(kinds) > 1 or len(depths) > 1:
            return None if kinds <= {"int", "float"} else ANYTHING
        return Column(kinds.pop(), depths.pop() + 1) if kinds else Column("empty", 2)
    if not isinstance(first, (bool, int, float, np.generic)):
        return ANYTHING if first is not None else None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return Column(KINDS[array.dtype.kind], 1) if array.dtype.kind in KINDS else None


@dataclasses.dataclass(frozen=True)
class Form:
    """The columns of every record of a run.

    Args:
        columns: name -> what its values are.
    """

    columns: Mapping[str, Column]

    @classmethod
    def of(cls, record: Any, *, float_labels: bool = False) -> Form | None:
        """The form of a record that stands for all; None for records that are no mappings, of which nothing is known.

        Args:
            record: a row.
            float_labels: labels are numbers to be predicted, and integers among them are meant as such.
        """
        if not isinstance(record, Mapping):
            return None
        columns = {str(name): describe(value) or ANYTHING for name, value in record.items() if value is not None}
        for name in ("label", "labels", "label_ids"):
            if float_labels and name in columns and columns[name].kind == "int":
                columns[name] = Column("float", columns[name].depth)
        return cls(columns)

    def misfit(self, record: Any) -> str:
        """What is wrong with a record, or an empty text; says nothing about the values."""
        if not isinstance(record, Mapping):
            return f"it is {_article(type(record).__name__)}, not a mapping of columns"
        for name, column in self.columns.items():
            if name not in record or record[name] is None:
                return f"it has no {name!r}"
            wrong = _misfit(column, describe(record[name]))
            if wrong:
                return f"{name!r} {wrong}"
        return ""

    def fitted(self, record: Any) -> dict[str, Any] | None:
        """The record with the columns and kinds of the form; None if it does not fit."""
        if self.misfit(record):
            return None
        return {name: _as_kind(column, record[name]) for name, column in self.columns.items()}


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _misfit(wanted: Column, got: Column | None) -> str:
    if wanted == ANYTHING:
        return ""
    if got is None:
        return "holds values that are no numbers, or lists of unlike values"
    if got.kind == "empty" or wanted.kind == "empty":
        return ""
    if got.depth != wanted.depth:
        return f"is nested {got.depth} deep, where other records have {wanted.depth}"
    if got.kind != wanted.kind and not (got.kind == "int" and wanted.kind == "float"):
        return f"holds values of kind {got.kind}, where other records have {wanted.kind}"
    return ""


def _as_kind(column: Column, value: Any) -> Any:
    """Integers as floats where the column holds floats."""
    if column.kind != "float":
        return value
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_as_kind(column, item) for item in value]
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.float()
    if isinstance(value, np.ndarray) and value.dtype.kind != "f":
        return value.astype(np.float32)
    return value
