"""nu-DP-FTRL: correlations that forget at a rate nu, ``B(z) = (1 - (1 - nu) z)^(1/2)``, z the delay of one step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np
from scipy.optimize import minimize_scalar

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.blt import fit_blt
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.workloads import Workload

DEFAULT_BUFFERS = 6


@dataclasses.dataclass(frozen=True)
class NuDPFTRL(ToeplitzStrategy):
    """nu-DP-FTRL: the optimal correlations for a quadratic loss, ``C(z) = (1 - (1 - nu) z)^(-1/2)``.

    Args:
        nu: damping, in [0, 1]; near learning rate times smallest curvature. See `optimize_nu`.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771 (nu-DP-FTRL); Fichtenberger, Henzinger and Upadhyay (2022),
        arXiv:2202.11205 (nu = 0).
    """

    nu: float
    name: ClassVar[str] = "nu_dpftrl"
    default_backend: ClassVar[str] = "regenerate"

    def __post_init__(self) -> None:
        if not 0 <= self.nu <= 1:
            raise DPConfigError(
                f"nu={self.nu} is outside [0, 1]. 0 is optimal continual counting, 1 is independent noise."
            )
        object.__setattr__(self, "nu", float(self.nu))

    def strategy_coefs(self, n: int) -> np.ndarray:
        t = np.arange(1, n)
        return np.cumprod(np.concatenate([[1.0], (1 - self.nu) * (2 * t - 1) / (2 * t)]))

    def noising_coefs(self, n: int) -> np.ndarray:
        t = np.arange(1, n)
        return np.cumprod(np.concatenate([[1.0], (1 - self.nu) * (2 * t - 3) / (2 * t)]))


def optimize_nu(n: int, participation: Participation, workload: Workload | None = None) -> NuDPFTRL:
    """The damping of nu-DP-FTRL with the least mean error.

    The optimum is flat: a factor 1.5 in nu costs about 2 %. A grid finds the valley, a line search its floor.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 4 (nu minimises the predicted error).
    """
    participation.check(n)

    def loss(log_nu: float) -> float:
        return NuDPFTRL(float(np.exp(log_nu))).mean_loss(n, participation, workload)

    grid = np.linspace(np.log(1e-2 / n), 0.0, 13)
    lowest = int(np.argmin([loss(x) for x in grid]))
    around = (grid[max(0, lowest - 1)], grid[min(len(grid) - 1, lowest + 1)])
    found = float(np.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 3e-3}).x))
    return min(map(NuDPFTRL, (found, 0.0, 1.0)), key=lambda s: s.mean_loss(n, participation, workload))


@register(
    "nu_dpftrl",
    sampler="fixed_order",
    summary="nu-DP-FTRL in buffers; for runs of any length",
    max_steps=10**6,
    compared_with=("fixed_order", "balls_in_bins"),
)
def tune_nu_dpftrl(
    setting: Setting, nu: float | None = None, num_buffers: int | Literal["auto"] | None = "auto"
) -> NoiseStrategy:
    """The best damping, its coefficients fitted by buffers.

    Args:
        setting: the run.
        nu: damping, in [0, 1]; None for the best.
        num_buffers: buffers of the fit; None for the exact coefficients, which a backend that keeps or draws again the
            noise of earlier steps asks for.
    """
    if num_buffers == "auto":
        num_buffers = DEFAULT_BUFFERS if setting.backend == "auto" else None
    exact = NuDPFTRL(nu) if nu is not None else optimize_nu(setting.num_steps, setting.participation, setting.workload)
    if num_buffers is None or exact.nu == 1:
        return exact
    return fit_blt(exact.nu, num_buffers, num_steps=setting.num_steps)
