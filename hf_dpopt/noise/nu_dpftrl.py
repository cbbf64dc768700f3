"""The family of nu-DP-FTRL and its relatives with closed-form coefficients.

Generating functions, with z the delay of one step: ``B(z) = 1`` (independent noise), ``1 - z`` (anti-PGD),
``1 - (1 - nu) z`` (damped) and ``(1 - (1 - nu) z)^(1/2)`` (nu-DP-FTRL).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.strategy import ToeplitzStrategy


def _check_nu(nu: float) -> None:
    if not 0 <= nu <= 1:
        raise DPConfigError(f"nu={nu} is outside [0, 1]. 0 is optimal continual counting, 1 is independent noise.")


def _unit(n: int) -> np.ndarray:
    coefs = np.zeros(n)
    coefs[0] = 1.0
    return coefs


@dataclasses.dataclass(frozen=True)
class IdentityStrategy(ToeplitzStrategy):
    """Independent noise, as in DP-SGD."""

    name: ClassVar[str] = "identity"

    @property
    def num_bands(self) -> int | None:
        return 1

    def strategy_coefs(self, n: int) -> np.ndarray:
        return _unit(n)

    def noising_coefs(self, n: int) -> np.ndarray:
        return _unit(n)


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

    def __post_init__(self) -> None:
        _check_nu(self.nu)
        object.__setattr__(self, "nu", float(self.nu))

    def strategy_coefs(self, n: int) -> np.ndarray:
        t = np.arange(1, n)
        return np.cumprod(np.concatenate([[1.0], (1 - self.nu) * (2 * t - 1) / (2 * t)]))

    def noising_coefs(self, n: int) -> np.ndarray:
        t = np.arange(1, n)
        return np.cumprod(np.concatenate([[1.0], (1 - self.nu) * (2 * t - 3) / (2 * t)]))


def OptimalCC() -> NuDPFTRL:
    """Optimal continual counting: nu-DP-FTRL without damping."""
    return NuDPFTRL(0.0)


@dataclasses.dataclass(frozen=True)
class DampedAntiPGD(ToeplitzStrategy):
    """Every step takes back ``1 - nu`` of the noise of the one before; DP-lambda-CGD with ``lambda = 1 - nu``.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 2 and Table 2; DP-lambda-CGD (2026), arXiv:2601.22334.
    """

    nu: float
    name: ClassVar[str] = "damped_anti_pgd"

    def __post_init__(self) -> None:
        _check_nu(self.nu)
        object.__setattr__(self, "nu", float(self.nu))

    def strategy_coefs(self, n: int) -> np.ndarray:
        return (1 - self.nu) ** np.arange(n)

    def noising_coefs(self, n: int) -> np.ndarray:
        coefs = _unit(n)
        coefs[1:2] = self.nu - 1
        return coefs


def AntiPGD() -> DampedAntiPGD:
    """Every step takes back the noise of the one before: no noise adds up, and the sensitivity is the root of n."""
    return DampedAntiPGD(0.0)


def LambdaCGD(lambda_: float) -> DampedAntiPGD:
    """DP-lambda-CGD under its own parameter."""
    return DampedAntiPGD(1 - lambda_)
