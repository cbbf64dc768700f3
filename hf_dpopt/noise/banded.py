"""Toeplitz strategies with few coefficients: of C (banded) or of its inverse (banded inverse)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import sensitivity
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy, inverse_coefs


def _check_coefs(coefs: tuple[float, ...], what: str) -> None:
    if len(coefs) < 1 or not np.isfinite(coefs).all() or coefs[0] == 0:
        raise DPConfigError(f"{what} need at least one coefficient, all finite, the first not 0; got {coefs!r:.60}.")


def _padded(coefs: tuple[float, ...], n: int) -> np.ndarray:
    out = np.zeros(n)
    out[: len(coefs)] = coefs[:n]
    return out


@dataclasses.dataclass(frozen=True)
class BandedToeplitz(ToeplitzStrategy):
    """C with p bands. A record that comes back after p steps or later meets orthogonal columns.

    Args:
        coefs: c_0 .. c_{p-1}; see `optimize_banded`.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153; McKenna (2024), arXiv:2405.15913.
    """

    coefs: tuple[float, ...]
    name: ClassVar[str] = "banded"

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefs", tuple(map(float, self.coefs)))
        _check_coefs(self.coefs, "bands")

    @property
    def num_bands(self) -> int | None:
        return len(self.coefs)

    def strategy_coefs(self, n: int) -> np.ndarray:
        return _padded(self.coefs, n)

    def noising_coefs(self, n: int) -> np.ndarray:
        return inverse_coefs(self.strategy_coefs(n))


@dataclasses.dataclass(frozen=True)
class ColumnNormalized(NoiseStrategy):
    """A banded strategy whose columns all have norm 1, for a run of exactly `num_steps` steps.

    The last columns of a Toeplitz matrix are cut short; without the normalisation they are given less noise than the
    sensitivity would allow.
    """

    base: BandedToeplitz
    num_steps: int
    name: ClassVar[str] = "banded_normalized"
    anytime: ClassVar[bool] = False

    @property
    def num_bands(self) -> int | None:
        return self.base.num_bands

    def _norms(self, n: int) -> np.ndarray:
        if n > self.num_steps:
            raise DPConfigError(f"this strategy is for {self.num_steps} steps, not {n}. Make one for {n} steps.")
        return np.sqrt(np.cumsum(self.base.strategy_coefs(self.num_steps) ** 2))[::-1][:n]

    def column_norms(self) -> np.ndarray:
        """L2 norms of the columns of the base, by which the rows of B are multiplied, (num_steps,)."""
        return self._norms(self.num_steps)

    def strategy_matrix(self, n: int) -> np.ndarray:
        return self.base.strategy_matrix(n) / self._norms(n)

    def noising_matrix(self, n: int) -> np.ndarray:
        return self._norms(n)[:, None] * self.base.noising_matrix(n)

    def sensitivity(self, n: int, participation: Participation) -> float:
        matrix = self.strategy_matrix(n)
        if len(self.base.coefs) <= participation.min_sep or participation.fits(n) == 1:
            return sensitivity.banded_sensitivity(np.linalg.norm(matrix, axis=0), participation)
        return sensitivity.gram_sensitivity(matrix.T @ matrix, participation)


@dataclasses.dataclass(frozen=True)
class BandedInverse(ToeplitzStrategy):
    """B with p bands: the noise of a step is a combination of the last p draws, which can be drawn again.

    Args:
        coefs: beta_0 .. beta_{p-1}; `BandedInverse.of_nu` truncates those of nu-DP-FTRL.

    References:
        Kalinin et al. (2025), arXiv:2505.12128 (banded inverse square root: nu = 0).
    """

    coefs: tuple[float, ...]
    name: ClassVar[str] = "banded_inverse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefs", tuple(map(float, self.coefs)))
        _check_coefs(self.coefs, "inverse bands")

    @classmethod
    def of_nu(cls, num_bands: int, nu: float = 0.0) -> BandedInverse:
        """The first coefficients of nu-DP-FTRL's B; BISR for nu = 0."""
        return cls(tuple(NuDPFTRL(nu).noising_coefs(num_bands)))

    def strategy_coefs(self, n: int) -> np.ndarray:
        return inverse_coefs(self.noising_coefs(n))

    def noising_coefs(self, n: int) -> np.ndarray:
        return _padded(self.coefs, n)
