"""What an optimizer makes of the noise: the linear map from the gradients of a run to its iterates.

A strategy is tuned for a workload; its privacy does not depend on it. n = steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.linalg import toeplitz

from hf_dpopt.errors import DPConfigError


@dataclasses.dataclass(frozen=True)
class Workload:
    """A lower-triangular matrix A, (n, n): row t maps the gradients of all steps to the iterate after step t.

    Args:
        coefs: first column where A is Toeplitz, (n,); unitless.
        step_sizes: learning rates relative to the largest; every column of A is that of `coefs` times its own, (n,).
            None: all one, and A is Toeplitz.
    """

    coefs: tuple[float, ...]
    step_sizes: tuple[float, ...] | None = None

    @property
    def n(self) -> int:
        return len(self.coefs)

    def matrix(self) -> np.ndarray:
        """A, (n, n)."""
        if self.step_sizes is None:
            return np.tril(toeplitz(self.coefs))
        # the momentum buffer of step j decays to coefs[j - s]; the iterate adds up step_sizes[j] times it
        impulse = np.asarray(self.coefs)
        decay = np.diff(impulse, prepend=0.0)
        return np.tril(np.cumsum(np.asarray(self.step_sizes)[:, None] * np.tril(toeplitz(decay)), axis=0))


def prefix_sum_workload(n: int) -> Workload:
    """Plain SGD with a constant learning rate: iterates are prefix sums of gradients."""
    return Workload((1.0,) * n)


def momentum_workload(n: int, momentum: float, step_sizes: Sequence[float] | None = None) -> Workload:
    """SGD with heavy-ball momentum: ``A[t, s] = sum_{j=s}^{t} step_sizes[j] momentum^{j-s}``.

    Also the proxy for AdamW, whose first moment is such an average with ``momentum = beta_1``; the factor
    ``1 - beta_1`` scales every error alike.

    Args:
        n: steps.
        momentum: in [0, 1).
        step_sizes: learning rates, (n,), in any unit; None for a constant one.

    Raises:
        DPConfigError: for a momentum outside [0, 1), or step sizes that are not n finite numbers >= 0.
    """
    if not 0 <= momentum < 1:
        raise DPConfigError(f"momentum={momentum} is outside [0, 1).")
    impulse = np.cumsum(momentum ** np.arange(n))
    if step_sizes is None:
        return Workload(tuple(impulse.tolist()))
    sizes = np.asarray(step_sizes, dtype=float)
    if sizes.shape != (n,) or not np.isfinite(sizes).all() or (sizes < 0).any() or not sizes.any():
        raise DPConfigError(f"step_sizes are not {n} finite numbers >= 0. Give the learning rate of every step.")
    return Workload(tuple(impulse.tolist()), tuple(sizes.tolist()))


def linear_cooldown(n: int, num_cooldown: int, final: float = 0.05) -> list[float]:
    """Relative learning rates: 1, then linear down to `final` over the last steps (the seed paper's schedule)."""
    return [*np.ones(n - num_cooldown).tolist(), *np.linspace(1.0, final, num_cooldown).tolist()]
