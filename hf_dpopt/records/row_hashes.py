"""Hashes of rows, column by column: equal for a row in an Arrow table and for the same row read by Python.

The content of a row in a column is a sequence of numbers: bytes of a string, elements of a list, however nested.
Hashes hold within one process.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

BASE = np.uint64(0x9E3779B97F4A7C15)

Key = tuple[str, str]  # name of a column (of a field of it), and kind: ints, floats, bytes, or scalar
Hashes = tuple[np.ndarray, np.ndarray]  # hashes, uint64, and sizes in bytes, 4 of an integer, (rows,)


def of_rows(rows: Sequence[Any]) -> dict[Key, Hashes]:
    """Return the hashes of rows: mappings, tuples, or values."""
    contents = [_content(row) for row in rows]
    found = {}
    for key in {key for content in contents for key in content}:
        values = [content.get(key, b"") for content in contents]
        hashes = np.array([hash(value) for value in values], dtype=np.int64).view(np.uint64)
        found[key] = hashes, np.array([len(value) for value in values]) / (2 if key[1] == "ints" else 1)
    return found


def _content(row: Any) -> dict[Key, bytes]:
    """Return the content of a row, by field."""
    found: dict[Key, list[bytes]] = {}
    fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, (tuple, list)) else {"": row}
    for name, value in fields.items():
        _collect(str(name), value, found, is_scalar=True)
    return {key: parts[0] if len(parts) == 1 else b"".join(parts) for key, parts in found.items()}


def _collect(name: str, value: Any, found: dict[Key, list[bytes]], *, is_scalar: bool) -> None:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            _collect(f"{name}.{field}", inner, found, is_scalar=is_scalar)
    elif isinstance(value, (str, bytes)):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        found.setdefault((name, "bytes"), []).append(content)
    elif isinstance(value, (list, tuple)):
        integers = _integers(value)
        if integers is not None:
            found.setdefault((name, "ints"), []).append(integers)
            return
        for inner in value:
            _collect(name, inner, found, is_scalar=False)
    elif value is not None:
        numbers = _as_array(value)
        if numbers is not None:
            is_float = numbers.dtype.kind == "f"
            kind = "scalar" if is_scalar and numbers.ndim == 0 else "floats" if is_float else "ints"
            # single precision is what file formats keep
            content = numbers.astype(np.float32 if is_float else np.int64).tobytes()
            found.setdefault((name, kind), []).append(content)


def _integers(values: Sequence[Any]) -> bytes | None:
    """Return the integers of a list, the most frequent kind of record; None for anything else."""
    try:
        return array.array("q", values).tobytes() if values else None
    except (TypeError, OverflowError):
        return None


def _as_array(value: Any) -> np.ndarray | None:
    """Return the numbers of a tensor, an array, an image, or one number; None for what holds none."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    elif not isinstance(value, (np.ndarray, np.generic, int, float)):
        if not hasattr(value, "tobytes"):
            return None
        value = np.frombuffer(value.tobytes(), dtype=np.uint8)  # an image
    values = np.asarray(value)
    return values if values.dtype.kind in "biuf" else None
