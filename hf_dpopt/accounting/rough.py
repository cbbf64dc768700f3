"""A rough noise multiplier in milliseconds, to compare runs that are not made; never to run one.

By Renyi differential privacy at integer orders: an upper bound, some 3 to 15 % above what `calibrate` finds, and more
for an epsilon far below 1, where sampling is left out of account.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import gammaln, logsumexp

from hf_dpopt.common.errors import DPConfigError

LARGEST_ORDER = 512
NARROW = 1e-3  # relative width of the interval at which the search ends
LOWEST, HIGHEST = 1e-3, 1e5  # noise multipliers


@functools.cache
def _orders() -> tuple[np.ndarray, np.ndarray]:
    """Orders, (A,), and the logarithm of the binomial coefficients of each, (A, K), -inf beyond the order."""
    small = np.arange(2, 65)
    large = np.unique(np.geomspace(65, LARGEST_ORDER, 24).astype(int))
    orders_A = np.concatenate([small, large])
    k_K = np.arange(LARGEST_ORDER + 1)
    a_A1, k_1K = orders_A[:, None], k_K[None, :]
    with np.errstate(invalid="ignore"):
        log_binomial_AK = gammaln(a_A1 + 1) - gammaln(k_1K + 1) - gammaln(np.maximum(a_A1 - k_1K, 0) + 1)
    return orders_A, np.where(k_1K <= a_A1, log_binomial_AK, -np.inf)


def rough_epsilon(sample_rate: float, noise_multiplier: float, num_steps: int, delta: float) -> float:
    """Epsilon of Poisson-sampled Gaussian steps, an upper bound under ``add_or_remove_one``.

    Args:
        sample_rate: probability of a record to take part in a step, in (0, 1].
        noise_multiplier: > 0.
        num_steps: >= 1.
        delta: probability that epsilon may fail with, in (0, 1).

    References:
        Mironov, Talwar, Zhang (2019), arXiv:1908.10530, section 3.3 (integer orders).
        Canonne, Kamath, Steinke (2020), arXiv:2004.00010, proposition 12 (from Renyi to epsilon and delta).
    """
    orders_A, log_binomial_AK = _orders()
    if sample_rate >= 1:
        divergences_A = orders_A / (2 * noise_multiplier**2)
    else:
        k_K = np.arange(LARGEST_ORDER + 1)
        terms_AK = (
            log_binomial_AK
            + k_K * math.log(sample_rate)
            + np.maximum(orders_A[:, None] - k_K, 0) * math.log1p(-sample_rate)
            + k_K * (k_K - 1) / (2 * noise_multiplier**2)
        )
        divergences_A = logsumexp(terms_AK, axis=1) / (orders_A - 1)
    epsilons_A = (
        num_steps * divergences_A + np.log1p(-1 / orders_A) - (math.log(delta) + np.log(orders_A)) / (orders_A - 1)
    )
    # without sampling the bound holds, too, and it has no largest order: it is what small epsilons need
    whole = num_steps / (2 * noise_multiplier**2)
    order = 1 + math.sqrt(-math.log(delta) / whole)
    without_sampling = order * whole + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
    return float(max(0.0, min(epsilons_A.min(), without_sampling)))


def rough_noise_multiplier(sample_rate: float, num_steps: int, epsilon: float, delta: float) -> float:
    """Noise multiplier whose `rough_epsilon` is the budget; arguments as there.

    Raises:
        DPConfigError: for a budget that no noise between 1e-3 and 1e5 keeps.
    """
    low, high = math.log(LOWEST), math.log(HIGHEST)
    if rough_epsilon(sample_rate, HIGHEST, num_steps, delta) > epsilon:
        raise DPConfigError(
            f"No noise multiplier up to {HIGHEST:g} keeps epsilon={epsilon:g} over {num_steps} steps. Use a larger "
            "target_epsilon (1 to 8 is usual), or fewer steps."
        )
    while high - low > NARROW:
        middle = (low + high) / 2
        if rough_epsilon(sample_rate, math.exp(middle), num_steps, delta) > epsilon:
            low = middle
        else:
            high = middle
    return math.exp(high)
