"""Reading of JSON that somebody else may have written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MOST_NESTED = 100  # what is nested deeper, a reader further down the stack could not follow


def parse_json(text: str | bytes) -> Any:
    """Value of a text in JSON.

    Raises:
        ValueError: if it is none, or nested deeper than a reader can follow.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too many brackets") from None
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
    if level:
        raise ValueError("too many brackets")
    return value


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
