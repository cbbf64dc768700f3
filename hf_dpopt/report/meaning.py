"""Meaning of epsilon, for people: rows for `hf-dpopt plan`, and sentences of the statement and the card."""

from __future__ import annotations

import decimal
from collections.abc import Mapping
from typing import Any

SHOWN_GROUPS = (2, 3, 5, 10)


def percent(rate: float) -> str:
    """A rate in per cent, rounded up to three digits."""
    context = decimal.Context(prec=3, rounding=decimal.ROUND_CEILING)
    exact = decimal.Decimal(repr(float(rate))) * 100  # 0.001 is 0.1 %, and no 0.101 %
    return f"{float(min(decimal.Decimal(100), context.create_decimal(exact))):g} %"


def rates_of(meaning: Mapping[str, Any], name: str) -> str:
    """The true-positive rates at all false-positive rates, on one line."""
    return " / ".join(percent(row[name]) for row in meaning["true_positives"])


def plan_rows(meaning: Mapping[str, Any], unit: str) -> dict[str, str]:
    """Rows of the table of `hf-dpopt plan`; none without a profile.

    Args:
        meaning: what `hf_dpopt.plan.privacy_profile.meaning_of_plan` returns.
        unit: "record", "user" or "block".
    """
    if not meaning:
        return {}
    groups = {group["units"]: group for group in meaning["groups"]}
    rates = " / ".join(percent(row["false_positives"]) for row in meaning["true_positives"])
    shown = [groups[size] for size in SHOWN_GROUPS if size in groups]
    sizes = " / ".join(str(group["units"]) for group in shown)
    return {
        f"attacker is right about, at most, when wrong about {rates}": rates_of(meaning, "whole_profile"),
        "the same, if only epsilon and delta were known": rates_of(meaning, "pair_alone"),
        f"the same, of {sizes} {unit}s together (wrong about 1 %)": " / ".join(
            percent(group["true_positives"]) for group in shown
        ),
        "Gaussian mechanism above it": _gaussian(meaning["gaussian"]),
    }


def attacker_sentence(meaning: Mapping[str, Any], unit: str) -> str:
    """Success of the best attacker, in two sentences."""
    hundredth = next(row for row in meaning["true_positives"] if row["false_positives"] == 0.01)
    return (
        f"Whoever accepts to be wrong about 1 % of the {unit}s that were not in the training set finds at most "
        f"{percent(hundredth['whole_profile'])} of those that were. Guessing finds 1 %."
    )


def _gaussian(fit: Mapping[str, Any]) -> str:
    if "mu" not in fit:
        return "none"
    how = "fits" if fit["fits"] else "does not fit"
    return f"mu {fit['mu']:g}, at most {percent(fit['largest_gap'])} too high: {how}"
