"""Epsilon of an event: every accountant that is valid for the event and the adjacency runs, the smallest wins.

All of them give upper bounds, so the minimum is one. Which pairs are valid is decided here and not by dp_accounting
alone: its RDP accountant accepts plain Gaussian events under ``replace_one`` and forgets the factor 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from dp_accounting import get_epsilon_gaussian as exact_gaussian_epsilon
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_mixture_gaussian_mechanism,
)
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from hf_dpopt.accounting import events
from hf_dpopt.accounting.best_of_runs import gaussian_delta, profile_epsilon
from hf_dpopt.accounting.events import Composition
from hf_dpopt.accounting.random_allocation import balls_in_bins_epsilon
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.errors import DPConfigError

FINE = 2e-4  # relative discretisation error of a reported epsilon
MIN_GRID_EPSILON = 1e-4  # grids are not refined further below this epsilon
MAX_GRID_POINTS = 2_000_000  # of one step's privacy loss: tens of seconds and 1 GB
INTEGER_ORDERS = tuple(range(2, 64))  # of the Renyi divergences that are tried first
# Of those of a selection, whose bound at one order takes others; few between integers, which cost milliseconds each.
SELECTION_ORDERS = (1.2, 1.5, 1.8, 2, 2.2, 2.5, 2.8, 3, 3.5, 4, 4.5, 5, 5.5, *range(6, 64), 128, 256)
TINY_EPSILON = 0.1
MIN_PLD_DELTA = 1e-10  # below, rounding in the FFT (about 1e-12 after 1e5 steps) is no longer small beside delta
MAX_PLD_EPSILON = 1000.0  # above, the losses overflow and the number means nothing
GRID_RATIO = 1.2  # of the grids on which the losses of single steps are kept
MAX_TRUNCATION_SHARE = 0.01  # of delta, that `events.split_truncation` may use up; beyond, the exact analysis runs


@dataclasses.dataclass(frozen=True)
class Spent:
    """An upper bound on epsilon, and the accountant that proved it."""

    epsilon: float
    accountant: str


def epsilon(
    event: DpEvent, delta: float, adjacency: str, *, relative_error: float = FINE, reuses_steps: bool = False
) -> Spent:
    """Smallest proven epsilon of an event.

    Formal guarantee: everything that ``event`` describes, together, is (epsilon, delta)-differentially private under
    ``adjacency``, for any ``relative_error``: a coarser grid is faster and only ever gives a larger epsilon.

    Args:
        event: what ran, in dp_accounting's convention (noise stddev / bound on one record).
        delta: delta of the guarantee, in (0, 1).
        adjacency: a key of `events.RELATIONS`.
        relative_error: tolerated excess of epsilon due to discretisation.
        reuses_steps: whether one step's privacy loss is kept on a grid that serves many numbers of steps, for values
            that are asked for again and again. The grid is finer by up to a fifth, never coarser.

    Returns:
        Epsilon >= 0 (infinite if nothing is protected) and the name of the accountant that gave it.

    Raises:
        DPConfigError: for an event of another kind, or if no accountant is valid for it; never a number without proof.
    """
    if not 0 < delta < 1:
        raise DPConfigError(f"delta={delta} is outside (0, 1). Use at most 1 / number of records.")
    events.relation(adjacency)
    return _epsilon(events.flatten(event), delta, adjacency, relative_error, reuses_steps)


@functools.lru_cache(maxsize=4096)
def _epsilon(
    composition: Composition, delta: float, adjacency: str, relative_error: float, reuses_steps: bool
) -> Spent:
    if not composition:
        return Spent(0.0, "none")
    if any(events.noise_of(leaf) == 0 for leaf, _ in composition):
        return Spent(math.inf, "none")
    poisson, cost = events.split_truncation(composition)
    if poisson != composition and cost <= MAX_TRUNCATION_SHARE * delta:
        return _epsilon(poisson, delta - cost, adjacency, relative_error, reuses_steps)
    kept = {"pld": functools.partial(pld_epsilon, keeps_steps=True)} if reuses_steps else {}
    results = [
        Spent(max(0.0, float(value)), name)
        for name, accountant in (ACCOUNTANTS | kept).items()
        if (value := accountant(composition, delta, adjacency, relative_error)) is not None
    ]
    if not results:
        raise DPConfigError(
            f"No accountant has a proof for this event at delta={delta} under adjacency={adjacency!r}. Use delta >= "
            f"{MIN_PLD_DELTA}, or sampling='poisson' with adjacency='add_or_remove_one'. Event: {composition}"
        )
    return min(results, key=lambda spent: spent.epsilon)


def gaussian_epsilon(
    composition: Composition, delta: float, adjacency: str, relative_error: float = FINE
) -> float | None:
    """Exact epsilon where every step is a plain Gaussian mechanism (fixed order, full batch).

    References:
        Balle and Wang (2018), arXiv:1805.06530, Thm. 8 (analytic Gaussian mechanism).
    """
    precision = events.gaussian_precision(composition)
    if precision is None:
        return None
    value = exact_gaussian_epsilon(precision**-0.5 / SENSITIVITY_FACTOR[adjacency], delta)
    # The root finder stops within 1e-12 on either side; this keeps the value an upper bound.
    return value * (1 + 1e-9) + 1e-11 if value > 0 else 0.0


def pld_epsilon(
    composition: Composition,
    delta: float,
    adjacency: str,
    relative_error: float = FINE,
    *,
    keeps_steps: bool = False,
) -> float | None:
    """Privacy loss distribution, discretised pessimistically: tight up to the grid.

    With `keeps_steps` on grids that are powers of `GRID_RATIO`: the loss of one step is then computed once for many.

    References:
        Doroshenko et al. (2022), arXiv:2207.04380 (connect the dots).
    """
    compose = _compose_kept if keeps_steps else _compose
    empty = PLDAccountant(events.relation(adjacency))
    if delta < MIN_PLD_DELTA or not all(empty.supports(leaf) for leaf, _ in composition):
        return None
    if events.gaussian_precision(composition) is not None:
        return None  # `gaussian_epsilon` is exact
    guess = guess_epsilon(composition, delta, adjacency)
    if guess > MAX_PLD_EPSILON:
        return math.inf
    floor = smallest_grid(composition)
    while True:
        grid = max(floor, grid_interval(guess, events.num_compositions(composition), relative_error))
        result = compose(composition, adjacency, grid)(delta)
        needed = grid_interval(result, events.num_compositions(composition), relative_error)
        if grid <= max(floor, 1.5 * needed):
            return result
        guess = 0.8 * min(guess, result)  # the guess was too large, and so the grid too coarse


def _compose(composition: Composition, adjacency: str, grid: float) -> Callable[[float], float]:
    """Function from delta to epsilon of the steps, on a grid."""
    return accountant_of(composition, adjacency, grid).get_epsilon


def accountant_of(composition: Composition, adjacency: str, grid: float) -> PLDAccountant:
    """Privacy losses of the steps on a grid."""
    accountant = PLDAccountant(events.relation(adjacency), grid)
    for leaf, count in composition:
        accountant.compose(leaf, count)
    return accountant


def _compose_kept(composition: Composition, adjacency: str, grid: float) -> Callable[[float], float]:
    """`_compose` on a grid at most as coarse, whose single steps are kept."""
    grid = GRID_RATIO ** math.floor(math.log(grid, GRID_RATIO))
    total = None
    for leaf, count in composition:
        if not isinstance(leaf, PoissonSampledDpEvent | MixtureOfGaussiansDpEvent):
            return _compose(composition, adjacency, grid)
        part = _one_step(leaf, adjacency, grid).self_compose(count)
        total = part if total is None else total.compose(part)
    return (
        PLDAccountant(events.relation(adjacency), grid).get_epsilon if total is None else total.get_epsilon_for_delta
    )


@functools.lru_cache(maxsize=8)
def _one_step(
    leaf: PoissonSampledDpEvent | MixtureOfGaussiansDpEvent, adjacency: str, grid: float
) -> PrivacyLossDistribution:
    """Privacy loss of one sampled Gaussian mechanism, as `PLDAccountant` makes it of those that it supports."""
    if isinstance(leaf, MixtureOfGaussiansDpEvent):
        return from_mixture_gaussian_mechanism(
            leaf.standard_deviation, leaf.sensitivities, leaf.sampling_probs, value_discretization_interval=grid
        )
    return from_gaussian_mechanism(
        events.noise_of(leaf),
        value_discretization_interval=grid,
        sampling_prob=leaf.sampling_probability,
        neighboring_relation=events.relation(adjacency),
    )


def rdp_epsilon(composition: Composition, delta: float, adjacency: str, relative_error: float = FINE) -> float | None:
    """Renyi differential privacy: fast, loose by 10 to 20%, and valid at any delta.

    Not for ``replace_one``: dp_accounting's accountant has the analysis of one clip moved, not of two.

    References:
        Mironov, Talwar and Zhang (2019), arXiv:1908.10530 (sampled Gaussian mechanism).
    """
    return None if adjacency == "replace_one" else _rdp(composition, delta)


def selection_epsilon(
    composition: Composition, delta: float, adjacency: str, relative_error: float = FINE
) -> float | None:
    """Best of a random number of runs, from the privacy profile of one; see `best_of_runs.profile_epsilon`."""
    selected = events.selected_run(composition)
    if selected is None:
        return None
    run, count = selected
    precision = events.gaussian_precision(run)
    if precision is not None:
        noise = precision**-0.5 / SENSITIVITY_FACTOR[adjacency]
        return profile_epsilon(
            count,
            delta,
            lambda share: gaussian_epsilon(run, share, adjacency) or 0.0,
            functools.partial(gaussian_delta, noise),
        )
    one_run = pld_epsilon(run, delta / count.mean, adjacency, relative_error)
    if one_run is None or math.isinf(one_run):
        return one_run
    floor = smallest_grid(run)
    grid = max(floor, grid_interval(one_run, events.num_compositions(run), relative_error))
    accountant = accountant_of(run, adjacency, grid)
    return profile_epsilon(count, delta, accountant.get_epsilon, accountant.get_delta)


def sum_epsilon(composition: Composition, delta: float, adjacency: str, relative_error: float = FINE) -> float | None:
    """Sum of the epsilons of each selection and of all the rest, at equal shares of delta (basic composition).

    For a selection with other mechanisms; the profile of the selection alone is tighter than its Renyi bound.
    """
    parts: list[Composition] = [
        ((leaf, 1),) for leaf, count in composition if isinstance(leaf, RepeatAndSelectDpEvent) for _ in range(count)
    ]
    rest = tuple(part for part in composition if not isinstance(part[0], RepeatAndSelectDpEvent))
    if not parts or len(parts) + len(rest) == 1:
        return None
    parts += [rest] if rest else []
    return sum(_epsilon(part, delta / len(parts), adjacency, relative_error, False).epsilon for part in parts)


ACCOUNTANTS: dict[str, Callable[[Composition, float, str, float], float | None]] = {
    "gaussian": gaussian_epsilon,
    "pld": pld_epsilon,
    "rdp": rdp_epsilon,
    "balls in bins (sampling-free)": balls_in_bins_epsilon,
    "selection (privacy profile)": selection_epsilon,
    "sum over the selections and the rest": sum_epsilon,
}


@functools.lru_cache(maxsize=64)
def _rdp(composition: Composition, delta: float) -> float | None:
    """Least epsilon over the orders of dp_accounting, or None where it has no analysis of an event.

    Every order gives an upper bound. The integer ones up to 63 are cheap; those between them, and beyond, take
    milliseconds of Python each, so they are tried beside the best integer alone: epsilon falls and then rises.
    """
    supports = RdpAccountant().supports  # zero_out has the same analysis as add_or_remove_one
    if not all(supports(leaf) for leaf, _ in composition):
        return None
    coarse, best = _least(composition, delta, INTEGER_ORDERS)
    low = 1.0 if coarse < TINY_EPSILON else best - 1  # the divergence of an order near 1 may prove an epsilon of 0
    high = math.inf if best == INTEGER_ORDERS[-1] else best + 1
    beside = [order for order in DEFAULT_RDP_ORDERS if low < order < high and order not in INTEGER_ORDERS]
    return min(coarse, _least(composition, delta, beside)[0]) if beside else coarse


def _least(composition: Composition, delta: float, orders: Sequence[float]) -> tuple[float, float]:
    """Least epsilon over some orders, and the order it is of."""
    total = np.zeros(len(orders))
    with quiet_absl():
        for leaf, count in composition:
            total += count * divergences(leaf, tuple(orders))
        epsilon, order = compute_epsilon(orders, total, delta)
    return float(epsilon), float(order)


@functools.lru_cache(maxsize=256)
def divergences(leaf: DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Renyi divergence of one mechanism at some orders; composition multiplies it by the count, as `RdpAccountant`."""
    if isinstance(leaf, RepeatAndSelectDpEvent) and orders != SELECTION_ORDERS:
        # the bound at one order is made of the divergences of a run at all others, so the set must not shrink
        asked = [order for order in orders if order not in SELECTION_ORDERS]
        known = dict(zip(SELECTION_ORDERS, divergences(leaf, SELECTION_ORDERS), strict=True))
        return np.array([math.inf if order in asked else known[order] for order in orders])
    accountant = RdpAccountant(orders)
    accountant.compose(leaf)
    divergence: np.ndarray = accountant.rdp
    return divergence


@contextlib.contextmanager
def quiet_absl() -> Iterator[None]:
    """Hide "failed to converge ... Excluding this order": orders left out make RDP looser, not wrong."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def grid_interval(epsilon: float, num_compositions: int, relative_error: float) -> float:
    r"""Discretisation interval of the privacy loss that makes epsilon too large by at most about ``relative_error``.

    Rounding the loss of one step to a grid g adds variance of about g^2 / 4, hence T steps a stddev of g sqrt(T) / 2
    to a distribution whose width is of the order of epsilon. Measured on 900 random settings (q in [1e-4, 0.6], T up
    to 1e5, epsilon in [0.01, 80], delta in [1e-9, 1e-3], add_or_remove_one and replace_one), the relative excess stays
    below ``(4 + 0.12 epsilon) g^2 T / epsilon^2``. A grid that does not depend on T is slow or loose: 1e-4 gives
    0.060 instead of 0.046 at T = 1e5, q = 0.0152, noise 300.
    """
    epsilon = max(epsilon, MIN_GRID_EPSILON)
    factor = (4 + 0.12 * epsilon) * max(num_compositions, 1)
    return min(epsilon * math.sqrt(relative_error / factor), epsilon / 200)


def smallest_grid(composition: Composition) -> float:
    """The interval at which the loss of one step takes at most `MAX_GRID_POINTS` values."""
    noise = min(events.noise_of(leaf) for leaf, _ in composition)
    widest = 40 / noise + 4 / noise**2  # both tails at 10 stddev; truncated batches count as half the noise, swapped
    return widest / MAX_GRID_POINTS


def guess_epsilon(composition: Composition, delta: float, adjacency: str) -> float:
    """Rough size of epsilon, to choose the grid; never reported."""
    poisson = events.as_poisson(events.split_truncation(composition)[0])
    rough = events.scale_noise(poisson, 1 / SENSITIVITY_FACTOR[adjacency])
    return 0.7 * (_rdp(rough, delta) or 1.0)
