"""Strict reading of JSON: nothing that two readers could understand differently."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hf_dpopt.common.durable import open_regular
from hf_dpopt.verify.outcome import Contradiction

LARGEST = 2**63  # of a whole number in the files
MOST_BYTES = 512 * 2**20  # of a ledger of millions of steps
MOST_SMALL = 16 * 2**20  # of a report, a statement or a card


def read_regular(path: Path, most: int = MOST_SMALL) -> bytes:
    """Content of a plain file, or of one that a link leads to (as in a cache of the hub), if it is not too large.

    Raises:
        Contradiction: for a pipe, a device, a folder, a file that is too large, and one that cannot be read.
    """
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise Contradiction(f"{path.name} is no plain file, or cannot be read ({type(error).__name__})") from None
    if len(content) > most:
        raise Contradiction(f"{path.name} has more than {most} bytes")
    return content


def strict_json(text: bytes | str) -> Any:
    """The value of a text in JSON.

    Raises:
        Contradiction: for text that is none, a name that occurs twice in an object, NaN, infinity, or a number that
            no float or 64-bit integer holds.
    """
    try:
        # the UTF-8 that RFC 8259 asks for: json guesses other encodings, which other readers do not
        return json.loads(
            text.decode() if isinstance(text, bytes) else text,
            object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite, parse_int=_small,
        )  # fmt: skip
    except Contradiction:
        raise
    except (ValueError, RecursionError) as error:
        raise Contradiction(f"it is no JSON ({type(error).__name__})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Contradiction(f"{twice[:60]!r} occurs twice in one object, and readers differ in which one counts")
    return found


def _refuse(text: str) -> NoReturn:
    raise Contradiction(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Contradiction(f"{text[:40]} is more than a number can hold")
    return value


def _small(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= LARGEST:
        raise Contradiction(f"{text[:40]} is more than a count can be")
    return int(text)


class Fields:
    """The entries of an object of a report, each of the kind that is asked for.

    Args:
        content: the object.
        where: how messages call it.
    """

    def __init__(self, content: Any, where: str):
        if not isinstance(content, Mapping):
            raise Contradiction(f"{where} is no object")
        self.content, self.where = content, where

    def has(self, name: str) -> bool:
        """Whether the entry is there and not null."""
        return self.content.get(name) is not None

    def _get(self, name: str, what: str, is_one: Callable[[Any], bool]) -> Any:
        if name not in self.content:
            raise Contradiction(f"{self.where} has no {name!r}")
        if not is_one(self.content[name]):
            raise Contradiction(f"{self.where}: {name}={self.content[name]!r:.60} is no {what}")
        return self.content[name]

    def text(self, name: str) -> str:
        """A text."""
        return str(self._get(name, "text", lambda value: isinstance(value, str)))

    def flag(self, name: str) -> bool:
        """True or false."""
        return bool(self._get(name, "true or false", lambda value: isinstance(value, bool)))

    def count(self, name: str, least: int = 1) -> int:
        """A whole number that is not below `least`."""
        return int(self._get(name, f"whole number >= {least}", lambda value: type(value) is int and value >= least))

    def number(self, name: str, *, may_be_infinite: bool = False) -> float:
        """A finite number >= 0; "inf" is infinity where it may be."""
        if may_be_infinite and self.content.get(name) == "inf":
            return math.inf
        return float(self._get(name, "number >= 0", lambda value: _is_number(value) and value >= 0))

    def positive(self, name: str) -> float:
        """A finite number above 0."""
        return float(self._get(name, "number > 0", lambda value: _is_number(value) and value > 0))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, at least one."""
        return tuple(map(float, self._get(name, "list of numbers", _are_numbers)))

    def inner(self, name: str) -> Fields:
        """An object."""
        return Fields(self.content.get(name), f"{self.where}, {name}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_number, value))
