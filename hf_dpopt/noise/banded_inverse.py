"""Banded B: noise that is made of the last p draws, which are drawn again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.banded import check_coefs, padded
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy, inverse_coefs

DEFAULT_INVERSE_BANDS = 64  # fewer are bad for long runs


@dataclasses.dataclass(frozen=True)
class BandedInverse(ToeplitzStrategy):
    """B with p bands: the noise of a step is a combination of the last p draws, which can be drawn again.

    Two bands are damped anti-PGD (DP-lambda-CGD), ``B(z) = 1 - (1 - nu) z``: a step takes back a part of the noise of
    the one before, all of it for nu = 0.

    Args:
        coefs: beta_0 .. beta_{p-1}; `BandedInverse.of_nu` truncates those of nu-DP-FTRL.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Table 2 (anti-PGD); DP-lambda-CGD (2026), arXiv:2601.22334.
        Kalinin et al. (2025), arXiv:2505.12128 (banded inverse square root: nu = 0).
    """

    coefs: tuple[float, ...]
    name: ClassVar[str] = "banded_inverse"
    default_backend: ClassVar[str] = "regenerate"  # of p draws

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefs", tuple(map(float, self.coefs)))
        check_coefs(self.coefs, "inverse bands")

    @classmethod
    def of_nu(cls, num_bands: int, nu: float = 0.0) -> BandedInverse:
        """The first coefficients of nu-DP-FTRL's B; BISR for nu = 0."""
        return cls(tuple(NuDPFTRL(nu).noising_coefs(num_bands)))

    def strategy_coefs(self, n: int) -> np.ndarray:
        return inverse_coefs(self.noising_coefs(n))

    def noising_coefs(self, n: int) -> np.ndarray:
        return padded(self.coefs, n)


@register("banded_inverse", sampler="fixed_order", summary="bands of the inverse, drawn again: no memory")
def tune_banded_inverse(
    setting: Setting, num_bands: int | None = None, nu: float = 0.0, coefs: Sequence[float] | None = None
) -> NoiseStrategy:
    """The first coefficients of nu-DP-FTRL's B, or the given ones.

    Args:
        setting: the run.
        num_bands: p; None for 64, or all steps of a shorter run.
        nu: damping of nu-DP-FTRL, in [0, 1].
        coefs: beta_0 .. beta_{p-1}, which leave the others without effect.
    """
    if coefs is not None:
        return BandedInverse(tuple(coefs))
    wanted = min(DEFAULT_INVERSE_BANDS, setting.num_steps) if num_bands is None else num_bands
    check_count("num_bands", wanted)
    if wanted > setting.num_steps:
        raise DPConfigError(
            f"num_bands={wanted} is more than the {setting.num_steps} steps. Use at most {setting.num_steps}."
        )
    return BandedInverse.of_nu(wanted, nu)
