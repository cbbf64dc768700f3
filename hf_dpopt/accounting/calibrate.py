"""The noise multiplier that spends a budget and no more."""

from __future__ import annotations

import math
from collections.abc import Callable

from dp_accounting import get_sigma_gaussian

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
