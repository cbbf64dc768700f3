"""The best bands."""

from __future__ import annotations

import numpy as np
from scipy.signal import correlate, lfilter

from hf_dpopt.config import check_count
from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms.strategies.banded import BandedToeplitz
from hf_dpopt.mechanisms.strategies.toeplitz import NuDPFTRL
from hf_dpopt.mechanisms.strategies.tuning.descent import descend


def optimize_banded(n: int, num_bands: int) -> BandedToeplitz:
    """The banded strategy with the least mean error of prefix sums for a record that never meets two of its columns.

    Good for every participation with ``min_sep >= num_bands``: the sensitivity is then that of one participation times
    the root of their number.

    Args:
        n: steps.
        num_bands: p, at most n.

    References:
        McKenna (2024), arXiv:2405.15913, Section 4.
    """
    check_count("num_bands", num_bands)
    if num_bands > n:
        raise DPConfigError(f"num_bands={num_bands} is more than the {n} steps. Use at most {n}.")
    unit, remaining = np.zeros(n), np.arange(n, 0, -1) / n
    unit[0] = 1.0

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        coefs = np.concatenate([[1.0], free])
        noising = lfilter([1.0], coefs, unit)
        summed = np.cumsum(noising)
        error = float(remaining @ summed**2)
        if not np.isfinite(error):
            return 1e30, np.zeros_like(free)
        of_noising = np.cumsum((2 * remaining * summed)[::-1])[::-1]
        adjoint = lfilter([1.0], coefs, of_noising[::-1])[::-1]
        of_coefs = -correlate(adjoint, noising, method="fft")[n - 1 : n - 1 + num_bands]
        norm = float(coefs @ coefs)
        return np.log(error) + np.log(norm), (of_coefs / error + 2 * coefs / norm)[1:]

    start = NuDPFTRL(1 / num_bands**2).strategy_coefs(num_bands)[1:]
    if num_bands > 1:
        start = descend(loss, start)
    return BandedToeplitz((1.0, *start))
