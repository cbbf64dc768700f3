"""Amplification by balls in bins for any non-negative strategy: Monte Carlo over the exact dominating pair.

Every record is thrown into one of b bins once, and takes part in steps j, j + b, j + 2b, .. of its bin j. With
``m_j`` the sum of the columns of C that bin j meets, the pair is ``P = mean_j N(m_j, sigma^2 I)`` against
``Q = N(0, sigma^2 I)``. Only the b inner products with the ``m_j`` matter, so samples are drawn in b dimensions.

What comes out is an ESTIMATE with a standard error, not a bound; a guarantee needs estimate-verify-release on top.

References:
    Choquette-Choo et al. (2024), arXiv:2410.06266; Chua et al. (2024), arXiv:2412.16802.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import logsumexp

from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms.strategies import NoiseStrategy

AT_ONCE = 20_000  # samples that are held in memory


@dataclasses.dataclass(frozen=True)
class DeltaEstimate:
    """Monte Carlo estimates of delta when a record is removed and when it is added, with their standard errors."""

    remove: float
    remove_error: float
    add: float
    add_error: float
    num_samples: int

    @property
    def delta(self) -> float:
        """The larger of the two."""
        return max(self.remove, self.add)


def bin_grams(strategy: NoiseStrategy, num_steps: int, num_bins: int) -> np.ndarray:
    """Inner products of the ``m_j``, (bins, bins).

    Raises:
        DPConfigError: for a strategy with negative entries, or more bins than steps.
    """
    if not 1 <= num_bins <= num_steps:
        raise DPConfigError(f"num_bins={num_bins} is outside [1, {num_steps}], the steps of the run.")
    matrix = strategy.strategy_matrix(num_steps)
    if (matrix < 0).any():
        raise DPConfigError(
            f"{strategy.name} has negative entries; the dominating pair of balls in bins is proven for entries >= 0. "
            "Use nu_dpftrl or blt."
        )
    met = np.stack([matrix[:, j::num_bins].sum(axis=1) for j in range(num_bins)])
    return met @ met.T


def balls_in_bins_delta(
    strategy: NoiseStrategy,
    draw_stddev: float,
    epsilon: float,
    *,
    num_steps: int,
    num_bins: int,
    num_samples: int = 1_000_000,
    seed: int = 0,
) -> DeltaEstimate:
    """Delta at `epsilon`, estimated from samples of the privacy loss.

    Args:
        strategy: C, non-negative.
        draw_stddev: sigma_z relative to the clipping norm, > 0.
        epsilon: >= 0.
        num_steps: steps of the run.
        num_bins: b; a record takes part in every b-th step.
        num_samples: for each of the two directions.
        seed: of the samples, which protect nobody.
    """
    if not (math.isfinite(draw_stddev) and draw_stddev > 0) or not epsilon >= 0 or num_samples < 2:
        raise DPConfigError("Use a finite draw_stddev > 0, an epsilon >= 0 and at least 2 samples.")
    gram = bin_grams(strategy, num_steps, num_bins)
    values, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(np.maximum(values, 0))).T  # root^T root = gram
    rng = np.random.default_rng(seed)
    sums = np.zeros((2, 2))  # (remove, add) x (sum, sum of squares)
    for first in range(0, num_samples, AT_ONCE):
        size = min(AT_ONCE, num_samples - first)
        noise = draw_stddev * (rng.standard_normal((size, num_bins)) @ root)
        with_record = noise + gram[rng.integers(num_bins, size=size)]
        for direction, (products, sign) in enumerate(((with_record, 1), (noise, -1))):
            loss = sign * _log_ratio(products, gram, draw_stddev)
            shares = -np.expm1(np.minimum(0.0, epsilon - loss))
            sums[direction] += shares.sum(), np.square(shares).sum()
    means = sums[:, 0] / num_samples
    errors = np.sqrt(np.maximum(0, sums[:, 1] / num_samples - means**2) / num_samples)
    return DeltaEstimate(
        remove=float(means[0]), remove_error=float(errors[0]), add=float(means[1]), add_error=float(errors[1]),
        num_samples=num_samples,
    )  # fmt: skip


def _log_ratio(products: np.ndarray, gram: np.ndarray, stddev: float) -> np.ndarray:
    """``log P(y) / Q(y)`` from the inner products of y with the ``m_j``, (samples,)."""
    exponents = (2 * products - np.diag(gram)) / (2 * stddev**2)
    return logsumexp(exponents, axis=1) - math.log(len(gram))
