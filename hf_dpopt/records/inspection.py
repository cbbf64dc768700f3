"""Inspection of the training records before any budget is spent: what would fail in a step is reported now.

Stored columns and lists are read whole; datasets that make records on request are read on a sample. A refusal here
depends on the data and is shown to whoever holds it; in a step the same record is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.limits import LABEL_COLUMNS, MASKS, Limits
from hf_dpopt.records.rows import is_stored, read_one, spread

SAMPLED = 64  # records of a dataset that makes them when they are asked for
STORED_ROWS = 10_000  # read at a time
KINDS = {"b": "integers", "i": "integers", "u": "integers", "f": "floats", "U": "text"}  # of numpy

FIX = (
    "Correct such records (cut or pad them where they are tokenized) or leave them out before training: a run that "
    "stopped when it met one would tell that it was drawn."
)


def refuse_malformed(dataset: Any, limits: Limits) -> None:
    """Refuse records that the model cannot take, that miss a value, or that are unlike the first, naming one.

    Args:
        dataset: the training records, with the columns that the collator sees: a list, a stored dataset, or what
            makes records on request.
        limits: what the model can look up.

    Raises:
        DPConfigError: naming record, column and what is allowed.
    """
    kinds: dict[str, str] = {}
    for i, row in _rows(dataset, limits):
        if not kinds and isinstance(row, Mapping):
            kinds = {column: _kind(value) for column, value in row.items()}
        if wrong := _unlike(row, kinds) or limits.misfit(row) or _wrong_values(row, limits):
            raise DPConfigError(f"Training record {i}: {wrong}. {FIX}")


def _rows(dataset: Any, limits: Limits) -> Iterator[tuple[int, Any]]:
    """Numbered records in which something may be wrong."""
    if is_stored(dataset):
        yield from _suspicious_rows(dataset, limits)
    elif isinstance(dataset, (list, tuple)):
        yield from enumerate(dataset)
    else:
        for i in spread(len(dataset), SAMPLED):
            try:
                rows = read_one(dataset, i)
            except Exception as error:
                raise DPConfigError(
                    f"Training record {i} cannot be read: {type(error).__name__}: {error}. {FIX}"
                ) from error
            yield from ((i, row) for row in rows)


def _unlike(row: Any, kinds: Mapping[str, str]) -> str:
    """Say in which column a record has values of another kind than the first record; empty if in none."""
    if kinds and not isinstance(row, Mapping):
        return f"it is of type {type(row).__name__}, not a mapping of columns"
    for column, wanted in kinds.items():
        if wanted and row.get(column) is None:
            return f"it has no {column!r}"
        got = _kind(row.get(column))
        if wanted and got and wanted != got:
            return f"{column!r} holds {got}, where the first has {wanted}"
    return ""


def _kind(value: Any) -> str:
    """Kind and depth of numbers or strings, in words; empty for objects and for a list without elements.

    Of single numbers, integers stand for floats: labels to be predicted may be written so.
    """
    depth = 0
    while isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        value, depth = value[0], depth + 1
    array = _as_array(value)
    if array is None:
        return ""
    kind, depth = KINDS.get(array.dtype.kind, ""), depth + array.ndim
    if not kind or not array.size:
        return ""
    return f"{kind} in lists of depth {depth}" if depth else "text" if kind == "text" else "a number"


def _as_array(value: Any) -> np.ndarray | None:
    """A value as an array; None for lists of unlike lengths, whose parts a collator pads."""
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, OverflowError):
        return None


def _wrong_values(row: Any, limits: Limits) -> str:
    """Say why the model cannot take a value of a record; empty if it can."""
    for column, value in row.items() if isinstance(row, Mapping) else ():
        array = _as_array(value)
        if array is None:
            continue
        values = array.ravel()
        if array.ndim and values.dtype == object and any(x is None for x in values):
            return f"{column!r} holds a missing value (null)"
        if wrong := _wrong(values, column, limits, is_number=array.ndim == 0):
            return wrong.rstrip(".")
    return ""


def _wrong(values: np.ndarray, column: str, limits: Limits, *, is_number: bool) -> str:
    """Say which of the values of a record, or of many, in a column the model cannot take; empty if it can."""
    allowed = limits.range_of(column)
    if values.dtype.kind == "f" and column in LABEL_COLUMNS:
        if limits.labels_are_finite and not np.isfinite(values).all():
            return f"{column!r} holds NaN or infinity, so every step would leave the record out silently."
        if is_number and limits.classes_are_whole:
            return (
                f"{column!r} holds a fraction or a float, and the model has classes, which are whole numbers. Make "
                "them integers (dataset.cast_column, or int()); for a regression load the model with num_labels=1."
            )
    elif values.dtype.kind == "f" and allowed is not None and len(values):
        return f"{column!r} holds floats, and the model looks up whole numbers."
    if allowed is None or values.dtype.kind not in "iub":
        return ""
    outside = values[~allowed.holds(values.astype(np.int64, copy=False))]
    return allowed.says(column, outside[0]) if len(outside) else ""


# --- stored columns --------------------------------------------------------------------------------------------------


def _suspicious_rows(dataset: Any, limits: Limits) -> Iterator[tuple[int, Any]]:
    """Rows of the parts of a table in which one may be wrong, by a test of whole columns that costs little.

    A missing value is refused at once: `default_data_collator` leaves a column out of a whole batch when the first
    record has none. Texts that nobody reads may be missing.
    """
    import pyarrow as pa

    read = {*limits.ranges, *limits.positions, *limits.per_token, *LABEL_COLUMNS}
    read |= set(MASKS) if limits.first_tokens_count else set()
    kinds = {name: dataset.data.schema.field(name).type for name in dataset.column_names}
    texts = {name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)}
    looked_at, kept, begin = [name for name in kinds if name in read], [*({*kinds} - texts | {*kinds} & read)], 0
    for batch in dataset.with_format("arrow", columns=kept).iter(STORED_ROWS) if kept else ():
        for name in kept:
            if batch.column(name).null_count:
                missing = begin + batch.column(name).is_null().index(True).as_py()
                raise DPConfigError(f"Training record {missing}: {name!r} is missing (null). {FIX}")
        columns = {name: pa.concat_arrays(batch.column(name).chunks) for name in looked_at}
        if limits.first_tokens_count or any(_is_suspicious(columns, name, limits) for name in looked_at):
            yield from enumerate(batch.select(looked_at).to_pylist(), begin)
        begin += len(batch)


def _is_suspicious(columns: Mapping[str, Any], name: str, limits: Limits) -> bool:
    import pyarrow as pa

    array, table = columns[name], limits.positions.get(name)
    lengths, tokens = (_lengths(columns.get(column)) for column in (name, "input_ids"))
    if lengths is not None and table is not None and (lengths > table.most).any():
        return True
    if name in limits.per_token and not (lengths is None or tokens is None or np.array_equal(lengths, tokens)):
        return True
    is_number, has_nulls = not _is_list(array), False
    while _is_list(array):
        array = array.flatten()
        has_nulls = has_nulls or array.null_count > 0
    if has_nulls or pa.types.is_nested(array.type):
        return has_nulls
    return bool(_wrong(array.to_numpy(zero_copy_only=False), name, limits, is_number=is_number))


def _is_list(array: Any) -> bool:
    import pyarrow as pa

    return any(
        is_list(array.type) for is_list in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    )


def _lengths(array: Any) -> np.ndarray | None:
    """Lengths of the lists in a column of flat ones, (rows,); None for any other column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array is None or not _is_list(array) or pa.types.is_nested(array.type.value_type):
        return None
    return pc.list_value_length(array).to_numpy(zero_copy_only=False)
