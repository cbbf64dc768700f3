r"""The privacy profile of a run: delta at every epsilon, and with it the whole trade-off curve of its attackers.

A pair (epsilon, delta) is one point of the profile. The whole of it says what an attacker can reach who tests whether
a record was in: with a false-positive rate a, and D, D' neighbours in either order, for every real t

    P[A(D) in E] <= e^t P[A(D') in E] + h(t),

where ``h(t) = delta(t)`` for t >= 0, and ``h(-t) = 1 - e^-t (1 - delta(t))`` is that of the complement of E, with D
and D' exchanged. So the true-positive rate at a is at most ``min_t (e^t a + h(t))``, which is the exact
curve of the worst pair if delta is known exactly and for both orders (Wasserman and Zhou 2010; Dong, Roth and Su 2022,
arXiv:1905.02383, Proposition 2.12). Here delta is the larger one of both orders.

Every step is pessimistic: fewer values of t, larger values of h and convex combinations of what is proven (the left
side, ``sup_E P - e^t Q``, is convex in e^t) only raise the bounds.

`meaning` tells people how often such an attacker is right, of one record and of groups; its numbers are rounded up to
four digits.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy.special import log_ndtr, ndtr, ndtri

from hf_dpopt.accounting import accountants, events, random_allocation
from hf_dpopt.accounting.accountants import INTEGER_ORDERS
from hf_dpopt.accounting.events import Composition
from hf_dpopt.accounting.random_allocation import ADJACENCIES as BINS_ADJACENCIES
from hf_dpopt.accounting.random_allocation import BallsInBinsDpEvent, rings_of, without_amplification
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_count

POINTS = 400  # values of t >= 0, about
TINY = 1e-30  # delta at which the grid of t ends: small, for groups multiply it by e^epsilon
ROUNDING = 1e-14  # of convolutions, at which it ends where nothing else is known
LONGEST = 300.0  # its largest end; what is not private within it protects nobody
RELATIVE_ERROR = 2e-3  # of the grid of privacy losses; moves a rate by about a thousandth of itself
MIXTURE_ERROR = 1e-2  # the same for users with several records in a batch, whose losses take a second on that grid


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds on delta at every epsilon, for both orders of two neighbours.

    Attributes:
        step: distance of neighbouring values of t; > 0.
        deltas: delta at ``0, step, 2 step, ..``, each in [0, 1].
        sources: what the bounds come from, such as "pld".
    """

    step: float
    deltas: np.ndarray
    sources: tuple[str, ...]

    @functools.cached_property
    def slopes(self) -> np.ndarray:
        """All t, ascending: ``-n step, .., 0, .., n step``."""
        n = len(self.deltas) - 1
        return self.step * np.arange(-n, n + 1)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """``h(t)`` at all slopes."""
        t = self.slopes[len(self.deltas) :]
        before = -np.expm1(-t) + np.exp(-t) * self.deltas[1:]
        return np.concatenate([before[::-1], self.deltas])

    def delta(self, epsilon: float) -> float:
        """Delta at an epsilon >= 0; linear in e^epsilon between two values of the grid, and constant behind them."""
        at = min(epsilon / self.step, len(self.deltas) - 1.0)
        i = min(int(at), len(self.deltas) - 2)
        share = math.expm1((at - i) * self.step) / math.expm1(self.step)
        share = min(1.0, share) * (1 - 1e-12)  # rounding may not carry it beyond
        return float(self.deltas[i] + share * (self.deltas[i + 1] - self.deltas[i]))

    def epsilon(self, delta: float) -> float:
        """Epsilon at a delta; infinite where the grid ends above it."""
        if self.deltas[0] <= delta:
            return 0.0
        below = np.flatnonzero(self.deltas <= delta)
        if not len(below):
            return math.inf
        i = int(below[0])
        high, low = self.deltas[i - 1], self.deltas[i]
        share = (high - delta) / (high - low)
        return float(((i - 1) * self.step + math.log1p(share * math.expm1(self.step))) * (1 + 1e-12))

    def true_positives(self, false_positives: np.ndarray | float) -> np.ndarray:
        """Largest true-positive rates of an attacker with these false-positive rates, of the same shape."""
        rates = np.asarray(false_positives, dtype=np.float64)
        factors = np.exp(np.minimum(self.slopes, 700.0))  # beyond, every rate above 1e-304 is multiplied to 1
        found = (factors * rates[..., None] + self.offsets).min(axis=-1)
        return np.minimum(1.0, found * (1 + 1e-12))

    def then(self, other: Profile) -> Profile:
        """Profile of two changes of the dataset, one after the other: that of `other`, and then this one.

        From ``P <= e^s Q + h(s)`` and ``Q <= e^(t-s) R + g(t-s)`` follows ``P <= e^t R + h(s) + e^s g(t-s)``, for
        every s. All s together give the composition of both trade-off curves (Dong, Roth and Su 2022,
        arXiv:1905.02383, Theorem 2.14); those of the grid give a bound. Both profiles have one `step`.
        """
        assert math.isclose(self.step, other.step, rel_tol=1e-12), (self.step, other.step)
        m, n = len(self.deltas) - 1, len(other.deltas) - 1
        reach = n + m
        # of g at t - s, for s from -m to m and t from 0 to reach: its last value holds beyond the grid, 1 before it
        padded = np.concatenate([np.ones(max(0, m - n)), other.offsets, np.full(2 * m, other.deltas[-1])])
        zero = max(0, m - n) + n
        best = np.ones(reach + 1)
        for i, (offset, factor) in enumerate(zip(self.offsets, np.exp(self.slopes), strict=True)):
            first = zero - (i - m)
            np.minimum(best, offset + factor * padded[first : first + reach + 1], out=best)
        best = np.minimum.accumulate(best * (1 + 1e-12))
        return Profile(self.step, np.minimum(best, 1.0), tuple(dict.fromkeys((*self.sources, *other.sources))))

    def groups(self, largest: int) -> tuple[Profile, ...]:
        """Profiles of groups of 1, 2, .., `largest` units that all change in one way: are removed, say."""
        check_count("largest", largest)
        found = [self]
        while len(found) < largest:
            found.append(self.then(found[-1]))
        return tuple(found)

    def or_smaller(self, other: Profile) -> Profile:
        """Smaller one of two bounds on the same run, on this grid."""
        deltas = [min(a, other.delta(i * self.step)) for i, a in enumerate(self.deltas)]
        return Profile(self.step, np.array(deltas), tuple(dict.fromkeys((*self.sources, *other.sources))))

    def or_larger(self, other: Profile) -> Profile:
        """Larger one of both bounds at every t: where either of two runs may have been the one."""
        deltas = [max(a, other.delta(i * self.step)) for i, a in enumerate(self.deltas)]
        return Profile(self.step, np.array(deltas), tuple(dict.fromkeys((*self.sources, *other.sources))))

    def at_most(self, pairs: tuple[tuple[float, float], ...]) -> Profile:
        """Profile with proven pairs (epsilon, delta) besides."""
        deltas = self.deltas.copy()
        for epsilon, delta in pairs:
            if not math.isfinite(epsilon):
                continue
            t = self.step * np.arange(len(deltas))
            chord = delta if epsilon == 0 else 1 - (1 - delta) * np.exp(np.minimum(0.0, t - epsilon))
            deltas = np.minimum(deltas, np.where(t >= epsilon, delta, chord))
        return Profile(self.step, deltas, self.sources)


def gaussian_deltas(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """Exact delta of a Gaussian mechanism whose mean moves by mu standard deviations, at these epsilons >= 0.

    References:
        Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
    """
    if mu == 0:
        return np.zeros_like(epsilons)
    first, second = log_ndtr(mu / 2 - epsilons / mu), epsilons + log_ndtr(-mu / 2 - epsilons / mu)
    found: np.ndarray = np.exp(first) * -np.expm1(np.minimum(0.0, second - first)) * (1 + 1e-8)  # of their rounding
    return found


def privacy_profile(
    event: DpEvent, delta: float, adjacency: str, *, proven: tuple[tuple[float, float], ...] = ()
) -> Profile:
    """Profile of an event, from every accountant that is valid for it.

    Formal guarantee: everything that ``event`` describes, together, is (t, deltas[t])-differentially private under
    ``adjacency`` for every t of the grid. Nothing smaller than an accountant proved is ever in it.

    Args:
        event: what ran, in dp_accounting's convention.
        delta: delta of the guarantee; it decides whether a cap on batches is paid for or analysed, as for epsilon.
        adjacency: a key of `events.RELATIONS`.
        proven: pairs (epsilon, delta) that are known besides, by samples for example.
    """
    return _profile(events.flatten(event), delta, adjacency, proven)


@functools.lru_cache(maxsize=64)
def _profile(
    composition: Composition, delta: float, adjacency: str, proven: tuple[tuple[float, float], ...]
) -> Profile:
    if not composition:
        return Profile(1.0, np.zeros(2), ("none",)).at_most(proven)
    if any(events.noise_of(leaf) == 0 for leaf, _ in composition):
        return Profile(1.0, np.ones(2), ("none",))
    simple, cost = events.split_truncation(composition)
    if cost > accountants.MAX_TRUNCATION_SHARE * delta:
        simple, cost = composition, 0.0
    t = _grid(simple, adjacency, [epsilon for epsilon, _ in proven if 0 < epsilon < LONGEST])
    known = {
        "gaussian": _by_gaussian(simple, t, adjacency),
        "pld": _by_pld(simple, delta, t, adjacency),
        "rdp": _by_rdp(simple, t, adjacency),
        "balls in bins (sampling-free)": _by_bins(simple, delta, t, adjacency),
    }
    found = {name: values for name, values in known.items() if values is not None}
    deltas = np.ones_like(t)
    for values in found.values():
        deltas = np.minimum(deltas, np.nan_to_num(values, nan=1.0) + cost)
    made = Profile(t[-1] / (len(t) - 1), np.minimum.accumulate(deltas), (*found, *(["pair"] if proven else [])))
    return made.at_most(proven)


def _grid(composition: Composition, adjacency: str, proven: list[float]) -> np.ndarray:
    """Values of t from 0 to about epsilon at `TINY`; eighths of the first proven epsilon are among them."""
    total = _renyi(composition, adjacency)
    if total is None:  # its size is guessed
        rough = events.scale_noise(events.as_poisson(_known_bins(composition)), 1 / SENSITIVITY_FACTOR[adjacency])
        total = _renyi(rough, "add_or_remove_one")
        last = TINY if events.gaussian_precision(_known_bins(composition)) else ROUNDING
    else:
        last = TINY
    assert total is not None
    with accountants.quiet_absl():
        reach = 1.1 * float(compute_epsilon(INTEGER_ORDERS, total, last)[0])
    reach = min(LONGEST, max(1.0, reach, *(1.05 * epsilon for epsilon in proven)))
    step = proven[0] / (8 * math.ceil(proven[0] * POINTS / reach / 8)) if proven else reach / POINTS
    return step * np.arange(min(math.ceil(reach / step), 2 * POINTS) + 1)


def _known_bins(composition: Composition) -> Composition:
    """Mechanisms of a record whose bin everybody knows, which reveal no less."""
    return tuple((without_amplification(e) if isinstance(e, BallsInBinsDpEvent) else e, n) for e, n in composition)


def _by_gaussian(composition: Composition, t: np.ndarray, adjacency: str) -> np.ndarray | None:
    """Exact deltas of plain Gaussian mechanisms; also of balls in bins whose bins everybody knows."""
    known = _known_bins(composition)
    has_bins = known != composition
    precision = events.gaussian_precision(known)
    if precision is None or (has_bins and adjacency not in BINS_ADJACENCIES):
        return None
    return gaussian_deltas(SENSITIVITY_FACTOR[adjacency] * math.sqrt(precision), t)


def _by_pld(composition: Composition, delta: float, t: np.ndarray, adjacency: str) -> np.ndarray | None:
    """Deltas from privacy loss distributions, with what rounding in their convolutions can have taken away."""
    empty = PLDAccountant(events.relation(adjacency))
    is_known = all(empty.supports(leaf) for leaf, _ in composition)
    guess = accountants.guess_epsilon(composition, delta, adjacency)
    if not is_known or events.gaussian_precision(composition) is not None or guess > LONGEST:
        return None
    count = events.num_compositions(composition)
    has_mixture = any(isinstance(leaf, MixtureOfGaussiansDpEvent) for leaf, _ in composition)
    error = MIXTURE_ERROR if has_mixture else RELATIVE_ERROR
    grid = max(accountants.grid_interval(guess, count, error), accountants.smallest_grid(composition))
    accountant = accountants.accountant_of(composition, adjacency, grid)
    found: np.ndarray = np.clip(accountant.get_delta(t), 0.0, 1.0)  # type: ignore[arg-type]  # it takes arrays, too
    return found + ROUNDING + 1e-16 * count


def _by_rdp(composition: Composition, t: np.ndarray, adjacency: str) -> np.ndarray | None:
    """Deltas from Renyi divergences: loose, but they go on falling where convolutions end.

    References:
        Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    total = _renyi(composition, adjacency)
    if total is None or events.gaussian_precision(composition) is not None:
        return None
    orders = np.array(INTEGER_ORDERS, dtype=np.float64)
    logs = (orders - 1) * (total - t[:, None] + np.log1p(-1 / orders)) - np.log(orders)
    return np.exp(np.minimum(0.0, logs.min(axis=1))) * (1 + 1e-9)


def _renyi(composition: Composition, adjacency: str) -> np.ndarray | None:
    """Renyi divergences at `INTEGER_ORDERS`; None without an analysis."""
    supports = RdpAccountant().supports
    if adjacency == "replace_one" or not all(supports(leaf) for leaf, _ in composition):
        return None
    total = np.zeros(len(INTEGER_ORDERS))
    with accountants.quiet_absl():
        for leaf, count in composition:
            total += count * accountants.divergences(leaf, INTEGER_ORDERS)
    return total


def _by_bins(composition: Composition, delta: float, t: np.ndarray, adjacency: str) -> np.ndarray | None:
    """Deltas of balls in bins, with plain Gaussian mechanisms, from one law of the likelihood ratio."""
    found = rings_of(composition, adjacency)
    law = None if found is None else random_allocation.law_of(found[0], delta, gaussian=found[1])
    return None if law is None else np.array([min(1.0, max(law.deltas(float(epsilon)))) for epsilon in t])


# --- meaning for people ----------------------------------------------------------------------------------------------

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
