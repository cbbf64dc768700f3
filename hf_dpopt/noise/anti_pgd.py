"""Damped anti-PGD (DP-lambda-CGD): ``B(z) = 1 - (1 - nu) z``, z the delay of one step; ``1 - z`` without damping."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from hf_dpopt.noise.nu_dpftrl import check_nu
from hf_dpopt.noise.objective import best_damping
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.workloads import Workload


@dataclasses.dataclass(frozen=True)
class DampedAntiPGD(ToeplitzStrategy):
    """Every step takes back ``1 - nu`` of the noise of the one before; DP-lambda-CGD with ``lambda = 1 - nu``.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 2 and Table 2; DP-lambda-CGD (2026), arXiv:2601.22334.
    """

    nu: float
    name: ClassVar[str] = "damped_anti_pgd"
    default_backend: ClassVar[str] = "regenerate"  # of one draw

    def __post_init__(self) -> None:
        check_nu(self.nu)
        object.__setattr__(self, "nu", float(self.nu))

    def strategy_coefs(self, n: int) -> np.ndarray:
        return (1 - self.nu) ** np.arange(n)

    def noising_coefs(self, n: int) -> np.ndarray:
        coefs = np.zeros(n)
        coefs[0] = 1.0
        coefs[1:2] = self.nu - 1
        return coefs


def AntiPGD() -> DampedAntiPGD:
    """Every step takes back the noise of the one before: no noise adds up, and the sensitivity is the root of n."""
    return DampedAntiPGD(0.0)


def optimize_damped(n: int, participation: Participation, workload: Workload | None = None) -> DampedAntiPGD:
    """The damping of anti-PGD with the least mean error: the best lambda = 1 - nu of DP-lambda-CGD.

    References:
        DP-lambda-CGD (2026), arXiv:2601.22334.
    """
    return best_damping(DampedAntiPGD, n, participation, workload)


@register(
    "anti_pgd",
    sampler="fixed_order",
    summary="damped anti-PGD (DP-lambda-CGD): one draw more a step",
    max_steps=10**6,
    compared_with=("fixed_order",),
)
def tune_anti_pgd(setting: Setting, nu: float | None = None) -> NoiseStrategy:
    """The best damping, or the given one."""
    if nu is not None:
        return DampedAntiPGD(nu)
    return optimize_damped(setting.num_steps, setting.participation, setting.workload)
