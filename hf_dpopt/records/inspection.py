"""Inspection of the training records before any budget is spent: what would fail in a step is reported now.

Stored columns and lists are read whole; datasets that make records on request are read on a sample. A refusal here
depends on the data and is shown to whoever holds it; in a step the same record is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.form import Form
from hf_dpopt.records.limits import LABEL_COLUMNS, MASKS, Limits, Range
from hf_dpopt.records.rows import is_stored, read_one, spread

SAMPLED = 64  # records of a dataset that makes them when they are asked for
STORED_ROWS = 50_000  # read at a time

NOT_FINITE = "holds NaN or infinity, so every step would leave the record out silently."

FIX = (
    "Correct such records or leave them out before training: a run that stopped when it met one would tell that it "
    "was drawn."
)


def refuse_malformed(dataset: Any, limits: Limits, form: Form | None) -> None:
    """Refuse records that the model cannot take, naming the first one found.

    Args:
        dataset: the training records, with a length.
        limits: what the model can look up.
        form: the form that records must fit; None to accept any.

    Raises:
        DPConfigError: naming record, column and what is allowed.
    """
    if not hasattr(dataset, "__len__"):
        return  # streams are refused by name
    if is_stored(dataset):
        wrong = _first_in_columns(dataset, limits)
        masks = [column for column in MASKS if column in dataset.column_names]
        if limits.first_tokens_count and masks and not wrong:
            wrong = _first_in_rows(enumerate(dataset.select_columns(masks)), limits, None)
    elif isinstance(dataset, (list, tuple)):
        wrong = _first_in_rows(enumerate(dataset), limits, form)
    else:
        wrong = _first_in_rows(_sample_rows(dataset), limits, form)
    if wrong:
        raise DPConfigError(f"{wrong} {FIX}")


def _sample_rows(dataset: Any) -> Iterator[tuple[int, Any]]:
    for i in spread(len(dataset), SAMPLED):
        try:
            rows = read_one(dataset, i)
        except Exception as error:
            raise DPConfigError(
                f"Training record {i} cannot be read: {type(error).__name__}: {error}. {FIX}"
            ) from error
        yield from ((i, row) for row in rows)


def refuse_missing_values(dataset: Any) -> None:
    """Refuse stored columns of numbers that have missing values.

    `default_data_collator` leaves a column out of a whole batch when the first record has none.

    Raises:
        DPConfigError: naming the column.
    """
    import pyarrow as pa

    for name, kind in zip(dataset.data.schema.names, dataset.data.schema.types, strict=True):
        if name not in dataset.column_names or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            continue
        for batch in dataset.with_format("arrow", columns=[name]).iter(STORED_ROWS):
            if batch.column(name).null_count:
                raise DPConfigError(f"The column {name!r} of the training set has missing values (null). {FIX}")


# --- rows ------------------------------------------------------------------------------------------------------------


def _first_in_rows(rows: Iterator[tuple[int, Any]], limits: Limits, form: Form | None) -> str:
    """Message about the first row that cannot be used; empty if there is none."""
    for i, row in rows:
        if form is not None and (misfit := form.misfit(row)):
            return f"Training record {i} does not have the form of the others: {misfit}."
        if misfit := limits.misfit(row):
            return f"Training record {i}: {misfit}. Cut or pad it where it is tokenized."
        if isinstance(row, Mapping):
            for column, value in row.items():
                if _is_checked(column, limits) and not _is_finite(value):
                    return f"Training record {i}: {column!r} {NOT_FINITE}"
                allowed = _range_of(column, limits)
                if allowed is not None and (wrong := _value_outside(value, allowed, column, limits)):
                    return f"Training record {i}: {wrong}"
    return ""


def _is_checked(column: str, limits: Limits) -> bool:
    """Whether values of NaN and infinity in a column are refused."""
    return limits.labels_are_finite and column in LABEL_COLUMNS


def _is_finite(value: Any) -> bool:
    try:
        array = np.asarray(value if not hasattr(value, "detach") else value.detach().cpu())
    except (ValueError, OverflowError):
        return True  # lists of different lengths
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _range_of(column: str, limits: Limits) -> Range | None:
    return limits.ranges.get("labels" if column in LABEL_COLUMNS else column)


def _value_outside(value: Any, allowed: Range, column: str, limits: Limits) -> str:
    try:
        array = np.asarray(value if not hasattr(value, "detach") else value.detach().cpu())
    except (ValueError, OverflowError):
        return ""  # lists of unlike lengths, whose parts a collator pads
    if array.dtype.kind == "f" and array.size:
        return _floats(column) if array.ndim == 0 and column in LABEL_COLUMNS and limits.classes_are_whole else ""
    if array.dtype.kind not in "iub" or not array.size:
        return ""
    outside = array[~allowed.holds(array.astype(np.int64))] if array.ndim else array[~allowed.holds(array)]
    return allowed.says(column, outside.flat[0]) if outside.size else ""


def _floats(column: str) -> str:
    return (
        f"{column!r} holds a fraction or a float, and the model has classes, which are whole numbers. Make them "
        "integers (dataset.cast_column, or int()); for a regression load the model with num_labels=1."
    )


# --- stored columns --------------------------------------------------------------------------------------------------


def _first_in_columns(dataset: Any, limits: Limits) -> str:
    """Vectorised `_first_in_rows` over Arrow columns; the columns that the model reads are known by name."""
    names = [name for name in dataset.column_names if name in (*limits.ranges, *limits.per_token, *LABEL_COLUMNS)]
    if not names:
        return ""
    begin = 0
    for batch in dataset.with_format("arrow", columns=names).iter(STORED_ROWS):
        arrays = {name: _one_array(batch.column(name)) for name in names}
        for name, array in arrays.items():
            wrong = _first_in_array(array, name, limits) or _first_uneven(arrays, name, limits)
            if wrong is not None:
                return f"Training record {begin + wrong[0]}: {wrong[1]}"
        begin += len(batch)
    return ""


def _one_array(column: Any) -> Any:
    import pyarrow as pa

    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    return whole


def _first_uneven(arrays: Mapping[str, Any], name: str, limits: Limits) -> tuple[int, str] | None:
    """The first record whose column has a different number of values than the record has tokens."""
    import pyarrow.compute as pc

    ids, values = arrays.get("input_ids"), arrays[name]
    if name not in limits.per_token or ids is None or not (_is_list(ids.type) and _is_list(values.type)):
        return None
    if _is_list(ids.type.value_type) or _is_list(values.type.value_type):
        return None
    lengths = [pc.list_value_length(array).to_numpy(zero_copy_only=False) for array in (values, ids)]
    places = np.flatnonzero(lengths[0] != lengths[1])
    if not len(places):
        return None
    own, tokens = (each[places[0]] for each in lengths)
    return int(places[0]), f"{name!r} has {own} values for the {tokens} tokens of 'input_ids'."


def _first_in_array(array: Any, column: str, limits: Limits) -> tuple[int, str] | None:
    import pyarrow as pa

    if array.null_count:
        return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]), f"{column!r} is missing (null)."
    allowed = _range_of(column, limits)
    values, row_of = _flattened(array)
    if _is_checked(column, limits) and pa.types.is_floating(values.type) and not values.null_count:
        places = np.flatnonzero(~np.isfinite(values.to_numpy(zero_copy_only=False)))
        if len(places):
            return _row(places[0], row_of), f"{column!r} {NOT_FINITE}"
    if allowed is None:
        place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) if values.null_count else None
        return None if place is None else (_row(place, row_of), f"{column!r} holds a missing value (null).")
    if pa.types.is_floating(values.type):
        is_class = row_of is None and column in LABEL_COLUMNS and limits.classes_are_whole
        return (0, _floats(column)) if is_class and len(values) else None
    if not pa.types.is_integer(values.type) and not pa.types.is_boolean(values.type):
        return None
    if values.null_count:
        place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        return _row(place, row_of), f"{column!r} holds a missing value (null)."
    numbers = values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    places = np.flatnonzero(~allowed.holds(numbers))
    return (_row(places[0], row_of), allowed.says(column, numbers[places[0]])) if len(places) else None


def _row(place: Any, ends: Sequence[np.ndarray] | None) -> int:
    for each in ends or ():
        place = int(np.searchsorted(each, place, side="right"))
    return int(place)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _flattened(array: Any) -> tuple[Any, list[np.ndarray] | None]:
    """Values of nested lists, and the ends of the lists of every level, innermost first."""
    import pyarrow.compute as pc

    ends: list[np.ndarray] = []
    while _is_list(array.type):
        ends.insert(0, np.cumsum(pc.list_value_length(array).to_numpy(zero_copy_only=False)))
        array = array.flatten()
    return array, ends or None
