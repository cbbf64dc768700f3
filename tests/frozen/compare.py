"""Frozen outputs, and what differs from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("outputs.json")


def frozen() -> dict[str, Any]:
    """Name -> output."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def write(outputs: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(outputs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(before: Any, after: Any, *, tolerance: float, at: str = "") -> Iterator[str]:
    """Lines that say where two outputs differ.

    Args:
        before, after: JSON values.
        tolerance: relative, of numbers; with 0 they and the hashes of tensors have to be equal.
        at: place of both.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            if key != "sha256" or not tolerance:
                yield from differences(before[key], after[key], tolerance=tolerance, at=f"{at} > {key}" if at else key)
        if at and before.keys() != after.keys():
            yield f"{at}: other entries, {sorted(before.keys() ^ after.keys())}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, tolerance=tolerance, at=f"{at}[{i}]")
    elif isinstance(before, float) and isinstance(after, float) and tolerance:
        if abs(before - after) > tolerance * max(abs(before), abs(after)):
            yield f"{at}: {before!r} became {after!r}"
    elif before != after:
        yield f"{at}: {str(before)[:200]!r} became {str(after)[:200]!r}"
