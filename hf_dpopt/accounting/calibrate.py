"""The noise multiplier that spends a budget and no more; and a rough one in milliseconds.

The rough one is for comparing runs that are not made, never for one that is: Renyi differential privacy at integer
orders gives an upper bound, some 3 to 15 % above what the calibration finds, and more for an epsilon far below 1,
where sampling is left out of account.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from dp_accounting import get_sigma_gaussian
from scipy.special import gammaln

from hf_dpopt.accounting.accountants import FINE
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.errors import DPConfigError

MARGIN = 1e-3  # aim this far below the target, so that rounding never ends above it
SEARCHES = ((0.1, 0.1), (1e-2, 1e-2), (3e-3, MARGIN))  # (relative_error of epsilon, tolerance), from cheap to fine
MAX_ITERATIONS = 100
LOWEST, HIGHEST = math.log(1e-6), math.log(1e6)  # of the log noise multiplier


def calibrate_noise_multiplier(epsilon_at: Callable[[float, float], float], target_epsilon: float) -> float:
    """Smallest noise multiplier, within about 0.2%, whose epsilon is at most the target.

    Secant steps on log epsilon as a function of log noise multiplier (nearly a straight line), first with a coarse and
    cheap epsilon, then with finer ones from where the last search ended.

    Formal guarantee: ``epsilon_at(result, FINE) <= target_epsilon``. The coarser values only guide the search.

    Args:
        epsilon_at: epsilon as a decreasing function of (noise multiplier, relative_error), see `accountants.epsilon`.
        target_epsilon: > 0.

    Raises:
        DPConfigError: if no noise multiplier between 1e-6 and 1e6 reaches the target.
    """
    log_sigma, slope = 0.0, -1.5
    for relative_error, tolerance in SEARCHES:
        log_sigma, slope = _solve(
            lambda x, error=relative_error: epsilon_at(math.exp(x), error),  # type: ignore[misc]
            target_epsilon * (1 - MARGIN),
            log_sigma,
            slope,
            tolerance=tolerance,
        )
    while epsilon_at(math.exp(log_sigma), FINE) > target_epsilon:
        log_sigma += MARGIN
    return math.exp(log_sigma)


def calibrate_gaussian(
    epsilon_at: Callable[[float, float], float], target_epsilon: float, delta: float, precision: float, adjacency: str
) -> float:
    """Smallest noise multiplier of a run that is one Gaussian mechanism: in closed form, to a relative 1e-9.

    Args:
        epsilon_at: epsilon at a noise multiplier and a relative error.
        target_epsilon, delta: the budget.
        precision: `events.gaussian_precision` of the run at a noise multiplier of 1.
        adjacency: decides how many clips a record moves.

    References:
        Balle and Wang (2018), arXiv:1805.06530 (analytic Gaussian mechanism).
    """
    try:
        noise = get_sigma_gaussian(target_epsilon, delta) * math.sqrt(precision) * SENSITIVITY_FACTOR[adjacency]
    except (ValueError, ArithmeticError):
        raise DPConfigError(
            f"No noise multiplier gives epsilon={target_epsilon:.4g}. Use a target_epsilon between 0.01 and 100."
        ) from None
    more = 1e-9
    while epsilon_at(noise, FINE) > target_epsilon:  # the inverse stops within rounding on either side
        noise *= 1 + more
        more *= 2
    return noise


def _solve(
    epsilon_of: Callable[[float], float], aim: float, x: float, slope: float, *, tolerance: float
) -> tuple[float, float]:
    """Root of log(epsilon_of(x) / aim) within ``tolerance``, and the slope there; a bisection where secants fail."""
    low, high = LOWEST, HIGHEST  # epsilon_of(low) > aim >= epsilon_of(high)
    previous: tuple[float, float] | None = None
    for _ in range(MAX_ITERATIONS):
        value = epsilon_of(x)
        error = math.log(value / aim) if 0 < value < math.inf else math.copysign(math.inf, value - aim)
        if abs(error) <= tolerance:
            return x, slope
        low, high = (x, high) if error > 0 else (low, x)
        if high - low < 1e-4:  # epsilon jumps over the aim here; the upper end is the safe one
            if high == HIGHEST:
                break
            return high, slope
        if previous is not None and math.isfinite(error) and math.isfinite(previous[1]) and error != previous[1]:
            slope = (error - previous[1]) / (x - previous[0])
        previous = (x, error)
        step = -error / slope if slope < 0 and math.isfinite(error) else math.copysign(math.log(2), error)
        x += max(-1.5, min(1.5, step))
        if not low < x < high:
            x = (low + high) / 2
    raise DPConfigError(
        f"No noise multiplier between 1e-6 and 1e6 gives epsilon={aim:.4g}. Use a target_epsilon between 0.01 and "
        "100, fewer steps or a smaller expected_batch_size."
    )


# --- rough, for comparisons ------------------------------------------------------------------------------------------

LARGEST_ORDER = 512
NARROW = 1e-3  # relative width of the interval at which the search ends
LEAST_NOISE, MOST_NOISE = 1e-3, 1e5  # noise multipliers


@functools.cache
def _orders() -> tuple[np.ndarray, ...]:
    """Orders, (A,), and for the terms of all of them in a row, (N,): the place where each order begins, (A,), order,
    number of draws k <= order, and the logarithm of the binomial coefficient.
    """
    small = np.arange(2, 65)
    large = np.unique(np.geomspace(65, LARGEST_ORDER, 24).astype(int))
    orders_A = np.concatenate([small, large])
    begin_A = np.cumsum(orders_A + 1) - (orders_A + 1)
    order_N = np.repeat(orders_A, orders_A + 1)
    k_N = np.arange(len(order_N)) - np.repeat(begin_A, orders_A + 1)
    return orders_A, begin_A, order_N, k_N, gammaln(order_N + 1) - gammaln(k_N + 1) - gammaln(order_N - k_N + 1)


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
    orders_A, begin_A, order_N, k_N, log_binomial_N = _orders()
    if sample_rate >= 1:
        divergences_A = orders_A / (2 * noise_multiplier**2)
    else:
        terms_N = (
            log_binomial_N
            + k_N * math.log(sample_rate)
            + (order_N - k_N) * math.log1p(-sample_rate)
            + k_N * (k_N - 1) / (2 * noise_multiplier**2)
        )
        largest_A = np.maximum.reduceat(terms_N, begin_A)
        sums_A = np.add.reduceat(np.exp(terms_N - np.repeat(largest_A, orders_A + 1)), begin_A)
        divergences_A = (largest_A + np.log(sums_A)) / (orders_A - 1)
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
    low, high = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if rough_epsilon(sample_rate, MOST_NOISE, num_steps, delta) > epsilon:
        raise DPConfigError(
            f"No noise multiplier up to {MOST_NOISE:g} keeps epsilon={epsilon:g} over {num_steps} steps. Use a larger "
            "target_epsilon (1 to 8 is usual), or fewer steps."
        )
    while high - low > NARROW:
        middle = (low + high) / 2
        if rough_epsilon(sample_rate, math.exp(middle), num_steps, delta) > epsilon:
            low = middle
        else:
            high = middle
    return math.exp(high)
