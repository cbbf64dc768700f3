r"""Amplification by balls in bins (random allocation), for independent and correlated noise: its event and epsilon.

Every record is thrown into one of b bins once, and takes part in steps j, j + b, j + 2b, .. of its bin j. With
``m_j`` the sum of the columns of C that bin j meets, the pair is ``P = mean_j N(m_j, s^2 I)`` against
``Q = N(0, s^2 I)``, s the noise stddev relative to the clipping norm; it dominates adaptive runs for a C that is
lower-triangular with entries >= 0. Only the inner products ``G_jl = <m_j, m_l>`` matter.

The bound takes no samples: exact for independent noise, it asks for 5 to 30% more noise than needed if the noise is
correlated. `certificates` has a tighter one, by verified samples.

Under Q the ratio is ``U = dP/dQ = mean_j exp(X_j - Var(X_j) / 2)`` with X normal, covariance ``G / s^2``. Delta is
``E (U - e^eps)_+`` when a record is removed and ``E (1 - e^eps U)_+`` when it is added: both are means of a convex
function f of U. Three steps, each of which can only raise ``E f(U)`` for every such f, make it a computation:

1. **A rotation is revealed.** Let A be a set of bins. Draw a rotation of the ring at random and a bin of the rotated A
   uniformly: every bin is as likely as before, so P is the mean over rotations of ``P_r``, and ``E f`` of a mean of
   ratios is at most the mean of ``E f``.
2. **Covariances are raised** (Kahane's inequality). With ``w_j = exp(X_j - Var(X_j) / 2) / |A|`` and a path of
   positive semidefinite covariances ``K(t)``, ``E f(sum_j w_j)`` has the derivative ``1/2 sum_jl K'_jl E f''(U) w_j
   w_l``: the terms with f' cancel against the normalisation. It is >= 0 if no entry shrinks. The raised matrix is that
   of a tree: the covariance of two bins is that of their lowest common branching, so U is built of independent
   lognormals by products and means alone. One raised matrix is above the Gram matrices of all rotations.
3. **Laws are put on a grid.** A mass between two grid points is split so that its mean stays (connect the dots). U is
   affine in each of the independent variables, so each split raises ``E f(U)``. Mass below the grid is split between 0
   and its lowest point; above, what is beyond the highest point u counts with the largest slope of f, as mass at u and
   a mean at infinity.

Formal guarantee: the deltas are upper bounds for any tree, grid and tolerance; better ones only lower them. Sums,
products and shifts of positive numbers keep their relative precision (no FFT); `ROUNDING` covers it. Rotations lose
nothing if off-diagonal entries are 0 (independent noise, or bands fewer than bins): then only the grid is left.

References:
    Choquette-Choo et al. (2024), arXiv:2410.06266 (the pair); Chua et al. (2024), arXiv:2412.16802 (independent
    noise). Kahane (1985), Sur le chaos multiplicatif (the inequality). Doroshenko et al. (2022), arXiv:2207.04380
    (connect the dots). Other sampling-free bounds: Schuchardt and Kalinin (2026), arXiv:2601.21636; Feldman and
    Shenfeld (2026), arXiv:2602.17284 (independent noise).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from dp_accounting import get_epsilon_gaussian as exact_gaussian_epsilon
from scipy.special import ndtr, ndtri

from hf_dpopt.common.checks import check_at_most, check_count
from hf_dpopt.common.errors import DPConfigError

MAX_BINS = 10**5  # steps of an epoch; half a minute
ADJACENCIES = ("add_or_remove_one", "zero_out")
ROUNDING = 1 + 1e-8  # of float64 over all operations, on delta
TAIL = 1e-7  # of delta, that one trimmed tail may cost
FINE, COARSE = 150, 12  # grid points per standard deviation of the privacy loss: of a result, and of the search
SMALLEST_STEP = 2e-4  # of a grid: two equal values add up to log(2) / step steps above
MAX_VARIANCE = 400.0  # of the privacy loss: beyond, values overflow and nothing is protected
MIN_DELTA = 1e-40  # below, the likelihood ratios that matter leave the range of floating-point numbers
KEPT = 12  # trees to which a third level is tried


# --- the event and its Gram matrices ---------------------------------------------------------------------------------


class StrategyMatrices(Hashable, Protocol):
    """The strategy matrix C of correlated noise, as numpy arrays: no tensor library is needed; n = optimizer steps."""

    @property
    def anytime(self) -> bool:
        """Whether the first t steps of a longer run are the run of t steps."""

    @property
    def name(self) -> str:
        """Name of the strategy, for messages."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        """C for n steps, (n, n) lower-triangular; (nodes, n) for a tree."""

    def toeplitz_coefs(self, n: int) -> np.ndarray | None:
        """First column of C, (n,), if C is Toeplitz; None if it is not."""

    def parameters(self) -> dict[str, Any]:
        """Name and every number that fixes C; JSON-able."""


@dataclasses.dataclass(frozen=True)
class BallsInBinsDpEvent(DpEvent):
    """One chain of balls in bins: the noisy clipped sums of steps 0, .., num_steps - 1.

    Every record is put into one of the bins independently and uniformly, secretly and once. Step t sums the clipped
    gradients (norm <= 1) of the records in bin ``t mod num_bins`` and adds row t of ``noise_multiplier * C^-1 Z``, Z
    standard normal; C is the strategy's matrix for `num_steps` steps. Gradients may depend on earlier noisy sums.

    Args:
        strategy: C, lower-triangular with entries >= 0.
        noise_multiplier: stddev of the draws, relative to the bound on one record's norm; > 0. Of a correlated
            strategy that is not the noise multiplier of a Gaussian event: that is `without_amplification`'s.
        num_steps: >= 1. A run stopped early has the event of its steps if the strategy is anytime, else the planned.
        num_bins: b, >= 1; may exceed the steps.

    Raises:
        DPConfigError: outside these ranges, and for a strategy without a proof.
    """

    strategy: StrategyMatrices
    noise_multiplier: float
    num_steps: int
    num_bins: int

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        check_count("num_bins", self.num_bins)
        check_at_most(
            "num_bins", self.num_bins, MAX_BINS,
            "its analysis looks at every pair of steps of an epoch. Use larger batches, or sampling='fixed_order'.",
        )  # fmt: skip
        if not 1e-9 <= self.noise_multiplier <= 1e9:
            raise DPConfigError(f"noise_multiplier={self.noise_multiplier} is outside [1e-9, 1e9].")
        bin_lags(self.strategy, self.num_steps, self.num_bins)

    @property
    def gram(self) -> np.ndarray:
        """Inner products of the ``m_j``, (bins, bins)."""
        return bin_grams(self.strategy, self.num_steps, self.num_bins)

    @property
    def ring(self) -> Ring:
        """Correlations between the bins that the sampling-free bound looks at."""
        return Ring.of(bin_lags(self.strategy, self.num_steps, self.num_bins), self.noise_multiplier)


@functools.lru_cache(maxsize=64)
def bin_lags(strategy: StrategyMatrices, num_steps: int, num_bins: int) -> np.ndarray:
    """Largest inner product of two ``m_j`` whose bins are 0, 1, .. apart, (bins,); read-only."""
    coefs = strategy.toeplitz_coefs(num_steps)
    if coefs is not None:
        _check_entries(strategy, coefs)
        first = _first_bin(coefs, num_bins)  # the pair with bin 0 is cut last
        lags = np.array([first[: max(0, num_steps - k)] @ first[k:] for k in range(num_bins)])
    else:
        gram = bin_grams(strategy, num_steps, num_bins)
        lags = np.array([gram.diagonal(k).max() for k in range(num_bins)])
    lags.setflags(write=False)
    return lags


@functools.lru_cache(maxsize=4)
def bin_grams(strategy: StrategyMatrices, num_steps: int, num_bins: int) -> np.ndarray:
    """Inner products of the ``m_j``, (bins, bins); read-only.

    Raises:
        DPConfigError: for a strategy with negative entries, or one that is not square and lower-triangular.
    """
    coefs = strategy.toeplitz_coefs(num_steps)
    if coefs is not None:
        _check_entries(strategy, coefs)
        gram = _shifted_grams(_first_bin(coefs, num_bins), num_bins)
    else:
        matrix = strategy.strategy_matrix(num_steps)
        _check_entries(strategy, matrix)
        if matrix.shape != (num_steps, num_steps) or np.triu(matrix, 1).any():
            raise DPConfigError(
                f"The matrix of {strategy.name} is not square and lower-triangular, for which the dominating pair of "
                "balls in bins is proven. Use nu_dpftrl or blt."
            )
        met = np.stack([matrix[:, j::num_bins].sum(axis=1) for j in range(num_bins)])
        gram = met @ met.T
    gram.setflags(write=False)
    return gram


def _first_bin(coefs: np.ndarray, num_bins: int) -> np.ndarray:
    """``m_0`` of a Toeplitz C with this first column; the others are it, delayed and cut."""
    num_steps = len(coefs)
    first = np.zeros(num_steps)
    for t in range(0, num_steps, num_bins):
        first[t:] += coefs[: num_steps - t]
    return first


def _check_entries(strategy: StrategyMatrices, entries: np.ndarray) -> None:
    if (entries < 0).any():
        raise DPConfigError(
            f"{strategy.name} has negative entries; the dominating pair is proven for >= 0. Use nu_dpftrl or blt."
        )


def _shifted_grams(first: np.ndarray, num_bins: int) -> np.ndarray:
    """Gram matrix of ``first`` delayed by 0, .., num_bins - 1 steps and cut at its own length."""
    n = len(first)
    gram = np.zeros((num_bins, num_bins))
    for lag in range(min(num_bins, n)):
        sums = np.cumsum(first[: n - lag] * first[lag:])  # bins j - lag and j overlap in the first n - j entries
        j = np.arange(lag, min(num_bins, n))
        gram[j, j - lag] = gram[j - lag, j] = sums[n - 1 - j]
    return gram


# --- laws of non-negative variables on a logarithmic grid ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Law:
    """Masses at ``exp(origin + i * step)``, a mass at 0, and the mean that is at infinity."""

    step: float
    origin: float
    mass: np.ndarray
    zero: float = 0.0
    excess: float = 0.0

    def values(self) -> np.ndarray:
        return np.exp(self.origin + self.step * np.arange(len(self.mass)))

    def deltas(self, epsilon: float) -> tuple[float, float]:
        """``E (U - e^eps)_+`` and ``E (1 - e^eps U)_+``: record removed, record added."""
        values, factor = self.values(), math.exp(epsilon)
        remove = self.excess + float(self.mass @ np.maximum(0.0, values - factor))
        add = self.zero + float(self.mass @ np.maximum(0.0, 1 - factor * values))
        return remove * ROUNDING, add * ROUNDING


def lognormal(variance: float, step: float, tail: float) -> Law:
    """``exp(N(-variance / 2, variance))`` with mass split between neighbours; `tail` is cut off at either end."""
    if variance == 0:
        return Law(step, 0.0, np.ones(1))
    stddev, reach = math.sqrt(variance), -float(ndtri(tail))
    low = math.floor((-variance / 2 - reach * stddev) / step)
    high = max(low + 1, math.ceil((variance / 2 + reach * stddev) / step))
    x = step * np.arange(low, high + 1)
    q = _cells((x + variance / 2) / stddev)  # mass of each cell, and its mean relative to the lower end
    p = _cells((x - variance / 2) / stddev) * np.exp(-x[:-1])
    mass = np.zeros(len(x))
    mass[1:] += np.maximum(0.0, p - q) / math.expm1(step)
    mass[:-1] += np.maximum(0.0, math.exp(step) * q - p) / math.expm1(step)
    below, mean_below = float(ndtr((x[0] + variance / 2) / stddev)), float(ndtr((x[0] - variance / 2) / stddev))
    mass[0] += mean_below * math.exp(-x[0])
    mass[-1] += float(ndtr(-(x[-1] + variance / 2) / stddev))
    excess = float(ndtr(-(x[-1] - variance / 2) / stddev))
    return Law(step, float(x[0]), mass, max(0.0, below - mean_below * math.exp(-x[0])), excess)


def _cells(z: np.ndarray) -> np.ndarray:
    """Normal mass between neighbours, from the nearer tail so that it keeps its relative precision."""
    return np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))


def product(a: Law, b: Law) -> Law:
    """Law of the product of independent variables with means of at most 1."""
    zero = a.zero + b.zero - a.zero * b.zero
    return Law(a.step, a.origin + b.origin, np.convolve(a.mass, b.mass), zero, a.excess + b.excess)


def add(a: Law, b: Law) -> Law:
    """Sum of independent variables whose origins differ by whole steps.

    ``exp(x) + exp(x + k h)`` lies ``log(1 + exp(-k h))`` above the larger one: a function of k alone, so that a loop
    over k moves whole vectors.
    """
    h, offset = a.step, round((b.origin - a.origin) / a.step)
    low, size = min(0, offset), max(len(a.mass), offset + len(b.mass)) - min(0, offset)
    first, second = np.zeros(size), np.zeros(size)
    first[-low : len(a.mass) - low] = a.mass
    second[offset - low : offset - low + len(b.mass)] = b.mass
    k = np.arange(size)
    above = np.log1p(np.exp(-h * k)) / h
    cells = np.floor(above).astype(int)
    upper = np.expm1(h * (above - cells)) / math.expm1(h)
    out = np.zeros(size + int(cells[0]) + 2)
    for j in range(size):
        pairs = first[: size - j] * second[j:]
        if j:
            pairs = 2 * pairs if a is b else pairs + second[: size - j] * first[j:]
        start = j + cells[j]
        out[start : start + size - j] += (1 - upper[j]) * pairs
        out[start + 1 : start + 1 + size - j] += upper[j] * pairs
    out[:size] += a.zero * second + b.zero * first
    return Law(h, a.origin + low * h, out, a.zero * b.zero, a.excess + b.excess)


def trim(law: Law, tail: float) -> Law:
    """Cut mass of up to `tail` below and mean of up to `tail` above."""
    mass, moments = law.mass, law.mass * law.values()
    first = min(int(np.searchsorted(np.cumsum(mass), tail)), len(mass) - 1)
    last = max(len(mass) - 1 - int(np.searchsorted(np.cumsum(moments[::-1]), tail)), first)
    origin = law.origin + first * law.step
    kept, at_first = mass[first : last + 1].copy(), float(moments[:first].sum()) * math.exp(-origin)
    kept[0] += at_first
    kept[-1] += mass[last + 1 :].sum()
    zero = law.zero + max(0.0, float(mass[:first].sum()) - at_first)
    return Law(law.step, origin, kept, zero, law.excess + float(moments[last + 1 :].sum()))


def mean(law: Law, count: int, tail: float) -> Law:
    """Law of the mean of `count` independent variables with this law."""
    total, power, left = None, law, count
    while left:
        if left & 1:
            total = power if total is None else trim(add(total, power), tail)
        left >>= 1
        if left:
            power = trim(add(power, power), tail)
    assert total is not None, count
    return dataclasses.replace(total, origin=total.origin - math.log(count), excess=total.excess / count)


# --- bins on a ring, and trees of them -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ring:
    """Balls in bins up to what the bound looks at, and how many independent chains of it there were.

    Args:
        covariances: largest ``G_jl / s^2`` among bins at distance 0, 1, .., b // 2 of each other on the ring.
        num_bins: b.
        chains: independent assignments, each with its own noise.
    """

    covariances: tuple[float, ...]
    num_bins: int
    chains: int = 1

    @classmethod
    def of(cls, lags: np.ndarray, stddev: float) -> Ring:
        """Make a ring from the largest ``G_jl >= 0`` among bins with ``j - l = 0, 1, .., b - 1``, (b,)."""
        assert (lags >= 0).all()
        around = np.concatenate([lags[:1], lags[:0:-1]])  # bins k apart one way are b - k apart the other way
        largest = np.maximum(lags, around)[: len(lags) // 2 + 1] / stddev**2
        return cls(tuple(largest.tolist()), len(lags))

    @property
    def variance(self) -> float:
        """Variance of the privacy loss of a record whose bin is known."""
        return max(self.covariances)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Bins ``sum_l a_l strides[l]`` with ``0 <= a_l < arities[l]``: blocks of blocks of bins, from the root down."""

    arities: tuple[int, ...]
    strides: tuple[int, ...]

    def bins(self) -> np.ndarray:
        found = np.zeros(1, dtype=int)
        for arity, stride in zip(self.arities, self.strides, strict=True):
            found = (found[:, None] + stride * np.arange(arity)).ravel()
        return found

    def fits(self, num_bins: int) -> bool:
        """Whether no bin is met twice on the ring."""
        return len(np.unique(self.bins() % num_bins)) == math.prod(self.arities)

    def variances(self, ring: Ring) -> np.ndarray:
        """Variances of the lognormal factor of the root, of each level below it, and of the bins; all >= 0.

        Two bins share the factors down to where they part, so their covariance is the sum of those variances. It is
        the largest that the ring has for any two bins that part there, and no smaller than that of an earlier parting.
        """
        covariances, largest = np.asarray(ring.covariances), []
        below = np.zeros(1, dtype=int)  # how far apart bins of two blocks lie, relative to the blocks
        for arity, stride in zip(reversed(self.arities), reversed(self.strides), strict=True):
            apart = (below[:, None] + stride * np.arange(1, arity)).ravel() % ring.num_bins
            largest.append(float(covariances[np.minimum(apart, ring.num_bins - apart)].max(initial=0.0)))
            below = np.unique(below[:, None] + stride * np.arange(1 - arity, arity))
        sums = np.maximum.accumulate([0.0, *reversed(largest), ring.variance])
        return np.diff(sums)


def grid_step(variance: float, points: int = FINE) -> float:
    return max(SMALLEST_STEP, math.sqrt(variance) / points)


def ratio_law(ring: Ring, tree: Tree, tail: float, step: float) -> Law:
    """The law of U, or one that is above it in the convex order."""
    *shared, own = tree.variances(ring)
    law = lognormal(own, step, tail)
    for variance, arity in zip(reversed(shared), reversed(tree.arities), strict=True):
        law = trim(product(mean(law, arity, tail), lognormal(variance, step, tail)), tail)
    return _power(law, ring.chains, tail)


def _power(law: Law, count: int, tail: float) -> Law:
    result = law
    for bit in bin(count)[3:]:
        result = trim(product(result, result), tail)
        if bit == "1":
            result = trim(product(result, law), tail)
    return result


# --- epsilon and delta -----------------------------------------------------------------------------------------------


def epsilon(rings: Sequence[Ring], delta: float, *, gaussian: float = 0.0) -> float:
    """Upper bound on the epsilon of several mechanisms together; infinite if nothing is protected.

    Args:
        rings: one for each different mechanism.
        delta: delta of the guarantee, in (0, 1).
        gaussian: sum of ``1 / noise_multiplier^2`` over plain Gaussian mechanisms that ran as well.
    """
    if not gaussian and not any(ring.variance for ring in rings) and delta >= MIN_DELTA:
        return 0.0
    law = law_of(rings, delta, gaussian=gaussian)
    return math.inf if law is None else _epsilon(law, delta)


def law_of(rings: Sequence[Ring], delta: float, *, gaussian: float = 0.0) -> Law | None:
    """Law of the likelihood ratio of several mechanisms together, whose tree is good for `delta`.

    Its deltas are upper bounds at every epsilon; None where nothing is protected. Arguments as for `epsilon`.
    """
    rings = [ring for ring in rings if ring.variance]
    total = math.fsum([gaussian, *(ring.variance * ring.chains for ring in rings)])
    if total > MAX_VARIANCE or delta < MIN_DELTA:
        return None
    tail, step = TAIL * delta, grid_step(total)
    law = lognormal(gaussian, step, tail)
    for ring in rings:
        law = trim(product(law, ratio_law(ring, best_tree(ring, delta), tail, step)), tail)
    return law


def _epsilon(law: Law, delta: float) -> float:
    low, high = 0.0, 1.0

    def is_within(epsilon: float) -> bool:
        return all(math.isfinite(value) and value <= delta for value in law.deltas(epsilon))  # NaN proves nothing

    if is_within(0.0):
        return 0.0
    while not is_within(high):
        high *= 2
        if high > 2 * MAX_VARIANCE:
            return math.inf
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_within(middle) else (middle, high)
    return high


@functools.lru_cache(maxsize=256)
def best_tree(ring: Ring, delta: float) -> Tree:
    """The tree with the smallest epsilon among some; every other one would give a bound as well."""
    everything = Tree((ring.num_bins,), (1,))
    if max(ring.covariances[1:], default=0.0) == 0 or ring.variance * ring.chains > MAX_VARIANCE:
        return everything  # nothing is raised, or nothing is protected

    step = grid_step(ring.variance * ring.chains, COARSE)

    def rank(trees: Iterator[Tree]) -> list[Tree]:
        fitting = [tree for tree in trees if tree.fits(ring.num_bins)]
        found = {tree: _epsilon(ratio_law(ring, tree, 1e-3 * delta, step), delta) for tree in fitting}
        return sorted(found, key=found.__getitem__)

    counts = _spread(1, ring.num_bins, 1.25)
    two = rank(itertools.chain([everything], _two_levels(ring.num_bins, counts)))
    three = (Tree((*tree.arities, n), (*tree.strides, t)) for tree in two[:KEPT] for n, t in _inside(tree.strides[-1]))
    return rank(itertools.chain(two[:1], three))[0]


def _two_levels(num_bins: int, counts: list[int]) -> Iterator[Tree]:
    for n in counts:
        yield Tree((n,), (num_bins // n,))
        for inner, stride in _inside(num_bins // n):
            yield Tree((n, inner), (num_bins // n, stride))


def _inside(room: int) -> Iterator[tuple[int, int]]:
    """Blocks within blocks: how many, and how far apart."""
    for n in (2, 3, 4, 6, 8):
        for stride in _spread(1, (room - 1) // (n - 1), 1.3):
            yield n, stride


def _spread(low: int, high: int, factor: float) -> list[int]:
    """Whole numbers from `low` to `high`, about a factor apart."""
    found, value = [], float(low)
    while round(value) <= high:
        found.append(round(value))
        value = max(value * factor, round(value) + 1)
    return found


# --- epsilon of events -----------------------------------------------------------------------------------------------


def without_amplification(event: BallsInBinsDpEvent) -> GaussianDpEvent:
    """The event of a record whose bin everybody knows: never better than the truth."""
    largest = bin_lags(event.strategy, event.num_steps, event.num_bins)[0]
    return GaussianDpEvent(event.noise_multiplier / math.sqrt(largest))


def balls_in_bins_epsilon(
    composition: tuple[tuple[DpEvent, int], ...], delta: float, adjacency: str, relative_error: float = 0.0
) -> float | None:
    """Epsilon of any number of chains of balls in bins, with plain Gaussian mechanisms; for `ACCOUNTANTS`.

    Computed, so the same in every process: a certificate counts only where a caller hands it over.
    """
    return None if rings_of(composition, adjacency) is None else computed_epsilon(composition, delta)


@functools.lru_cache(maxsize=1024)
def computed_epsilon(composition: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    """Sampling-free bound on the epsilon of chains of balls in bins and plain Gaussian mechanisms."""
    found = rings_of(composition, ADJACENCIES[0])
    assert found is not None, composition
    rings, gaussian = found
    known = [  # 1 / noise_multiplier^2 of chains whose bins are known
        count * without_amplification(leaf).noise_multiplier ** -2
        for leaf, count in composition
        if isinstance(leaf, BallsInBinsDpEvent)
    ]
    exact = exact_gaussian_epsilon(math.fsum([*known, gaussian]) ** -0.5, delta)
    exact = exact * (1 + 1e-9) + 1e-11 if exact > 0 else 0.0  # the root finder stops on either side
    return min(exact, epsilon(rings, delta, gaussian=gaussian))


def rings_of(composition: tuple[tuple[DpEvent, int], ...], adjacency: str) -> tuple[list[Ring], float] | None:
    """Rings of the chains of balls in bins, and the sum of 1 / noise_multiplier^2 of plain Gaussian mechanisms.

    None where there are no bins, other mechanisms too, or an adjacency without a proof.
    """
    bins = [(leaf, count) for leaf, count in composition if isinstance(leaf, BallsInBinsDpEvent)]
    others = [(leaf, count) for leaf, count in composition if isinstance(leaf, GaussianDpEvent)]
    if adjacency not in ADJACENCIES or not bins or len(bins) + len(others) < len(composition):
        return None
    rings = [dataclasses.replace(leaf.ring, chains=count) for leaf, count in bins]
    return rings, math.fsum(count * leaf.noise_multiplier**-2 for leaf, count in others)
