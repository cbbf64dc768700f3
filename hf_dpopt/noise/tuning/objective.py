"""What tunings of Toeplitz strategies minimise, with gradients: square error of the iterates, and square sensitivity.

n = steps, c = coefficients of C, beta = those of B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy.signal import correlate, fftconvolve

from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.workloads import Workload, scheduled_error_form, scheduled_errors

Error = Literal["mean", "max"]
ErrorAndSlope = Callable[[np.ndarray], tuple[float, np.ndarray]]


def squared_error(n: int, workload: Workload | None, error: Error = "mean") -> ErrorAndSlope:
    """Mean or largest square error of the iterates and its gradient, (n,), as a function of beta, (n,).

    A Toeplitz workload costs O(n log n) for each beta; one with a schedule O(n^2), and O(n^2) memory for the mean.
    """
    if workload is not None:
        workload.check(n)
    if workload is not None and workload.step_sizes is not None:
        return _scheduled(workload.decay, np.asarray(workload.step_sizes), error)
    impulse = None if workload is None else np.asarray(workload.coefs)
    # square k of the row of the last iterate is in all iterates from k on
    weights = np.arange(n, 0, -1) / n if error == "mean" else np.ones(n)

    def toeplitz(noising: np.ndarray) -> tuple[float, np.ndarray]:
        summed = _filtered(impulse, noising)
        return float(weights @ summed**2), _adjoint(impulse, 2 * weights * summed)

    return toeplitz


def _scheduled(decay: np.ndarray, step_sizes: np.ndarray, error: Error) -> ErrorAndSlope:
    n = len(decay)
    form = scheduled_error_form(step_sizes) if error == "mean" else None

    def of_response(response: np.ndarray) -> tuple[float, np.ndarray]:
        if form is not None:
            slope = form @ response
            return float(response @ slope), 2 * slope
        worst = int(np.argmax(scheduled_errors(response, step_sizes)))
        sizes = step_sizes[: worst + 1]
        row = correlate(sizes, response[: worst + 1], method="fft")[worst:]  # sum_i sizes[s + i] response[i]
        slope = np.zeros(n)
        slope[: worst + 1] = 2 * correlate(sizes, row, method="fft")[worst:]
        return float(row @ row), slope

    def scheduled(noising: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = of_response(_filtered(decay, noising))
        return value, _adjoint(decay, slope)

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
