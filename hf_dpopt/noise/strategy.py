"""What every noise strategy offers: its matrices, its sensitivity, and the error of its noise.

A strategy is a matrix C and a left inverse B of it. The noise of step t is row t of ``B Z`` with independent standard
normal rows of Z: the whole run is one Gaussian mechanism on ``C G``, whose sensitivity is that of C. Both are square
and lower-triangular but for trees, where C has a row for every node.

n = steps, t = step, 0-based.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import toeplitz
from scipy.signal import fftconvolve, lfilter

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import sensitivity
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.workloads import Workload, scheduled_errors


class NoiseStrategy(abc.ABC):
    """A pair (C, B) with ``B C = I``; for any number of steps if it is `anytime`. Equal parameters, equal strategy."""

    name: ClassVar[str]
    anytime: ClassVar[bool] = True  # the first t steps of a longer run are the run of t steps

    @property
    def num_bands(self) -> int | None:
        """p if entries of C more than p - 1 below the diagonal are zero, else None."""
        return None

    @abc.abstractmethod
    def strategy_matrix(self, n: int) -> np.ndarray:
        """C, (n, n) lower-triangular; (nodes, n) for a tree."""

    @abc.abstractmethod
    def noising_matrix(self, n: int) -> np.ndarray:
        """B, (n, n); (n, nodes) for a tree."""

    @abc.abstractmethod
    def sensitivity(self, n: int, participation: Participation) -> float:
        """Largest ``||C u||`` over the participation patterns; unitless; exact or an upper bound, never below."""

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        """Variance of every iterate per unit of noise variance: ``sum_s (A B)[t, s]^2``, (n,). None: prefix sums."""
        noising = self.noising_matrix(n)
        if workload is None:
            return np.square(np.cumsum(noising, axis=0)).sum(axis=1)
        workload.check(n)
        return np.square(workload.matrix() @ noising).sum(axis=1)

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        """``||B[t, :]||``: stddev of the noise of step t relative to that of its normals.

        Args:
            t: step.
            num_steps: of the run; needed where a step depends on it, that is, unless the strategy is anytime.
        """
        if num_steps is None and not self.anytime:
            raise DPConfigError(f"The noise of {self.name} depends on the steps of the run: give num_steps.")
        return float(np.linalg.norm(self.noising_matrix(num_steps or t + 1)[t]))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        """Rows first .. end - 1 of B without columns of zeros, (end - first, columns); arguments as for `row_norm`."""
        if num_steps is None and not self.anytime:
            raise DPConfigError(f"The noise of {self.name} depends on the steps of the run: give num_steps.")
        return self.noising_matrix(num_steps or end)[first:end]

    def mean_loss(self, n: int, participation: Participation, workload: Workload | None = None) -> float:
        """Root mean square error of the iterates at noise multiplier 1 and clip 1."""
        return self.sensitivity(n, participation) * float(np.sqrt(self.per_query_error(n, workload).mean()))

    def max_loss(self, n: int, participation: Participation, workload: Workload | None = None) -> float:
        """Root of the largest mean square error of an iterate at noise multiplier 1 and clip 1."""
        return self.sensitivity(n, participation) * float(np.sqrt(self.per_query_error(n, workload).max()))

    def parameters(self) -> dict[str, Any]:
        """Name and every number that fixes the strategy; JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def digest(self) -> str:
        """What a calibration, a stream and a checkpoint are bound to."""
        return hashlib.sha256(json.dumps(self.parameters(), sort_keys=True).encode()).hexdigest()


class ToeplitzStrategy(NoiseStrategy):
    """A strategy whose matrices are Toeplitz: two sequences of coefficients say all, for every n."""

    @abc.abstractmethod
    def strategy_coefs(self, n: int) -> np.ndarray:
        """First column of C, (n,)."""

    @abc.abstractmethod
    def noising_coefs(self, n: int) -> np.ndarray:
        """First column of B, (n,)."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        return np.tril(toeplitz(self.strategy_coefs(n)))

    def noising_matrix(self, n: int) -> np.ndarray:
        return np.tril(toeplitz(self.noising_coefs(n)))

    def sensitivity(self, n: int, participation: Participation) -> float:
        coefs, bands = self.strategy_coefs(n), self.num_bands
        if sensitivity.is_monotone(coefs):
            return sensitivity.toeplitz_sensitivity(coefs, participation)
        if participation.fits(n) == 1:
            return float(np.linalg.norm(coefs))
        if bands is not None and bands <= participation.min_sep:
            return sensitivity.banded_sensitivity(np.sqrt(np.cumsum(coefs**2))[::-1], participation)
        return sensitivity.toeplitz_sensitivity_bound(coefs, participation)

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        noising = self.noising_coefs(n)
        if workload is None:
            return np.cumsum(np.cumsum(noising) ** 2)
        workload.check(n)
        if workload.step_sizes is None:
            return np.cumsum(fftconvolve(workload.coefs, noising)[:n] ** 2)
        return scheduled_errors(fftconvolve(workload.decay, noising)[:n], np.asarray(workload.step_sizes))

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return float(np.linalg.norm(self.noising_coefs(t + 1)))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        coefs = np.concatenate([self.noising_coefs(end)[::-1], np.zeros(end - 1)])
        return np.stack([coefs[end - 1 - t : 2 * end - 1 - t] for t in range(first, end)])


def lower_root(gram: np.ndarray) -> np.ndarray:
    """The lower-triangular C with ``C^T C = gram``."""
    return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1].copy()


def inverse_coefs(coefs: np.ndarray) -> np.ndarray:
    """Coefficients of 1 / f(z) from those of f(z), (n,)."""
    unit = np.zeros(len(coefs))
    unit[0] = 1.0
    return lfilter([1.0], coefs, unit)
