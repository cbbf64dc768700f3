"""Errors of the last iterate after finitely many steps on quadratics, exact, for any strategy, momentum and schedule.

The question is that of Section 2.3 and Appendix D of arXiv:2310.06771. The excess loss of linear regression after any
number of steps, and a bound of it, with proofs, are in ``tests/reference/linear_regression.py``.

n = steps, t = step, X = curvatures.
"""

from __future__ import annotations

import numpy as np
from scipy.signal import fftconvolve

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.workloads import Workload


def last_iterate_errors(
    strategy: NoiseStrategy, n: int, curvatures: np.ndarray, workload: Workload | None = None
) -> np.ndarray:
    """Variance of a coordinate after n steps on a quadratic, per unit of noise variance and learning rate^2, (X,).

    With learning rate eta, momentum and schedule as in the workload and ``x = eta l``: for curvature 0 it is the last
    entry of `NoiseStrategy.per_query_error`; noise of early steps is forgotten the sooner, the larger x is.

    Args:
        strategy: C and B.
        n: steps.
        curvatures: largest learning rate of the run times curvature, x, (X,), each >= 0.
        workload: momentum and learning rates; None for constant ones without momentum.

    Raises:
        DPConfigError: for a workload of another length, or one that is not heavy-ball momentum.
    """
    weights = _last_weights(n, np.asarray(curvatures, dtype=float), workload)
    if strategy.is_independent:
        return np.square(weights).sum(axis=0)
    if strategy.toeplitz_coefs(n) is None:
        return np.square(strategy.noising_matrix(n).T @ weights).sum(axis=0)
    return np.square(fftconvolve(weights[::-1], _noising_coefs(strategy, n)[:, None], axes=0)[:n]).sum(axis=0)


def _noising_coefs(strategy: NoiseStrategy, n: int) -> np.ndarray:
    """First column of a Toeplitz B, (n,)."""
    return strategy.noising_rows(n - 1, n, n)[0][::-1]


def _last_weights(n: int, curvatures: np.ndarray, workload: Workload | None) -> np.ndarray:
    """Effect of the gradient of every step on the last iterate, (n, X), by the chain rule from the end."""
    momentum, sizes = 0.0, np.ones(n)
    if workload is not None:
        workload.check(n)
        decay = workload.decay
        momentum = float(decay[1]) if n > 1 else 0.0
        if not np.allclose(decay, decay[0] * momentum ** np.arange(n), rtol=0, atol=1e-9) or decay[0] != 1:
            raise DPConfigError(
                "The workload is not that of heavy-ball momentum, so what a quadratic makes of it is not known here. "
                "Use momentum_workload."
            )
        if workload.step_sizes is not None:
            sizes = np.asarray(workload.step_sizes) / max(workload.step_sizes)
    weights = np.empty((n, len(curvatures)))
    of_weight, of_buffer = np.ones(len(curvatures)), np.zeros(len(curvatures))
    for t in range(n - 1, -1, -1):
        weights[t] = of_buffer - sizes[t] * of_weight
        of_weight = of_weight + curvatures * weights[t]
        of_buffer = momentum * weights[t]
    return weights
