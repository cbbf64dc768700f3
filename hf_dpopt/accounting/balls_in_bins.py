r"""Amplification by balls in bins, for independent and for correlated noise: the event, and its computed epsilon.

Every record is thrown into one of b bins once, and takes part in steps j, j + b, j + 2b, .. of its bin j. With
``m_j`` the sum of the columns of C that bin j meets, the pair is ``P = mean_j N(m_j, s^2 I)`` against
``Q = N(0, s^2 I)``, s the noise stddev relative to the clipping norm; it dominates adaptive runs for a C that is
lower-triangular with entries >= 0. Only the inner products of the ``m_j`` matter.

The bound (`random_allocation`) takes no samples: exact for independent noise, it asks for 5 to 30% more noise than
needed if the noise is correlated. `certificates` has a tighter one, by verified samples.

References:
    Choquette-Choo et al. (2024), arXiv:2410.06266 (the pair); Chua et al. (2024), arXiv:2412.16802 (independent
    noise).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from dp_accounting import get_epsilon_gaussian as exact_gaussian_epsilon

from hf_dpopt.accounting import random_allocation
from hf_dpopt.accounting.random_allocation import Ring
from hf_dpopt.common.checks import check_at_most, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.protocols import StrategyMatrices

MAX_BINS = 10**5  # steps of an epoch; half a minute
ADJACENCIES = ("add_or_remove_one", "zero_out")


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
    check_count("num_steps", num_steps)
    check_count("num_bins", num_bins)
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
    check_count("num_steps", num_steps)
    check_count("num_bins", num_bins)
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
            f"{strategy.name} has negative entries; the dominating pair of balls in bins is proven for entries >= 0. "
            "Use nu_dpftrl or blt."
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
    kinds = {type(leaf) for leaf, _ in composition}
    if (
        adjacency not in ADJACENCIES
        or BallsInBinsDpEvent not in kinds
        or kinds - {BallsInBinsDpEvent, GaussianDpEvent}
    ):
        return None
    return computed_epsilon(composition, delta)


@functools.lru_cache(maxsize=1024)
def computed_epsilon(composition: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    """Sampling-free bound on the epsilon of chains of balls in bins and plain Gaussian mechanisms."""
    rings, gaussian = rings_of(composition)
    known = [  # 1 / noise_multiplier^2 of chains whose bins are known
        count * without_amplification(leaf).noise_multiplier ** -2
        for leaf, count in composition
        if isinstance(leaf, BallsInBinsDpEvent)
    ]
    exact = exact_gaussian_epsilon(math.fsum([*known, gaussian]) ** -0.5, delta)
    exact = exact * (1 + 1e-9) + 1e-11 if exact > 0 else 0.0  # the root finder stops on either side
    return min(exact, random_allocation.epsilon(rings, delta, gaussian=gaussian))


def rings_of(composition: tuple[tuple[DpEvent, int], ...]) -> tuple[list[Ring], float]:
    """Rings of the chains of balls in bins, and the sum of 1 / noise_multiplier^2 of plain Gaussian mechanisms."""
    rings: list[Ring] = []
    gaussian: list[float] = []
    for leaf, count in composition:
        if isinstance(leaf, BallsInBinsDpEvent):
            rings.append(dataclasses.replace(leaf.ring, chains=count))
        else:
            assert isinstance(leaf, GaussianDpEvent)
            gaussian.append(count * leaf.noise_multiplier**-2)
    return rings, math.fsum(gaussian)
