"""Refusals of values of the wrong type, by the annotation that an option has."""

from __future__ import annotations

import numbers
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hf_dpopt.common.errors import DPConfigError, shown

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of the annotated type.

    Numbers of numpy count as numbers, a path as a text, and a tuple as a list; True and False are no numbers. What
    the annotation does not tell (classes of other libraries, choices) passes.

    Args:
        name: name of the option.
        value: what was given.
        hint: its resolved annotation.
    """
    kinds = kinds_of(hint)
    if kinds is None or any(_is_of(value, kind) for kind in kinds):
        return
    raise DPConfigError(
        f"{name}={shown(value)} is of type {type(value).__name__}. Use {' or '.join(map(_describe, kinds))}."
    )


def kinds_of(hint: Any) -> tuple[Any, ...] | None:
    """The plain types that an annotation allows; None if it allows something else, too."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [kinds_of(part) for part in get_args(hint)]
        return None if None in parts else tuple(kind for part in parts for kind in part or ())
    if get_origin(hint) is Literal:
        return tuple({type(choice): None for choice in get_args(hint)})
    plain = get_origin(hint) or hint
    if plain in (dict, Mapping):
        return (Mapping,)
    if plain in (list, tuple, Sequence):
        inner = get_args(hint)[0] if get_args(hint) else Any
        return (list[str],) if inner is str else (list,)
    return (plain,) if plain in _WORDS else None


def _is_of(value: Any, kind: Any) -> bool:
    if kind == list[str]:  # a text alone is as good as a list of it
        several = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(one, str | os.PathLike) for one in several)
    if kind is list:
        return isinstance(value, list | tuple)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if kind is Mapping:
        return "a mapping of names to values (JSON on a command line)"
    if kind == list[str]:
        return "a list of texts"
    return "a list" if kind is list else _WORDS[kind]
