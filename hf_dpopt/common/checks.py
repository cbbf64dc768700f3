"""Refusals of values of the wrong type or out of range; every error says what is allowed."""

from __future__ import annotations

import math
import numbers
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hf_dpopt.common.errors import DPConfigError, shown

NOISE_KEY_BYTES = 32

# Squares are float32, from 1.2e-38 (below, they lose digits and then vanish) to 3.4e38. A record near the norm 1e-10
# that is spread over 1e9 coordinates has squares of 1e-29: so a norm that vanishes is far below the bound, and what is
# far above it overflows and is dropped. Gram matrices square activations and gradients apart, which takes a part of
# that room.
SMALLEST_CLIPPING_NORM, LARGEST_CLIPPING_NORM = 1e-10, 1e10
LARGEST_RATIO = 1e15  # of two clipping norms; its square multiplies squares in float32

# Less noise than the first hides nothing, and more than the second is more than any sum of records can be seen in;
# beyond, squares and their inverses leave the numbers that accountants compute with.
SMALLEST_NOISE, LARGEST_NOISE = 1e-9, 1e9


def check_noise_multiplier(value: float) -> None:
    """Refuse what cannot be a noise multiplier; 0.0 passes and makes epsilon infinite."""
    allowed = "a finite number > 0; 0.3 to 10 is usual, and 0.0 switches the noise off (NOT PRIVATE)"
    check_real("noise_multiplier", value, allowed)
    if value != 0 and not SMALLEST_NOISE <= value <= LARGEST_NOISE:
        raise DPConfigError(
            f"noise_multiplier={value} is outside {SMALLEST_NOISE:g} to {LARGEST_NOISE:g}, where epsilon cannot be "
            f"computed. Use {allowed}."
        )


def check_count(name: str, value: Any, allowed: str = "an integer >= 1") -> None:
    """Refuse what is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise DPConfigError(f"{name}={shown(value)} is not a positive count. Use {allowed}.")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse what is none of the names that are allowed; a name may be listed twice."""
    names = tuple(dict.fromkeys(allowed))
    if not isinstance(value, str) or value not in names:
        raise DPConfigError(f"{name}={shown(value)} is unknown. Use one of: {', '.join(map(repr, names))}.")


def check_mapping(name: str, value: Any, example: str) -> Mapping[str, Any]:
    """Refuse what does not map names to values; `example` is JSON that does."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise DPConfigError(
            f"{name}={shown(value)} is no mapping of names to values. Use JSON, such as --{name} '{example}'."
        )
    return value


def check_known(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that `name` does not have."""
    allowed = tuple(known)
    if unknown := sorted(set(options) - set(allowed)):
        fix = f"It knows: {', '.join(allowed)}." if allowed else "It has no options: leave them out."
        raise DPConfigError(f"{name} does not know {', '.join(unknown)}. {fix}")


def check_noise_key(value: str) -> None:
    """Refuse a test key that is not 32 bytes in hexadecimal."""
    try:
        num_bytes = len(bytes.fromhex(value))
    except (TypeError, ValueError):
        num_bytes = 0
    if num_bytes != NOISE_KEY_BYTES:
        raise DPConfigError(
            f"`unsafe_fixed_noise_key` is not {2 * NOISE_KEY_BYTES} hexadecimal digits. Use '00' * {NOISE_KEY_BYTES} "
            "in a test; leave it out in a real run, which takes its keys from the operating system."
        )


def check_real(name: str, value: Any, allowed: str) -> None:
    """Refuse text, None, NaN and infinity with one message."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not is_finite(value):
        raise DPConfigError(f"{name}={shown(value)} is not a finite number. Use {allowed}.")


def is_finite(value: numbers.Real) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with more than 308 digits
        return False


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is not a number in [low, high)."""
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and is_finite(value)
    if not (is_number and low <= float(value) < high):
        allowed = f"a finite number >= {low}" if high == math.inf else f"a number in [{low}, {high})"
        raise DPConfigError(f"{name}={shown(value)} is out of range. Use {allowed}.")


def check_share(name: str, value: Any, usual: str) -> None:
    """Refuse what is not a number in (0, 1); `usual` is one, or several."""
    check_real(name, value, f"a number in (0, 1), such as {usual}")
    if not 0 < value < 1:
        raise DPConfigError(f"{name}={value} is outside (0, 1). Use a number in it, such as {usual}.")


def check_at_most(name: str, value: Any, largest: float, why: str) -> None:
    """Refuse what is above a bound on what is computed; `why` says what would become of it, and what to do."""
    if value > largest:
        raise DPConfigError(f"{name}={shown(value)} is more than {largest:,}: {why}")


def check_positive(**values: Any) -> None:
    """Refuse what is not a finite number > 0; None passes."""
    for name, value in values.items():
        if value is not None:
            check_real(name, value, "a finite number > 0")
            if value <= 0:
                raise DPConfigError(f"{name}={shown(value)} is not > 0. Use a finite number > 0.")


def check_clipping_norm(name: str, value: Any) -> None:
    """Refuse bounds that norms in float32 cannot be held to."""
    ends = f"from {SMALLEST_CLIPPING_NORM:g} to {LARGEST_CLIPPING_NORM:g}"
    allowed = f"a finite number > 0, {ends}, in gradient units; 0.1 to 1 is usual"
    check_real(name, value, allowed)
    if not SMALLEST_CLIPPING_NORM <= value <= LARGEST_CLIPPING_NORM:
        raise DPConfigError(
            f"{name}={value} is out of range: in float32 squared norms vanish below it, and overflow above it. Use "
            f"{allowed}. With SGD a larger norm and a smaller learning rate are the same; Adam sees no scale."
        )


def check_clipping_ratio(own: float, clipping_norm: float) -> None:
    """Refuse two clipping norms whose ratio, squared, leaves float32."""
    if not 1 / LARGEST_RATIO <= own / clipping_norm <= LARGEST_RATIO:
        raise DPConfigError(
            f"clipping_norm={own:g} of the preconditioner and clipping_norm={clipping_norm:g} of the run are further "
            f"apart than {LARGEST_RATIO:g}, and norms in float32 cannot be converted. Bring them closer together."
        )


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


def is_reentrant(checkpointing: Mapping[str, Any]) -> bool:
    """Whether these keywords checkpoint reentrantly: given others but not `use_reentrant`, torch does."""
    keywords = {k: v for k, v in checkpointing.items() if k not in ("every_n_layers", "offload")}
    return bool(keywords) and bool(keywords.get("use_reentrant", True))
