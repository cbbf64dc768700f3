"""Buffered linear Toeplitz: coefficients that are sums of m decays, so that m buffers make the noise.

``C(z) = prod_i (1 - zeros_i z) / (1 - poles_i z)``; for interlaced poles and zeros its coefficients are non-negative
and do not increase, whatever the values.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import ToeplitzStrategy


@dataclasses.dataclass(frozen=True)
class BufferedLinearToeplitz(ToeplitzStrategy):
    """A strategy of m buffers.

    Args:
        poles: decays of C, theta_1 > theta_2 > .., in (0, 1); (m,).
        zeros: decays of its inverse, interlaced: theta_1 > zeros_1 > theta_2 > .. > zeros_m > 0; (m,).

    Raises:
        DPConfigError: if they are not interlaced.

    References:
        Dvijotham et al. (2024), arXiv:2404.16706; McMahan, Xu and Zhang (2024), arXiv:2408.08868; the inverse:
        arXiv:2504.21413.
    """

    poles: tuple[float, ...]
    zeros: tuple[float, ...]
    name: ClassVar[str] = "blt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "poles", tuple(map(float, self.poles)))
        object.__setattr__(self, "zeros", tuple(map(float, self.zeros)))
        interlaced = [x for pair in zip(self.poles, self.zeros, strict=False) for x in pair]
        falls = all(a > b for a, b in zip([1.0, *interlaced], [*interlaced, 0.0], strict=True))
        if len(self.poles) != len(self.zeros) or not falls:
            raise DPConfigError(
                f"poles {self.poles} and zeros {self.zeros} are not interlaced: 1 > pole_1 > zero_1 > pole_2 > .. > 0 "
                "with as many of each. optimize_blt finds good ones."
            )

    def strategy_coefs(self, n: int) -> np.ndarray:
        return decays(self.poles, self.output_scale, n)

    def noising_coefs(self, n: int) -> np.ndarray:
        return decays(self.zeros, self.noising_scale, n)

    def sensitivity(self, n: int, participation: Participation) -> float:
        """Exact, in closed form: O(k m^2), whatever n is.

        The theorem of `sensitivity.toeplitz_sensitivity` needs ``r(L, N) = sum_{s < N} c_s c_{s + L}`` for the lags L
        between participations and the steps N that the later one leaves. The sums over s are geometric.
        """
        rates, scale = np.log(self.poles), self.output_scale
        k, b = participation.fits(n), participation.min_sep
        both = rates[:, None] + rates[None, :]
        # expm1: decays near 1 leave little of 1 - theta_p theta_q
        left = np.arange(n, n - k * b, -b)[:, None, None]  # steps from each participation on
        sums = np.expm1((left - 1) * both) / np.expm1(both) * np.outer(scale, scale)  # of s >= 1, for every p and q
        of_later = np.cumsum(sums[::-1], axis=0)[::-1]  # entry l: of all pairs that are l participations apart
        apart = np.arange(1, k)[:, None] * b
        pairs = (k - np.arange(1, k)) @ (np.exp((apart - 1) * rates) @ scale)  # s = 0
        pairs += np.einsum("lpq,lq->", of_later[1:], np.exp(apart * rates))
        return float(np.sqrt(k + of_later[0].sum() + 2 * pairs))

    @property
    def output_scale(self) -> np.ndarray:
        """omega of C: ``c_t = sum_i omega_i theta_i^(t-1)``; all positive."""
        return residues(np.array(self.poles), np.array(self.zeros))

    @property
    def noising_scale(self) -> np.ndarray:
        """The same of B; all negative."""
        return residues(np.array(self.zeros), np.array(self.poles))

    def damped(self, nu: float) -> BufferedLinearToeplitz:
        """With every coefficient c_t multiplied by ``(1 - nu)^t``."""
        return BufferedLinearToeplitz(
            tuple((1 - nu) * np.array(self.poles)), tuple((1 - nu) * np.array(self.zeros))
        )  # fmt: skip


def residues(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Weights of the decays in ``prod (1 - zeros z) / prod (1 - poles z) = 1 + sum_t z^t sum_i w_i poles_i^(t-1)``."""
    among = poles[:, None] - poles[None, :]
    np.fill_diagonal(among, 1.0)
    return (poles[:, None] - zeros[None, :]).prod(axis=1) / among.prod(axis=1)


def decays(rates: tuple[float, ...], scale: np.ndarray, n: int) -> np.ndarray:
    powers = np.array(rates)[None, :] ** np.arange(n - 1)[:, None]
    return np.concatenate([[1.0], powers @ scale])
