"""Reading of JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Value of a text in JSON.

    Raises:
        ValueError: if it is none, or nested deeper than a reader can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many brackets") from None
