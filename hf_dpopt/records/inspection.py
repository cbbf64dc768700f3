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
        for column, value in row.items() if isinstance(row, Mapping) else ():
            try:
                array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
            except (ValueError, OverflowError):
                continue  # lists of unlike lengths, whose parts a collator pads
            if wrong := _first_wrong(array.ravel(), column, limits, is_number=array.ndim == 0):
                return f"Training record {i}: {wrong[1]}"
    return ""


def _first_wrong(values: np.ndarray, column: str, limits: Limits, *, is_number: bool) -> tuple[int, str] | None:
    """Place of the first value of a column that the model cannot take, and why; None if there is none.

    Args:
        values: flat.
        is_number: whether a record has one number in the column, not a list of them.
    """
    if values.dtype.kind == "f" and column in LABEL_COLUMNS:
        places = np.flatnonzero(~np.isfinite(values))
        if len(places) and limits.labels_are_finite:
            return int(places[0]), f"{column!r} {NOT_FINITE}"
        return (0, _floats(column)) if is_number and limits.classes_are_whole and len(values) else None
    allowed = _range_of(column, limits)
    if allowed is None or values.dtype.kind not in "iub":
        return None
    places = np.flatnonzero(~allowed.holds(values.astype(np.int64, copy=False)))
    return (int(places[0]), allowed.says(column, values[places[0]])) if len(places) else None


def _range_of(column: str, limits: Limits) -> Range | None:
    return limits.ranges.get("labels" if column in LABEL_COLUMNS else column)


def _floats(column: str) -> str:
    return (
        f"{column!r} holds a fraction or a float, and the model has classes, which are whole numbers. Make them "
        "integers (dataset.cast_column, or int()); for a regression load the model with num_labels=1."
    )


# --- stored columns --------------------------------------------------------------------------------------------------


def _first_in_columns(dataset: Any, limits: Limits) -> str:
    """Vectorised `_first_in_rows` over Arrow columns; the columns that the model reads are known by name."""
    read = {*limits.ranges, *limits.positions, *limits.per_token, *LABEL_COLUMNS}
    names = [name for name in dataset.column_names if name in read]
    if not names:
        return ""
    begin = 0
    for batch in dataset.with_format("arrow", columns=names).iter(STORED_ROWS):
        arrays = {name: _one_array(batch.column(name)) for name in names}
        for name, array in arrays.items():
            wrong = _first_in_array(array, name, limits) or _first_of_another_length(arrays, name, limits)
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


def _first_of_another_length(arrays: Mapping[str, Any], name: str, limits: Limits) -> tuple[int, str] | None:
    """The first record with more tokens than positions, or with another number of values than of tokens."""
    ids, values, table = arrays.get("input_ids"), arrays[name], limits.positions.get(name)
    if not _is_flat_list(values):
        return None
    lengths = _lengths(values)
    for place in np.flatnonzero(lengths > table.most) if table is not None else ():
        if misfit := limits.misfit({name: values[int(place)].as_py()}):  # padding may take no position
            return int(place), f"{misfit}."
    if name not in limits.per_token or not _is_flat_list(ids):
        return None
    places = np.flatnonzero(lengths != (tokens := _lengths(ids)))
    if not len(places):
        return None
    own, wanted = lengths[places[0]], tokens[places[0]]
    return int(places[0]), f"{name!r} has {own} values for the {wanted} tokens of 'input_ids'."


def _first_in_array(array: Any, column: str, limits: Limits) -> tuple[int, str] | None:
    import pyarrow as pa

    if array.null_count:
        return _first_null(array), f"{column!r} is missing (null)."
    kind = array.type
    values, row_of = _flattened(array)
    is_known = _range_of(column, limits) is not None
    if values.null_count and (not is_known or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        return _row(_first_null(values), row_of), f"{column!r} holds a missing value (null)."
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type) or pa.types.is_floating(values.type)):
        return None
    numbers = values.to_numpy(zero_copy_only=False)
    wrong = _first_wrong(numbers, column, limits, is_number=not _is_list(kind))
    return None if wrong is None else (_row(wrong[0], row_of), wrong[1])


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def _lengths(array: Any) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.list_value_length(array).to_numpy(zero_copy_only=False)


def _row(place: int, ends: Sequence[np.ndarray]) -> int:
    for each in ends:
        place = int(np.searchsorted(each, place, side="right"))
    return int(place)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_flat_list(array: Any) -> bool:
    return array is not None and _is_list(array.type) and not _is_list(array.type.value_type)


def _flattened(array: Any) -> tuple[Any, list[np.ndarray]]:
    """Values of nested lists, and the ends of the lists of every level, innermost first."""
    ends: list[np.ndarray] = []
    while _is_list(array.type):
        ends.insert(0, np.cumsum(_lengths(array)))
        array = array.flatten()
    return array, ends
