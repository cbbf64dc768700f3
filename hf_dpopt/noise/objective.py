"""Objectives of tunings, with gradients, and the searches for their minima.

n = steps, c = coefficients of C, beta = those of B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.signal import fftconvolve

from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.workloads import Workload, scheduled_error_form

Damped = TypeVar("Damped", bound=NoiseStrategy)
ErrorAndSlope = Callable[[np.ndarray], tuple[float, np.ndarray]]


def squared_error(n: int, workload: Workload | None) -> ErrorAndSlope:
    """Mean square error of the iterates and its gradient, (n,), as a function of beta, (n,).

    A Toeplitz workload costs O(n log n) for each beta; one with a schedule O(n^2), in time and memory.
    """
    if workload is not None:
        workload.check(n)
    if workload is not None and workload.step_sizes is not None:
        return _scheduled(workload.decay, np.asarray(workload.step_sizes))
    impulse = None if workload is None else np.asarray(workload.coefs)
    # square k of the row of the last iterate is in all iterates from k on
    weights = np.arange(n, 0, -1) / n

    def toeplitz(noising: np.ndarray) -> tuple[float, np.ndarray]:
        summed = _filtered(impulse, noising)
        return float(weights @ summed**2), _adjoint(impulse, 2 * weights * summed)

    return toeplitz


def _scheduled(decay: np.ndarray, step_sizes: np.ndarray) -> ErrorAndSlope:
    form = scheduled_error_form(step_sizes)

    def scheduled(noising: np.ndarray) -> tuple[float, np.ndarray]:
        response = _filtered(decay, noising)
        slope = form @ response
        return float(response @ slope), _adjoint(decay, 2 * slope)

    return scheduled


def _filtered(impulse: np.ndarray | None, values: np.ndarray) -> np.ndarray:
    """Convolution cut to n terms; None for prefix sums."""
    return np.cumsum(values) if impulse is None else fftconvolve(impulse, values)[: len(values)]


def _adjoint(impulse: np.ndarray | None, values: np.ndarray) -> np.ndarray:
    return _filtered(impulse, values[::-1])[::-1]


def squared_sensitivity(coefs: np.ndarray, participation: Participation) -> tuple[float, np.ndarray]:
    """Square of `toeplitz_sensitivity` and its gradient, (n,); for coefficients that are >= 0 and do not increase."""
    n, total, slope = len(coefs), np.zeros(len(coefs)), np.zeros(len(coefs))
    firsts = range(0, participation.fits(n) * participation.min_sep, participation.min_sep)
    for first in firsts:
        total[first:] += coefs[: n - first]
    for first in firsts:
        slope[: n - first] += 2 * total[first:]
    return float(total @ total), slope


def descend(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    bounds: tuple[float, float | None] | None = None,
    **options: float,
) -> np.ndarray:
    """Point where L-BFGS ends; `loss` returns value and gradient, `bounds` hold for every variable."""
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-13, "gtol": 1e-9, **options}
    every = None if bounds is None else [bounds] * len(start)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=every, options=options).x


def best_damping(
    family: Callable[[float], Damped], n: int, participation: Participation, workload: Workload | None
) -> Damped:
    """The damping in [0, 1] with the least mean error.

    The optimum is flat: a factor 1.5 in nu costs about 2 %. A grid finds the valley, a line search its floor.
    """
    participation.check(n)

    def loss(log_nu: float) -> float:
        return family(float(np.exp(log_nu))).mean_loss(n, participation, workload)

    grid = np.linspace(np.log(1e-2 / n), 0.0, 13)
    lowest = int(np.argmin([loss(x) for x in grid]))
    around = (grid[max(0, lowest - 1)], grid[min(len(grid) - 1, lowest + 1)])
    found = family(float(np.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 3e-3}).x)))
    return min(found, family(0.0), family(1.0), key=lambda s: s.mean_loss(n, participation, workload))
