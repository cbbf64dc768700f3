"""Refusals of numbers out of range; every error says what is allowed."""

from __future__ import annotations

import math
import numbers
from typing import Any

from hf_dpopt.errors import DPConfigError

NOISE_KEY_BYTES = 32


def check_noise_multiplier(value: float) -> None:
    """Refuses what cannot be a noise multiplier; 0.0 passes and makes epsilon infinite."""
    check_real("noise_multiplier", value, "a finite number > 0 (0.0 switches the noise off: NOT PRIVATE)")
    if value < 0:
        raise DPConfigError(
            f"noise_multiplier={value} is negative. Use a finite number > 0; 0.0 switches the noise off, and epsilon "
            "is then infinite (NOT PRIVATE)."
        )


def check_count(name: str, value: Any, allowed: str = "an integer >= 1") -> None:
    """Refuses what is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise DPConfigError(f"{name}={value!r} is not a positive count. Use {allowed}.")


def check_noise_key(value: str) -> None:
    """Refuses a test key that is not 32 bytes in hexadecimal."""
    try:
        num_bytes = len(bytes.fromhex(value))
    except (TypeError, ValueError):
        num_bytes = 0
    if num_bytes != NOISE_KEY_BYTES:
        raise DPConfigError(
            f"unsafe_fixed_noise_key is not {2 * NOISE_KEY_BYTES} hexadecimal digits. Use '00' * {NOISE_KEY_BYTES} in "
            "a test; leave it out in a real run, which takes its keys from the operating system."
        )


def check_real(name: str, value: Any, allowed: str) -> None:
    """Refuses text, None, NaN and infinity with one message."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise DPConfigError(f"{name}={value!r} is not a finite number. Use {allowed}.")


def check_positive(**values: Any) -> None:
    """Refuses what is not a finite number > 0; None passes."""
    for name, value in values.items():
        if value is not None:
            check_real(name, value, "a finite number > 0")
            if value <= 0:
                raise DPConfigError(f"{name}={value} is not > 0. Use a finite number > 0.")
