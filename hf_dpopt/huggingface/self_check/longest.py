"""Length of the longest record of a dataset, so that a model is tried at that length."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any


def longest_record(dataset: Any) -> int | None:
    """Tokens of the longest record in a stored column of input_ids or a list; None if records are made on request."""
    if isinstance(dataset, list):
        rows = (row.get("input_ids") for row in dataset if isinstance(row, Mapping))
        return max((len(row) for row in rows if isinstance(row, Sized)), default=None)
    names, form = getattr(dataset, "column_names", None), getattr(dataset, "format", None)
    if (
        not (isinstance(names, list) and "input_ids" in names and isinstance(form, dict))
        or form.get("type") == "custom"
    ):
        return None
    import pyarrow.compute as pc

    longest = 0
    for batch in dataset.with_format("arrow", columns=["input_ids"]).iter(10_000):
        try:
            longest = max(longest, pc.max(pc.list_value_length(batch.column("input_ids"))).as_py() or 0)
        except NotImplementedError:  # no lists (ArrowNotImplementedError is one)
            return None
    return longest or None
