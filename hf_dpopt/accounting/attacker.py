"""Meaning of a privacy profile for people: how often an attacker is right, of one record and of groups.

All numbers are upper bounds on the attacker, rounded up to four digits.
"""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from hf_dpopt.accounting.profile import Profile

FALSE_POSITIVES = (0.001, 0.01, 0.1)
FALSE_POSITIVES_OF_GROUPS = 0.01
LARGEST_GROUP = 10
EPSILON_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the claimed one, at which delta is listed
FITS_WITHIN = 0.02  # true-positive rate, by which a Gaussian curve that fits may lie above the profile
LARGEST_EPSILON = 20.0  # beyond, odds of one in 10^8 may become certainty
FIT_POINTS = 1000  # false-positive rates at which the two are compared


def no_protection(epsilon: float, unit: str = "record") -> str:
    """Sentence on an epsilon that protects no unit; empty for a smaller one and for infinity."""
    if not LARGEST_EPSILON < epsilon < math.inf:
        return ""
    return (
        f"Epsilon {epsilon:.4g} gives no protection: the odds that a given {unit} was in the dataset may grow by a "
        f"factor of 10^{epsilon / math.log(10):.0f}, so that an adversary may be certain. 1 to 8 is usual, and more "
        f"than {LARGEST_EPSILON:g} does not protect."
    )


def round_up(value: float, digits: int = 4) -> float:
    """The value rounded up to so many significant digits."""
    if not math.isfinite(value):
        return value
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return float(context.create_decimal_from_float(value))


def pair_alone(epsilon: float, delta: float, false_positives: float) -> float:
    """Largest true-positive rate that a pair (epsilon, delta) allows.

    References:
        Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 2.1.
    """
    if not epsilon < 700:
        return 1.0
    left = math.exp(epsilon) * false_positives + delta
    return min(1.0, left, 1 - math.exp(-epsilon) * (1 - delta - false_positives))


def gaussian_fit(profile: Profile, delta: float) -> dict[str, Any]:
    """Smallest mu whose Gaussian trade-off curve bounds the profile, and how far above it lies at most.

    Compared are false-positive rates, and false-negative ones, of delta and more: nearer to 0, what fails with a tiny
    probability (a cap on the batch, say) is a larger share of an attacker's success than any Gaussian mechanism
    allows. Between two rates of the grid the profile is taken at the upper one and the Gaussian curve at the lower.

    Args:
        profile: that of a run.
        delta: smallest false-positive rate that is looked at, in (0, 0.5).

    Returns:
        ``mu``, ``largest_gap`` (true-positive rate), ``from_rate`` and whether it ``fits``, which it does within
        `FITS_WITHIN`. Only that it does not, if the profile allows nearly everything at every rate.

    References:
        Dong, Roth and Su (2022), arXiv:1905.02383 (mu-GDP); Gomez et al. (2025), arXiv:2503.10945 (to report it).
    """
    rates = ndtr(np.linspace(ndtri(delta), -ndtri(delta), FIT_POINTS))
    allowed = profile.true_positives(rates)
    seen = allowed[1:] <= 1 - delta
    if not seen.any():
        return {"fits": False}
    mu = round_up(max(0.0, float((ndtri(allowed[1:]) - ndtri(rates[:-1]))[seen].max())))
    gap = round_up(float((ndtr(ndtri(rates) + mu) - allowed).max()))
    return {"mu": mu, "largest_gap": gap, "from_rate": delta, "fits": gap <= FITS_WITHIN}


def meaning(profile: Profile, swapped: Profile, *, epsilon: float, delta: float) -> dict[str, Any]:
    """Meaning of a profile, as plain JSON values but for infinities.

    Args:
        profile: that of the run for neighbouring datasets.
        swapped: that of the run if one unit is replaced by any other.
        epsilon: epsilon that is claimed.
        delta: delta that is claimed.
    """
    groups = profile.groups(LARGEST_GROUP)
    return {
        "from": list(profile.sources),
        "true_positives": [
            {
                "false_positives": rate,
                "whole_profile": _rate(profile, rate),
                "pair_alone": round_up(pair_alone(epsilon, delta, rate)),
            }
            for rate in FALSE_POSITIVES
        ],
        "deltas": [[share * epsilon, round_up(profile.delta(share * epsilon))] for share in EPSILON_SHARES],
        "gaussian": gaussian_fit(profile, delta),
        "groups": [
            {
                "units": size,
                "epsilon": round_up(group.epsilon(delta)),
                "true_positives": _rate(group, FALSE_POSITIVES_OF_GROUPS),
            }
            for size, group in enumerate(groups, start=1)
        ],
        "replaced": {
            "epsilon": round_up(swapped.epsilon(delta)),
            "true_positives": [_rate(swapped, rate) for rate in FALSE_POSITIVES],
        },
    }


def _rate(profile: Profile, false_positives: float) -> float:
    return min(1.0, round_up(float(profile.true_positives(false_positives))))
