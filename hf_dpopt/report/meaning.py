"""Meaning of epsilon, for people: rows for `hf-dpopt plan` and the section of the privacy statement."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping
from typing import Any

SHOWN_GROUPS = (2, 3, 5, 10)
LARGEST_SHOWN_EPSILON = 100.0  # beyond, a number would only look like one


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
        meaning: what `hf_dpopt.plan.meaning.meaning_of_plan` returns.
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


def meaning_section(meaning: Mapping[str, Any], unit: str, adjacency: str) -> str:
    """Section of the privacy statement; empty without a profile.

    Args:
        meaning: what `hf_dpopt.plan.meaning.meaning_of_plan` returns, as JSON has it.
        unit: "record", "user" or "block".
        adjacency: that of the guarantee.
    """
    if not meaning:
        return ""
    what = "which of two is in it" if adjacency == "replace_one" else "whether it was there"
    rows = "\n".join(
        f"| {percent(row['false_positives'])} | {percent(row['whole_profile'])} | {percent(row['pair_alone'])} |"
        for row in meaning["true_positives"]
    )
    sources = ", ".join(f"`{_plain(name)}`" for name in meaning["from"])
    return (
        f"## What epsilon means\n\n"
        f"Suppose that somebody has everything that was released, knows all other {unit}s, and says of a {unit} "
        f"{what}. {attacker_sentence(meaning, unit)}\n\n"
        "| false positives | true positives, at most | if only epsilon and delta were known |\n"
        f"|---|---|---|\n{rows}\n\n"
        f"{_groups(meaning, unit)} {_replaced(meaning, unit)} {_gaussian_sentence(meaning['gaussian'])} "
        f"All numbers come from the whole privacy profile (accountants: {sources}) and are rounded up; `report.json` "
        "has delta at other epsilons."
    )


def attacker_sentence(meaning: Mapping[str, Any], unit: str) -> str:
    """Success of the best attacker, in two sentences."""
    hundredth = next(row for row in meaning["true_positives"] if row["false_positives"] == 0.01)
    return (
        f"Whoever accepts to be wrong about 1 % of the {unit}s that were not in the training set finds at most "
        f"{percent(hundredth['whole_profile'])} of those that were. Guessing finds 1 %."
    )


def _groups(meaning: Mapping[str, Any], unit: str) -> str:
    parts = []
    for group in meaning["groups"]:
        if group["units"] in SHOWN_GROUPS:
            parts.append(
                f"{group['units']}: {percent(group['true_positives'])} (epsilon {_epsilon(group['epsilon'])})"
            )
    return (
        f"Several {unit}s of one person are protected less. True positives at 1 % false ones for so many {unit}s "
        f"together: {', '.join(parts)}."
    )


def _replaced(meaning: Mapping[str, Any], unit: str) -> str:
    replaced = meaning["replaced"]
    rates = " / ".join(percent(rate) for rate in replaced["true_positives"])
    return (
        f"If one {unit} is replaced by any other, the three rates of the table are {rates} (epsilon "
        f"{_epsilon(replaced['epsilon'])})."
    )


def _gaussian_sentence(fit: Mapping[str, Any]) -> str:
    if not fit.get("fits"):
        return "No single Gaussian mechanism describes the run well, so no mu is stated."
    return (
        f"A Gaussian mechanism with mu = {fit['mu']:g} describes the run: where both rates of error are at least "
        f"{fit['from_rate']:g}, its true positives are no fewer than these, and at most {percent(fit['largest_gap'])} "
        "more."
    )


def _gaussian(fit: Mapping[str, Any]) -> str:
    if "mu" not in fit:
        return "none"
    how = "fits" if fit["fits"] else "does not fit"
    return f"mu {fit['mu']:g}, at most {percent(fit['largest_gap'])} too high: {how}"


def _epsilon(value: float | str) -> str:
    epsilon = float(value)  # infinity is spelt "inf" in JSON
    return f"{epsilon:.4g}" if epsilon <= LARGEST_SHOWN_EPSILON and math.isfinite(epsilon) else "above 100"


def _plain(text: str) -> str:
    return "".join(c for c in str(text) if c.isalnum() or c in " ()-_")
