"""Epsilon by accountants that are not ours: dp-accounting's PLD and RDP, opacus' PRV, and the exact Gaussian formula.

All but the PRV's lower end are upper bounds. A claim is supported if it is not below one of them, up to `TOLERANCE`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import math
import warnings
from collections.abc import Iterator

from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats
from scipy.special import log_ndtr

from hf_dpopt.verify import selection
from hf_dpopt.verify.events import MOVES, Leaves
from hf_dpopt.verify.outcome import Inapplicable, Unknown

TOLERANCE = 1e-3  # relative, by which a claim may lie below a recomputed value: grids differ
SLACK = 1e-5  # absolute, for an epsilon near 0
GRID_ERROR = 2e-4  # relative, of a recomputed value
MOST_POINTS = 2 * 10**6  # of the privacy loss of one step
LARGEST = 500.0  # epsilon beyond which privacy losses overflow
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
        coarseness: how much of it, relatively, may be due to the grid.
        least: lower end, where the accountant has one; 0 elsewhere.
    """

    epsilon: float
    coarseness: float = 0.0
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
        elif isinstance(leaf, RepeatAndSelectDpEvent):
            run, left = uncut(selection.leaves_of(leaf), delta)
            cost += count * leaf.mean * (delta - left)  # every run may fail
            leaf = selection.best_of(run, (leaf.mean, leaf.shape))
        found.append((leaf, count))
    return (found, delta - cost) if cost <= CAP_SHARE * delta else (leaves, delta)


def by_gaussian(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
    """Exact epsilon of plain Gaussian mechanisms (arXiv:1805.06530, Theorem 8).

    Raises:
        Inapplicable: if there are others.
    """
    if not all(isinstance(leaf, GaussianDpEvent) for leaf, _ in leaves):
        raise Inapplicable("not all steps are plain Gaussian mechanisms")
    squares = sum(count / leaf.noise_multiplier**2 for leaf, count in leaves)
    return Recomputed(gaussian_epsilon(MOVES[adjacency] * math.sqrt(squares), delta))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism whose mean moves by mu standard deviations."""

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = mu * (mu / 2 - float(stats.norm.ppf(delta))) + 1.0  # the first term alone is below delta here
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))


def by_pld(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
    """Epsilon from privacy loss distributions, rounded pessimistically (arXiv:2207.04380).

    Raises:
        Inapplicable: for events that it does not know.
        Unknown: for a delta or noise at which its numbers mean nothing.
    """
    if delta < SMALLEST_DELTA:
        raise Unknown(f"delta={delta:g} is below {SMALLEST_DELTA:g}, where rounding is no longer small")
    leaves, delta = uncut(leaves, delta)
    empty = PLDAccountant(RELATIONS[adjacency])
    if not all(empty.supports(leaf) for leaf, _ in leaves):
        raise Inapplicable(f"it has no analysis of these batches under {adjacency}")
    noise = min(_noise(leaf) for leaf, _ in leaves)
    floor = (40 / noise + 4 / noise**2) / MOST_POINTS
    steps = sum(1 if isinstance(leaf, GaussianDpEvent) else count for leaf, count in leaves)
    epsilon = _guess(leaves, delta, adjacency)
    for _ in range(4):
        grid = max(floor, _grid(epsilon, steps))
        if epsilon > LARGEST or grid > max(1.0, epsilon):
            raise Unknown(f"epsilon is above {LARGEST:g}, where privacy losses overflow")
        accountant = PLDAccountant(RELATIONS[adjacency], grid)
        for leaf, count in leaves:
            accountant.compose(leaf, count)
        epsilon = float(accountant.get_epsilon(delta))
        if not math.isfinite(epsilon):
            raise Unknown("its bound is infinite")
        if grid <= max(floor, 1.5 * _grid(epsilon, steps)):
            break
    excess = (4 + 0.12 * epsilon) * steps * (grid / max(epsilon, 1e-3)) ** 2
    return Recomputed(epsilon, excess)


def _noise(leaf: DpEvent) -> float:
    if isinstance(leaf, PoissonSampledDpEvent):
        return _noise(leaf.event)
    if isinstance(leaf, MixtureOfGaussiansDpEvent):
        return leaf.standard_deviation / max(leaf.sensitivities)
    return leaf.noise_multiplier  # type: ignore[attr-defined]


def _grid(epsilon: float, steps: int) -> float:
    """Interval of the privacy loss: rounding one step to g adds a variance of about g^2 / 4."""
    epsilon = max(epsilon, 1e-3)
    return min(epsilon * math.sqrt(GRID_ERROR / ((4 + 0.12 * epsilon) * steps)), epsilon / 200)


def grid_of(leaves: Leaves, epsilon: float) -> float:
    """Interval of the privacy loss for steps whose epsilon is about that, finer than what a rate needs."""
    noise = min(_noise(leaf) for leaf, _ in leaves)
    steps = sum(1 if isinstance(leaf, GaussianDpEvent) else count for leaf, count in leaves)
    return max((40 / noise + 4 / noise**2) / MOST_POINTS, 2 * _grid(epsilon, steps))


def _guess(leaves: Leaves, delta: float, adjacency: str) -> float:
    """Rough size of epsilon, for the first grid alone."""
    factor = MOVES[adjacency]
    rough: Leaves = []
    for leaf, count in leaves:
        if isinstance(leaf, GaussianDpEvent):
            rough.append((GaussianDpEvent(leaf.noise_multiplier / factor), count))
        elif isinstance(leaf, PoissonSampledDpEvent):
            sampled = GaussianDpEvent(_noise(leaf) / factor)
            rough.append((PoissonSampledDpEvent(leaf.sampling_probability, sampled), count))
        elif isinstance(leaf, MixtureOfGaussiansDpEvent):
            pairs = list(zip(leaf.sensitivities, leaf.sampling_probs, strict=True))
            q = min(1.0, sum(p for shift, p in pairs if shift > 0))
            mean = sum(shift * p for shift, p in pairs) / q
            rough.append((PoissonSampledDpEvent(q, GaussianDpEvent(leaf.standard_deviation / mean)), count))
        else:
            sampled = GaussianDpEvent(_noise(leaf) / factor)
            rough.append((PoissonSampledDpEvent(leaf.sampling_probability, sampled), count))  # type: ignore[attr-defined]
    return 0.7 * by_rdp(rough, delta, "add_or_remove_one").epsilon


def by_selection(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
    """Epsilon of the best of a random number of runs, from the privacy profile of one (arXiv:2402.06701).

    Raises:
        Inapplicable: for anything else.
    """
    leaves, delta = uncut(leaves, delta)
    if len(leaves) != 1 or not isinstance(leaves[0][0], RepeatAndSelectDpEvent):
        raise Inapplicable("it was no tuning")
    best = leaves[0][0]
    run, law = selection.leaves_of(best), (best.mean, best.shape)
    try:
        one_run = by_gaussian(run, delta / best.mean, adjacency)
    except Inapplicable:
        one_run = by_pld(run, delta / best.mean, adjacency)
    accountant = PLDAccountant(RELATIONS[adjacency], max(1e-4, one_run.epsilon / 2000))
    for leaf, count in run:
        accountant.compose(leaf, count)
    epsilon = one_run.epsilon + selection.condition(law, accountant.get_delta)
    return Recomputed(epsilon, max(one_run.coarseness, 2 * TOLERANCE))


def by_sum(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
    """Sum of the epsilons of each tuning and of all other mechanisms, at equal shares of delta.

    Raises:
        Inapplicable: for anything but a tuning with other mechanisms.
    """
    tunings = [(leaf, count) for leaf, count in leaves if isinstance(leaf, RepeatAndSelectDpEvent)]
    rest = [(leaf, count) for leaf, count in leaves if not isinstance(leaf, RepeatAndSelectDpEvent)]
    num_parts = sum(count for _, count in tunings) + (1 if rest else 0)
    if not tunings or num_parts == 1:
        raise Inapplicable("it was no tuning with other runs")
    share = delta / num_parts
    found = [(by_selection([(leaf, 1)], share, adjacency), count) for leaf, count in tunings]
    if rest:
        is_gaussian = all(isinstance(leaf, GaussianDpEvent) for leaf, _ in rest)
        found.append(((by_gaussian if is_gaussian else by_pld)(rest, share, adjacency), 1))
    return Recomputed(sum(count * part.epsilon for part, count in found), max(part.coarseness for part, _ in found))


def by_rdp(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
    """Epsilon from Renyi divergences: a looser upper bound (arXiv:1908.10530).

    Raises:
        Inapplicable: for events that it does not know, and where a record is swapped: its analysis moves one clip.
    """
    if adjacency == "replace_one":
        raise Inapplicable("its analysis moves one clip, and a swapped record moves two")
    leaves, delta = uncut(leaves, delta)
    accountant = RdpAccountant()
    if not all(accountant.supports(leaf) for leaf, _ in leaves):
        raise Inapplicable("it has no analysis of these batches")
    with _quiet():
        for leaf, count in leaves:
            accountant.compose(leaf, count)
        epsilon = float(accountant.get_epsilon(delta))
    return Recomputed(epsilon)


def by_prv(leaves: Leaves, delta: float, adjacency: str) -> Recomputed:
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
    rough = _guess(leaves, delta, adjacency)
    if rough > LARGEST:
        raise Unknown(f"epsilon is above {LARGEST:g}, where privacy losses overflow")
    error = max(2e-3, 5e-3 * rough)  # what its time is inversely proportional to
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            accountants = importlib.import_module("opacus.accountants")
            accountant = accountants.PRVAccountant()
            accountant.history = [(_noise(leaf), leaf.sampling_probability, count) for leaf, count in leaves]  # type: ignore[attr-defined]
            prv = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
            least, _, most = prv.compute_epsilon(delta, delta / 1000, error)
        except ImportError:
            raise Unknown("opacus is not installed; `pip install 'hf_dpopt[verify]'` installs it") from None
        except (AttributeError, ValueError, RuntimeError, ArithmeticError) as problem:
            raise Unknown(f"opacus gave no number ({type(problem).__name__})") from None
    if not (math.isfinite(least) and math.isfinite(most)):
        raise Unknown("opacus gave no finite number")
    return Recomputed(float(most), 2 * error / max(float(most), 1e-9), float(least))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide notes on Renyi orders that were left out, which make the bound looser and not wrong."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
