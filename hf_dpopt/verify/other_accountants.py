"""Epsilon by accountants that are not ours: dp-accounting's PLD, opacus' PRV, and the exact Gaussian formula.

All but the PRV's lower end are upper bounds. A claim is supported if it is not below one of them, up to `TOLERANCE`.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import optimize, stats
from scipy.special import log_ndtr, ndtr, ndtri

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.extras import import_extra
from hf_dpopt.verify.outcome import Inapplicable, Unknown
from hf_dpopt.verify.plan_events import MOVES, Leaves

TOLERANCE = 1e-3  # relative, by which a claim may lie below a recomputed value: grids differ
SLACK = 1e-5  # absolute, for an epsilon near 0
GRID_ERROR = 2e-4  # relative, of a recomputed value
MOST_POINTS = 2 * 10**6  # of the privacy loss of one step
LARGEST = 500.0  # epsilon beyond which privacy losses overflow
POINTS = 400  # epsilons whose deltas bound an attacker
SMALLEST_DELTA = 1e-10  # at which rounding in the convolutions is small beside delta
CAP_SHARE = 0.01  # of delta, that cut batches may cost in the simple bound
RELATIONS = {
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """An epsilon that was recomputed.

    Attributes:
        epsilon: upper bound on what ran.
        least: what a claim below which is false; 0 where the bound is not tight.
    """

    epsilon: float
    least: float = 0.0


def uncut(leaves: Leaves, delta: float) -> tuple[Leaves, float]:
    """The steps without a cap on batches, and what is left of delta for them.

    Unless the OTHER records alone fill a batch, which is as likely with the record as without it, the cap changes
    nothing; the probability that this ever fails is paid for by delta. Steps for which that is too much stay as they
    are.
    """
    found: Leaves = []
    cost = 0.0
    for leaf, count in leaves:
        if isinstance(leaf, TruncatedSubsampledGaussianDpEvent):
            cap, q = leaf.truncated_batch_size, leaf.sampling_probability
            cost += count * float(stats.binom.sf(cap - 1, leaf.dataset_size, q))
            leaf = PoissonSampledDpEvent(q, GaussianDpEvent(leaf.noise_multiplier))
        found.append((leaf, count))
    return (found, delta - cost) if cost <= CAP_SHARE * delta else (leaves, delta)


def by_gaussian(leaves: Leaves, delta: float, adjacency: str, claimed: float) -> Recomputed:
    """Exact epsilon of plain Gaussian mechanisms (arXiv:1805.06530, Theorem 8).

    Raises:
        Inapplicable: if there are others.
    """
    if not all(isinstance(leaf, GaussianDpEvent) for leaf, _ in leaves):
        raise Inapplicable("not all steps are plain Gaussian mechanisms")
    epsilon = gaussian_epsilon(_shift(leaves, adjacency), delta)
    return Recomputed(epsilon, least=epsilon)


def _shift(leaves: Leaves, adjacency: str) -> float:
    """Standard deviations by which a record moves the mean of plain Gaussian mechanisms together."""
    squares = sum(count / leaf.noise_multiplier**2 for leaf, count in leaves)  # type: ignore[attr-defined]
    return MOVES[adjacency] * math.sqrt(squares)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism whose mean moves by mu standard deviations."""

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = mu * (mu / 2 - float(stats.norm.ppf(delta))) + 1.0  # the first term alone is below delta here
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))


def by_pld(leaves: Leaves, delta: float, adjacency: str, claimed: float) -> Recomputed:
    """Epsilon from privacy loss distributions, rounded pessimistically (arXiv:2207.04380).

    Raises:
        Inapplicable: for events that it does not know.
        Unknown: for a delta or noise at which its numbers mean nothing.
    """
    if delta < SMALLEST_DELTA:
        raise Unknown(f"delta={delta:g} is below {SMALLEST_DELTA:g}, where rounding is no longer small")
    leaves, delta = uncut(leaves, delta)
    if not _has_losses(leaves, adjacency):
        raise Inapplicable(f"it has no analysis of these batches under {adjacency}")
    grid, steps = _interval(leaves, claimed), _num_grids(leaves)
    if claimed > LARGEST or grid > max(1.0, claimed):
        raise Unknown(f"epsilon is above {LARGEST:g}, where privacy losses overflow")
    epsilon = float(_losses(leaves, adjacency, grid).get_epsilon(delta))
    if not math.isfinite(epsilon):
        raise Unknown("its bound is infinite")
    excess = (4 + 0.12 * epsilon) * steps * (grid / max(epsilon, 1e-3)) ** 2
    return Recomputed(epsilon, least=epsilon if excess <= TOLERANCE else 0.0)


def _rate_and_noise(leaf: Any) -> tuple[float, float]:
    """Sample rate of a mechanism, and its noise / the most that a record moves."""
    if isinstance(leaf, GaussianDpEvent):
        return 1.0, leaf.noise_multiplier
    if isinstance(leaf, PoissonSampledDpEvent):
        return leaf.sampling_probability, _rate_and_noise(leaf.event)[1]
    if isinstance(leaf, MixtureOfGaussiansDpEvent):
        return 1.0, leaf.standard_deviation / max(leaf.sensitivities)
    return leaf.sampling_probability, leaf.noise_multiplier


def _num_grids(leaves: Leaves) -> int:
    """Privacy losses that are rounded: plain Gaussian mechanisms are composed before."""
    return sum(1 if isinstance(leaf, GaussianDpEvent) else count for leaf, count in leaves)


def _interval(leaves: Leaves, epsilon: float) -> float:
    """Interval of the privacy loss: rounding one step to g adds a variance of about g^2 / 4; not too many points."""
    epsilon, noise = max(epsilon, 1e-3), min(_rate_and_noise(leaf)[1] for leaf, _ in leaves)
    fine = epsilon * math.sqrt(GRID_ERROR / ((4 + 0.12 * epsilon) * _num_grids(leaves)))
    return max(min(fine, epsilon / 200), (40 / noise + 4 / noise**2) / MOST_POINTS)


def true_positives(leaves: Leaves, false_positives: float, epsilon: float, delta: float, adjacency: str) -> float:
    """Largest true-positive rate of a test between neighbours, from delta at many epsilons.

    Raises:
        Unknown: for batches without an independent analysis.
    """
    if all(isinstance(leaf, GaussianDpEvent) for leaf, _ in leaves):
        return float(ndtr(ndtri(false_positives) + _shift(leaves, adjacency)))
    steps, left = uncut(leaves, delta)
    if not _has_losses(steps, adjacency):
        raise Unknown("no independent accountant knows the whole profile of these batches")
    losses = _losses(steps, adjacency, 2 * _interval(steps, epsilon))
    t = np.linspace(0.0, 2 * epsilon + 1, POINTS)
    deltas = np.minimum(1.0, np.array([losses.get_delta(float(x)) for x in t]) + delta - left)
    bounds = np.minimum(
        np.exp(t) * false_positives + deltas, 1 - np.exp(-t) * (1 - deltas - false_positives)
    )  # the attack, and that on the complement with both datasets exchanged
    return float(min(1.0, bounds.min()))


def _has_losses(leaves: Leaves, adjacency: str) -> bool:
    accountant = PLDAccountant(RELATIONS[adjacency])
    return all(accountant.supports(leaf) for leaf, _ in leaves)


def _losses(leaves: Leaves, adjacency: str, grid: float) -> PLDAccountant:
    accountant = PLDAccountant(RELATIONS[adjacency], grid)
    for leaf, count in leaves:
        accountant.compose(leaf, count)
    return accountant


def by_prv(leaves: Leaves, delta: float, adjacency: str, claimed: float) -> Recomputed:
    """Lower and upper end of epsilon from opacus (arXiv:2106.02848).

    Raises:
        Inapplicable: for anything but Poisson-sampled Gaussian mechanisms with and without a record.
        Unknown: without opacus.
    """
    if adjacency == "replace_one":
        raise Inapplicable("it compares with and without a record")
    leaves, delta = uncut(leaves, delta)
    if not leaves or not all(isinstance(leaf, PoissonSampledDpEvent) for leaf, _ in leaves):
        raise Inapplicable("not all steps are Poisson-sampled Gaussian mechanisms")
    if claimed > LARGEST:
        raise Unknown(f"epsilon is above {LARGEST:g}, where privacy losses overflow")
    error = max(2e-3, 5e-3 * claimed)  # what its time is inversely proportional to
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            accountants = import_extra("opacus.accountants", "The PRV accountant")
            accountant = accountants.PRVAccountant()
            accountant.history = [(*_rate_and_noise(leaf)[::-1], count) for leaf, count in leaves]
            prv = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
            least, _, most = prv.compute_epsilon(delta, delta / 1000, error)
        except DPConfigError as missing:
            raise Unknown(str(missing)) from None
        except (AttributeError, ValueError, RuntimeError, ArithmeticError) as problem:
            raise Unknown(f"opacus gave no number ({type(problem).__name__})") from None
    if not (math.isfinite(least) and math.isfinite(most)):
        raise Unknown("opacus gave no finite number")
    return Recomputed(float(most), float(least))
