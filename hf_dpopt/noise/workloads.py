"""Workloads: the linear map from the gradients of a run to its iterates, its errors, and the search for the least.

A strategy is tuned for a workload; its privacy does not depend on it. n = steps, t, s, j = a step, 0-based, beta =
coefficients of B.

With a schedule ``A = L diag(step_sizes) D``: D makes momentum buffers of gradients, L prefix sums. For a Toeplitz B
``D B`` is Toeplitz; its coefficients are the response g, and row t, column s of ``A B`` is
``sum_{s <= j <= t} step_sizes[j] g[j - s]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from scipy.signal import fftconvolve

from hf_dpopt.common.checks import check_range
from hf_dpopt.common.errors import DPConfigError

ErrorAndSlope = Callable[[np.ndarray], tuple[float, np.ndarray]]
MAX_SCHEDULED_STEPS = 4096  # a schedule makes the matrix of the workload dense; beyond, noise is tuned without it


@dataclasses.dataclass(frozen=True)
class Workload:
    """A lower-triangular matrix A, (n, n): row t maps the gradients of all steps to the iterate after step t.

    Args:
        coefs: first column where A is Toeplitz, (n,); unitless.
        step_sizes: learning rates relative to the largest; every column of A is that of `coefs` times its own, (n,).
            None: all one, and A is Toeplitz.
        adaptive: the optimizer divides by a running second moment, which the noise of single steps fills; that is
            outside of A, and only a comparison of mechanisms asks.
    """

    coefs: tuple[float, ...]
    step_sizes: tuple[float, ...] | None = None
    adaptive: bool = False

    @property
    def n(self) -> int:
        return len(self.coefs)

    def matrix(self) -> np.ndarray:
        """A, (n, n)."""
        if self.step_sizes is None:
            return np.tril(toeplitz(self.coefs))
        buffers = np.tril(toeplitz(self.decay))
        return np.tril(np.cumsum(np.asarray(self.step_sizes)[:, None] * buffers, axis=0))

    @property
    def decay(self) -> np.ndarray:
        """Share of a gradient in the momentum buffer after 0, 1, .. steps: first column of D, (n,)."""
        return np.diff(np.asarray(self.coefs), prepend=0.0)

    def check(self, n: int) -> None:
        """Refuse another number of steps: the error would be that of another run."""
        if self.n != n:
            raise DPConfigError(f"The workload is of {self.n} steps, and the run of {n}. Make one for {n} steps.")


def momentum_workload(n: int, momentum: float, step_sizes: Sequence[float] | None = None) -> Workload:
    """SGD with heavy-ball momentum: ``A[t, s] = sum_{j=s}^{t} step_sizes[j] momentum^{j-s}``.

    Also the proxy for AdamW, whose first moment is such an average with ``momentum = beta_1``; the factor
    ``1 - beta_1`` scales every error alike.

    Args:
        n: steps.
        momentum: coefficient of the momentum, in [0, 1).
        step_sizes: learning rates, (n,), in any unit; None for a constant one.

    Raises:
        DPConfigError: for a momentum outside [0, 1), or step sizes that are not n finite numbers >= 0.
    """
    check_range("momentum", momentum, 0, 1)
    impulse = np.cumsum(momentum ** np.arange(n))
    if step_sizes is None:
        return Workload(tuple(impulse.tolist()))
    sizes = np.asarray(step_sizes, dtype=float)
    if sizes.shape != (n,) or not np.isfinite(sizes).all() or (sizes < 0).any() or not sizes.any():
        raise DPConfigError(f"`step_sizes` are not {n} finite numbers >= 0. Give the learning rate of every step.")
    return Workload(tuple(impulse.tolist()), tuple(sizes.tolist()))


def linear_cooldown(n: int, num_cooldown: int, final: float = 0.05) -> list[float]:
    """Relative learning rates: 1, then linear down to `final` over the last steps (the seed paper's schedule)."""
    return [*np.ones(n - num_cooldown).tolist(), *np.linspace(1.0, final, num_cooldown).tolist()]


# --- errors of the iterates, and the search for the least ------------------------------------------------------------


def scheduled_errors(response: np.ndarray, step_sizes: np.ndarray) -> np.ndarray:
    """Variance of every iterate for a Toeplitz B, (n,), in O(n^2) time and O(n) memory.

    At step t it rises by ``step_sizes[t]`` times the covariance of the buffer of t with that iterate and the one
    before; the covariance of the buffers of j and ``j + lag`` is ``sum_{i <= j} g[i] g[i + lag]``.
    """
    n = len(response)
    rises = np.zeros(n)
    for lag in range(n):
        covariances = np.cumsum(response[: n - lag] * response[lag:])
        rises[lag:] += (2 if lag else 1) * step_sizes[: n - lag] * step_sizes[lag:] * covariances
    return np.cumsum(rises)


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
    form = _scheduled_error_form(step_sizes)

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


def _scheduled_error_form(step_sizes: np.ndarray) -> np.ndarray:
    """Q with ``response @ Q @ response == scheduled_errors(response, step_sizes).mean()``, (n, n), symmetric."""
    n = len(step_sizes)
    form, remaining = np.zeros((n, n)), np.arange(n, 0, -1) / n  # share of the iterates that contain step t
    for lag in range(n):
        products = step_sizes[: n - lag] * step_sizes[lag:] * remaining[lag:]
        later = np.cumsum(products[::-1])[::-1]
        form.ravel()[lag :: n + 1][: n - lag] = later
        form.ravel()[lag * n :: n + 1][: n - lag] = later
    return form


def descend(
    loss: ErrorAndSlope,
    start: np.ndarray,
    *,
    bounds: tuple[float, float | None] | None = None,
    **options: float,
) -> np.ndarray:
    """Point where L-BFGS ends; `loss` returns value and gradient, `bounds` hold for every variable."""
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-13, "gtol": 1e-9, **options}
    every = None if bounds is None else [bounds] * len(start)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=every, options=options).x
