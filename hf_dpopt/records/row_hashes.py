r"""Hashes of rows, column by column: equal for a row in an Arrow table and for the same row read by Python.

The content of a row in a column is a sequence of numbers: bytes of a text, elements of a list, however nested. Its
hash is ``sum_i (v_i + 1) B^i mod 2^64`` plus a multiple of its length; B is odd, so that a sum over a block of rows is
one cumulated sum, divided by the power a row begins with. Of long rows the beginning and the end are hashed.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import pyarrow as pa

BASE, INVERSE = 0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 2**64)
PER_LENGTH = np.uint64(0xC2B2AE3D27D4EB4F)
ENDS = 512  # numbers at each end of a long row that are hashed

Key = tuple[str, str]  # name of a column (of a field of it), and kind: ints, floats, bytes, or scalar
Content = tuple[np.ndarray, np.ndarray]  # numbers of all rows, and where each row begins and ends, (rows + 1,)
Hashes = tuple[np.ndarray, np.ndarray]  # hashes and sizes in bytes, (rows,)


def of_table(table: pa.Table, but: Container[Key] = ()) -> dict[Key, Hashes]:
    """Hashes of all rows of a (small) table.

    Args:
        table: a block of rows; it is copied.
        but: keys to leave out.
    """
    import pyarrow as pa

    found: dict[Key, Hashes] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        values = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        for key, content in _arrow_content(name, values, np.arange(len(values) + 1), is_scalar=True).items():
            if key not in but:
                found[key] = _hashes(key, content)
    return found


def of_rows(rows: Sequence[Any]) -> dict[Key, Hashes]:
    """Hashes of rows as Python reads them: mappings, tuples, or values."""
    read = [_python_content(row) for row in rows]
    keys = {key for row in read for key in row}
    empty = np.zeros(0, dtype=np.int64)
    found = {}
    for key in keys:
        parts = [row.get(key, empty) for row in read]
        bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        found[key] = _hashes(key, (np.concatenate(parts), bounds))
    return found


# --- content ---


def _arrow_content(name: str, values: pa.Array, bounds: np.ndarray, *, is_scalar: bool) -> dict[Key, Content]:
    """Content of the rows of an Arrow array, by field; row i lies between ``bounds[i]`` and ``bounds[i + 1]``."""
    import pyarrow as pa

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _arrow_content(name, values.dictionary_decode(), bounds, is_scalar=is_scalar)
    if pa.types.is_struct(kind):
        found: dict[Key, Content] = {}
        for field, inner in zip(kind, values.flatten(), strict=True):
            found |= _arrow_content(f"{name}.{field.name}", inner, bounds, is_scalar=is_scalar)
        return found
    if pa.types.is_fixed_size_list(kind):
        first = values.offset * kind.list_size
        return _arrow_content(name, values.values, bounds * kind.list_size + first, is_scalar=False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _arrow_content(name, values.values, values.offsets.to_numpy().astype(np.int64)[bounds], is_scalar=False)
    if _is_text(kind):
        return {(name, "bytes"): _bytes_of(values.cast(pa.large_binary()), bounds)}
    numbers = _numbers(values)
    if numbers is None:
        return {}
    return {(name, "scalar" if is_scalar else _kind(numbers)): (_as_integers(numbers), bounds)}


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _bytes_of(values: pa.Array, bounds: np.ndarray) -> Content:
    _, starts, data = values.buffers()
    if starts is None or not len(values):
        return np.zeros(0, dtype=np.uint8), np.zeros_like(bounds)
    offsets = np.frombuffer(starts, dtype=np.int64, count=len(values) + 1, offset=8 * values.offset)
    content = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return content, offsets[bounds]


def _numbers(values: pa.Array) -> np.ndarray | None:
    """The values as numpy numbers; None for types that are not trained on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_temporal(kind):
        values = values.cast(pa.int64()) if values.type.bit_width == 64 else values.cast(pa.int32())
    elif pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    return (pc.fill_null(values, 0) if values.null_count else values).to_numpy(zero_copy_only=False)


def _python_content(row: Any) -> dict[Key, np.ndarray]:
    """Content of a row as Python reads it, by field."""
    found: dict[Key, list[np.ndarray]] = {}
    fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, (tuple, list)) else {"": row}
    for name, value in fields.items():
        _collect(str(name), value, found, is_scalar=True)
    return {key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in found.items()}


def _collect(name: str, value: Any, found: dict[Key, list[np.ndarray]], *, is_scalar: bool) -> None:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            _collect(f"{name}.{field}", inner, found, is_scalar=is_scalar)
    elif isinstance(value, (str, bytes)):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        found.setdefault((name, "bytes"), []).append(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    elif isinstance(value, (list, tuple)):
        numbers = _fast(value)
        if numbers is not None:
            found.setdefault((name, "ints"), []).append(numbers)
            return
        for inner in value:
            _collect(name, inner, found, is_scalar=False)
    elif value is not None:
        values = _as_array(value)
        if values is not None:
            alone = is_scalar and values.ndim == 0
            kind = "scalar" if alone else _kind(values)
            found.setdefault((name, kind), []).append(_as_integers(values.reshape(-1)))


def _fast(values: Sequence[Any]) -> np.ndarray | None:
    """Whole numbers of a list, the most frequent kind of record; None for anything else."""
    try:
        return np.frombuffer(array.array("q", values), dtype=np.int64) if values else None
    except (TypeError, OverflowError):
        return None


def _as_array(value: Any) -> np.ndarray | None:
    """The numbers of a tensor, an array, an image, or one number; None for what holds none."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        if not hasattr(value, "tobytes"):
            return None
        value = np.frombuffer(value.tobytes(), dtype=np.uint8)  # an image
    values = np.asarray(value)
    return values if values.dtype.kind in "biuf" else None


def _kind(values: np.ndarray) -> str:
    return "floats" if values.dtype.kind == "f" else "ints"


def _as_integers(values: np.ndarray) -> np.ndarray:
    """Integers as they are; floats by their bits in single precision, which file formats keep."""
    if values.dtype.kind == "f":
        return values.astype(np.float32).view(np.int32)
    return values


# --- hashes ---


def _hashes(key: Key, content: Content) -> Hashes:
    values, bounds = content
    lengths = np.diff(bounds)
    sizes = lengths * (1 if key[1] == "bytes" else 4)
    if len(lengths) and lengths.max() > 2 * ENDS:
        values, bounds = _ends_of(values, bounds)
    return _polynomials(values, bounds) + lengths.astype(np.uint64) * PER_LENGTH, sizes


def _ends_of(values: np.ndarray, bounds: np.ndarray) -> Content:
    """The first and last numbers of long rows, and all numbers of short ones."""
    lengths = np.diff(bounds)
    first = np.minimum(lengths, ENDS)
    last = np.minimum(lengths - first, ENDS)
    counts = np.stack([first, last], axis=1).reshape(-1)
    starts = np.stack([bounds[:-1], bounds[1:] - last], axis=1).reshape(-1)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return values[places], np.concatenate([[0], np.cumsum(first + last)])


def _polynomials(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    low, high = int(bounds[0]), int(bounds[-1])
    powers, inverses = _powers(_rounded_up(high - low))
    with np.errstate(over="ignore"):
        terms = values[low:high].astype(np.int64).view(np.uint64) + np.uint64(1)
        terms *= powers[: high - low]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
        starts, ends = bounds[:-1] - low, bounds[1:] - low
        return (sums[ends] - sums[starts]) * inverses[starts]


def _rounded_up(count: int) -> int:
    return max(1024, 1 << (count - 1).bit_length()) if count > 0 else 1024


@functools.lru_cache(maxsize=2)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers of the base and of its inverse modulo 2^64, from 0 to `count`."""
    with np.errstate(over="ignore"):
        both = [np.full(count + 1, base, dtype=np.uint64) for base in (BASE, INVERSE)]
        for powers in both:
            powers[0] = 1
            np.multiply.accumulate(powers, out=powers)
    return both[0], both[1]
