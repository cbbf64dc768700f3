"""The form of a record: its columns and the kind of their values, decided record by record.

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

KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float"}
WIDER = {"bool": ("bool",), "int": ("int", "bool"), "float": ("float", "int", "bool")}  # what becomes what, unchanged


@dataclasses.dataclass(frozen=True)
class Column:
    """Kind, depth and container of the values of a column.

    Args:
        kind: "bool", "int", "float", "empty" (a list without an element) or "other".
        depth: levels of nested lists, >= 0; 0 for a number, -1 for `ANYTHING`.
        container: "list", or the type of a numpy array or torch tensor as text.
    """

    kind: str
    depth: int
    container: str = "list"


ANYTHING = Column("other", -1)  # text, images, messages: only the collator can tell


def describe(value: Any) -> Column | None:
    """Kind, depth and container of a value; None for numbers that are no array (None or texts among them)."""
    if isinstance(value, (list, tuple)):
        return _describe_list(value) if value else Column("empty", 1)
    if isinstance(value, torch.Tensor):
        kind = "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
        return Column(kind, value.dim(), str(value.dtype) if value.dim() else "list")
    if isinstance(value, (int, float)):
        return Column("bool" if isinstance(value, bool) else "float" if isinstance(value, float) else "int", 0)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in KINDS:
        return Column(KINDS[value.dtype.kind], value.ndim, f"numpy.{value.dtype}" if value.ndim else "list")
    return ANYTHING


def _describe_list(value: list[Any] | tuple[Any, ...]) -> Column | None:
    first = value[0]
    if isinstance(first, (list, tuple, np.ndarray, torch.Tensor)):
        inner = [describe(item) for item in value]
        kinds = {c.kind for c in inner if c is not None and c.kind != "empty"}
        depths = {c.depth for c in inner if c is not None and c.kind != "empty"}
        if None in inner or len(kinds) > 1 or len(depths) > 1:
            return None if kinds <= WIDER.keys() else ANYTHING
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
        columns: name -> kind of its values.
    """

    columns: Mapping[str, Column]

    @classmethod
    def of(cls, record: Any, *, float_labels: bool = False) -> Form | None:
        """The form that one record prescribes for all; None for records that are not mappings.

        Args:
            record: a row of the dataset.
            float_labels: labels are real numbers to be predicted, even those written as integers.
        """
        if not isinstance(record, Mapping):
            return None
        columns = {str(name): describe(value) or ANYTHING for name, value in record.items() if value is not None}
        for name in ("label", "labels", "label_ids"):
            if float_labels and name in columns and columns[name].kind in ("int", "bool"):
                columns[name] = Column("float", columns[name].depth)
        return cls(columns)

    def misfit(self, record: Any) -> str:
        """Say why a record does not fit, as a text without its values; empty if it fits."""
        if not isinstance(record, Mapping):
            return f"it is no mapping of columns but of type {type(record).__name__}"
        for name, column in self.columns.items():
            if name not in record or record[name] is None:
                return f"it has no {name!r}"
            wrong = _misfit(column, describe(record[name]))
            if wrong:
                return f"{name!r} {wrong}"
        return ""

    def fitted(self, record: Any) -> dict[str, Any] | None:
        """The record with the columns, kinds and containers of the form; None if it does not fit."""
        if self.misfit(record):
            return None
        return {name: _as(column, record[name], describe(record[name])) for name, column in self.columns.items()}


def _misfit(wanted: Column, got: Column | None) -> str:
    if wanted == ANYTHING:
        return ""
    if got is None:
        return "holds values that are no numbers, or lists of unlike values"
    if got.kind == "empty" or wanted.kind == "empty":
        return ""
    if got.depth != wanted.depth:
        return f"is nested {got.depth} deep, where other records have {wanted.depth}"
    if got.kind not in WIDER[wanted.kind]:
        return f"holds values of kind {got.kind}, where other records have {wanted.kind}"
    return ""


def _as(column: Column, value: Any, got: Column | None) -> Any:
    """Convert a value to the kind and container of its column; collators look at those of the first record only."""
    if got is None or got.kind in ("other", "empty") or column.kind in ("other", "empty"):
        return value
    if column.depth == 0:
        return _each(column.kind, value.item() if hasattr(value, "item") else value)
    # half precision in the first record would round the numbers of all others
    if (got.kind, got.container) == (column.kind, column.container) and not got.container.endswith("float16"):
        return value
    if column.container == "list" and got.container == "list":
        return _each(column.kind, value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value  # numpy has none
    array = np.asarray(value)
    if column.container == "list":
        return _each(column.kind, array.tolist())
    if column.kind == "int":
        array = array.astype(np.int64)  # never narrowed: a number that wraps around is another one
    elif column.kind == "float":
        array = array.astype(np.float64 if column.container.endswith("float64") else np.float32)
    return array if column.container.startswith("numpy.") else torch.as_tensor(array)


def _each(kind: str, value: Any) -> Any:
    """Numbers of one kind in lists."""
    value = value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
    if isinstance(value, (list, tuple)):
        return [_each(kind, item) for item in value]
    return {"bool": bool, "int": int, "float": float}[kind](value)
