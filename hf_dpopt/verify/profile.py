"""Claims of a report about attackers, recomputed from privacy losses or the formula for Gaussian mechanisms."""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.special import ndtr, ndtri

from hf_dpopt.verify import accountants
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.events import BINS, MOVES, Leaves
from hf_dpopt.verify.outcome import Contradiction, Unknown
from hf_dpopt.verify.reading import Fields

RATE_TOLERANCE = 0.01  # relative, by which a claimed rate may lie below a recomputed one: grids differ
POINTS = 400  # epsilons whose deltas bound an attacker


def check_attackers(report: Report, leaves: Leaves) -> str:
    """The claimed true-positive rates against an independent bound on the best attacker.

    Args:
        report: the report.
        leaves: mechanisms, and how often each ran.
    """
    rows = report.fields.inner("meaning").content.get("true_positives")
    if not isinstance(rows, list) or not rows:
        raise Contradiction("it states what epsilon means, and no rates of attackers")
    found = []
    for content in rows:
        row = Fields(content, "the rates of an attacker")
        false, claimed = row.positive("false_positives"), row.number("whole_profile")
        if not false < 1 or claimed > 1:
            raise Contradiction(f"{false:g} and {claimed:g} are no rates")
        recomputed = true_positives(leaves, false, report.epsilon, report.delta, report.mechanism.adjacency)
        if claimed < recomputed * (1 - RATE_TOLERANCE):
            if BINS in (report.mechanism.sampler, *(run.sampler for run in report.earlier)):
                raise Unknown(
                    f"at {false:.3g} false positives, {claimed:.4g} claimed, {recomputed:.4g} if the batches are known"
                )
            raise Contradiction(
                f"at {false:.3g} false positives, {claimed:.4g} true ones are claimed to be the most, and "
                f"{recomputed:.4g} recomputed"
            )
        found.append(f"{claimed:.4g} claimed, {recomputed:.4g} recomputed at {false:g}")
    return "; ".join(found)


def true_positives(leaves: Leaves, false_positives: float, epsilon: float, delta: float, adjacency: str) -> float:
    """Largest true-positive rate of a test between neighbours, from delta at many epsilons.

    Raises:
        Unknown: for batches without an independent analysis.
    """
    if all(isinstance(leaf, GaussianDpEvent) for leaf, _ in leaves):
        mu = MOVES[adjacency] * math.sqrt(sum(count / leaf.noise_multiplier**2 for leaf, count in leaves))  # type: ignore[attr-defined]
        return float(ndtr(ndtri(false_positives) + mu))
    steps, left = accountants.uncut(leaves, delta)
    cost = delta - left
    empty = PLDAccountant(accountants.RELATIONS[adjacency])
    if not all(empty.supports(leaf) for leaf, _ in steps):
        raise Unknown("no independent accountant knows the whole profile of these batches")
    losses = PLDAccountant(accountants.RELATIONS[adjacency], accountants.grid_of(steps, epsilon))
    for leaf, count in steps:
        losses.compose(leaf, count)
    t = np.linspace(0.0, 2 * epsilon + 1, POINTS)
    deltas = np.minimum(1.0, np.array([losses.get_delta(float(x)) for x in t]) + cost)
    bounds = np.minimum(
        np.exp(t) * false_positives + deltas, 1 - np.exp(-t) * (1 - deltas - false_positives)
    )  # the attack, and that on the complement with both datasets exchanged
    return float(min(1.0, bounds.min()))
