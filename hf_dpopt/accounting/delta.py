"""The delta of a run: the one that is taken where none is given, what it tells about n, and how large it may be.

A mechanism that publishes one record outright, chosen at random among n, is (0, 1/n)-differentially private. So a
delta of 1/n promises nothing to the one whose record it is, and a promise to everybody needs one well below.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from hf_dpopt.common.errors import DPConfigError, PrivacyWarning

LARGEST_DELTA = 0.5  # beyond, a guarantee fails more often than it holds, and calibration takes minutes
MARGIN = 10  # the default is at most 1 / (MARGIN n)


def default_delta(num_units: int) -> float:
    """``min(n^-1.1, 1 / (10 n))``, rounded down to one significant digit; never increases with n.

    Computed in whole numbers: no rounding on the way may carry the result above the bound, or across a digit.

    Args:
        num_units: n, records or users; >= 1.
    """
    power = len(str(num_units))  # 10^-power <= 1/n
    while not _is_within(1, power, num_units):
        power += 1
    digit = max(digit for digit in range(1, 10) if _is_within(digit, power, num_units))
    return float(f"{digit}e-{power}")


def _is_within(digit: int, power: int, num_units: int) -> bool:
    """Whether ``digit 10^-power`` is at most ``1 / (10 n)`` and, with both sides to the power of 10, ``n^-1.1``."""
    below_margin = digit * MARGIN * num_units <= 10**power
    return below_margin and digit**10 * num_units**11 <= 10 ** (10 * power)


def sizes_with_default(num_units: int) -> tuple[int, int]:
    """The smallest and the largest n that have the default delta of this one: what the default tells about n."""
    delta = default_delta(num_units)
    return _smallest(lambda n: default_delta(n) <= delta), _smallest(lambda n: default_delta(n) < delta) - 1


def _smallest(holds: Callable[[int], bool]) -> int:
    """The smallest n >= 1 from which on something holds."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def resolve_delta(
    target_delta: float | None,
    num_units: int,
    *,
    allow_large: bool,
    recorded: float | None = None,
    unit: str = "record",
) -> float:
    """The delta of a run, checked against the number of units.

    Args:
        target_delta: what was asked for.
        num_units: n, what is protected one by one: records or users.
        allow_large: whether a delta above 1/n was allowed in words.
        recorded: that of the run that goes on, which is kept if no other is asked for.
        unit: name of the unit in messages.

    Raises:
        DPConfigError: for one unit alone, and for a delta above 1/n that was asked for and not allowed.

    Warns:
        PrivacyWarning: for a delta of 1/n or more.
    """
    if num_units < 2:
        raise DPConfigError(
            f"The dataset has one {unit}: a model that learns anything from it tells of that {unit}, and one that "
            f"tells nothing is noise. Use a dataset of hundreds of {unit}s or more."
        )
    delta = target_delta if target_delta is not None else recorded
    if delta is None:
        return default_delta(num_units)
    worthless = 1 / num_units
    if delta < worthless:
        return _within_bound(delta)
    what = (
        f"delta={delta:g} is {'above' if delta > worthless else 'exactly'} 1/n = {worthless:.3g} for n = {num_units} "
        f"{unit}s: a run that publishes one {unit} outright, chosen at random, would keep such a promise"
    )
    fix = f"Use target_delta <= {default_delta(num_units):g} (the default), or any other below 1/n"
    if target_delta is not None and delta > worthless and not allow_large:
        raise DPConfigError(
            f"{what}. {fix}; to state it all the same, set allow_large_delta (--allow_large_delta true), which the "
            "privacy statement then says."
        )
    warnings.warn(f"{what}. {fix}.", PrivacyWarning, stacklevel=3)
    return _within_bound(delta)


def _within_bound(delta: float) -> float:
    """Return the delta; refuse what is too large to calibrate noise to."""
    if delta > LARGEST_DELTA:
        raise DPConfigError(
            f"target_delta={delta:g} is above {LARGEST_DELTA:g}: the guarantee would fail more often than it holds, "
            "and noise cannot be calibrated to it. Use at most 1 / number of records, or leave it out."
        )
    return delta
