"""The best damping, of nu-DP-FTRL and of anti-PGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scipy.optimize import minimize_scalar

from hf_dpopt.noise.cache import cached
from hf_dpopt.noise.nu_dpftrl import DampedAntiPGD, NuDPFTRL
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.workloads import Workload

Damped = TypeVar("Damped", NuDPFTRL, DampedAntiPGD)


@cached
def optimize_nu(n: int, participation: Participation, workload: Workload | None = None) -> NuDPFTRL:
    """The damping of nu-DP-FTRL with the least mean error.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 4 (nu minimises the predicted error).
    """
    return _best(NuDPFTRL, n, participation, workload)


@cached
def optimize_damped(n: int, participation: Participation, workload: Workload | None = None) -> DampedAntiPGD:
    """The damping of anti-PGD with the least mean error: the best lambda = 1 - nu of DP-lambda-CGD.

    References:
        DP-lambda-CGD (2026), arXiv:2601.22334.
    """
    return _best(DampedAntiPGD, n, participation, workload)


def _best(
    family: Callable[[float], Damped], n: int, participation: Participation, workload: Workload | None
) -> Damped:
    """The optimum is flat: a factor 1.5 in nu costs about 2 %. A grid finds the valley, a line search its floor."""
    participation.check(n)

    def loss(log_nu: float) -> float:
        return family(float(np.exp(log_nu))).mean_loss(n, participation, workload)

    grid = np.linspace(np.log(1e-2 / n), 0.0, 13)
    lowest = int(np.argmin([loss(x) for x in grid]))
    around = (grid[max(0, lowest - 1)], grid[min(len(grid) - 1, lowest + 1)])
    found = family(float(np.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 3e-3}).x)))
    return min(found, family(0.0), family(1.0), key=lambda s: s.mean_loss(n, participation, workload))
