"""Banded Toeplitz C: noise that amplification by sampling goes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from scipy.signal import correlate, lfilter

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation, squared_sensitivity
from hf_dpopt.noise.strategy import ToeplitzStrategy
from hf_dpopt.noise.workloads import Workload, descend, squared_error

DEFAULT_BANDS = 16  # in a fixed order, where more bands are better but each keeps a copy of the gradient
LARGEST = 1e15  # noise beyond it belongs to a C whose inverse grows without bound; a step of the search went too far


def check_coefs(coefs: tuple[float, ...], what: str) -> None:
    """Refuse coefficients that no inverse has."""
    if len(coefs) < 1 or not np.isfinite(coefs).all() or coefs[0] == 0:
        raise DPConfigError(f"{what} need at least one coefficient, all finite, the first not 0; got {coefs!r:.60}.")


def padded(coefs: tuple[float, ...], n: int) -> np.ndarray:
    """The first n coefficients, with zeros behind the last."""
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
        check_coefs(self.coefs, "bands")

    @property
    def num_bands(self) -> int | None:
        return len(self.coefs)

    def strategy_coefs(self, n: int) -> np.ndarray:
        return padded(self.coefs, n)


# --- tuning ----------------------------------------------------------------------------------------------------------


def optimize_banded(
    n: int, num_bands: int, participation: Participation | None = None, workload: Workload | None = None
) -> BandedToeplitz:
    """The banded strategy with the least mean error.

    Without a participation: for a record that never meets two of its columns, which is good for every participation
    with ``min_sep >= num_bands``. With one: for its sensitivity. Where a record meets columns that overlap, or that
    the end of the run cuts short, the search is among coefficients that are non-negative and do not increase, whose
    sensitivity is known exactly. There, bands beyond `min_sep` were never found to help.

    Args:
        n: steps.
        num_bands: p, at most n. Bands that the search ends up without are left out.
        participation: k and b; None for one participation.
        workload: linear map of n steps; None for prefix sums. A schedule takes n^2 numbers of memory.

    References:
        McKenna (2024), arXiv:2405.15913, Section 4; Kalinin and Lampert (2024), arXiv:2405.13763, Theorem 2.
    """
    check_count("num_bands", num_bands)
    if num_bands > n:
        raise DPConfigError(f"num_bands={num_bands} is more than the {n} steps. Use at most {n}.")
    objective = _BandedObjective(n, workload)
    found = [objective.for_one_participation(num_bands)]
    if participation is not None:
        participation.check(n)
        k, b = participation.max_participations, participation.min_sep
        if num_bands > b:
            orthogonal = objective.for_one_participation(b)
            found.append(np.concatenate([orthogonal, np.zeros(num_bands - b)]))
        if k > 1 and (num_bands > b or (k - 1) * b + num_bands > n):
            found += [objective.monotone(participation, start) for start in found]
    strategies = [BandedToeplitz(tuple(np.trim_zeros(coefs / coefs[0], "b"))) for coefs in found]
    once = participation or Participation()
    return min(strategies, key=lambda strategy: strategy.mean_loss(n, once, workload))


class _BandedObjective:
    """Log loss and its gradient, as a function of the first coefficients of C."""

    def __init__(self, n: int, workload: Workload | None):
        self._n, self._error = n, squared_error(n, workload)
        self._unit = np.zeros(n)
        self._unit[0] = 1.0

    def for_one_participation(self, num_bands: int) -> np.ndarray:
        """The best coefficients of any sign, the first of them 1."""

        def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
            coefs = np.concatenate([[1.0], free])
            value, slope = self._log_error(coefs)
            norm = float(coefs @ coefs)
            return value + np.log(norm), (slope + 2 * coefs / norm)[1:]

        start = NuDPFTRL(1 / num_bands**2).strategy_coefs(num_bands)[1:]
        return np.concatenate([[1.0], descend(loss, start) if num_bands > 1 else start])

    def monotone(self, participation: Participation, start: np.ndarray) -> np.ndarray:
        """The best non-negative, non-increasing coefficients near a start: sums of falls that are >= 0."""
        padded = np.zeros(self._n)

        def loss(falls: np.ndarray) -> tuple[float, np.ndarray]:
            coefs = falls[::-1].cumsum()[::-1]
            value, slope = self._log_error(coefs)
            padded[: len(coefs)] = coefs
            square, of_square = squared_sensitivity(padded, participation)
            return value + np.log(square), np.cumsum(slope + of_square[: len(coefs)] / square)

        coefs = np.minimum.accumulate(np.maximum(start, 0.0))
        falls = descend(loss, coefs - np.append(coefs[1:], 0.0), bounds=(0.0, None))
        return falls[::-1].cumsum()[::-1]

    def _log_error(self, coefs: np.ndarray) -> tuple[float, np.ndarray]:
        noising = lfilter([1.0], coefs, self._unit)
        if not np.abs(noising).max() < LARGEST:
            return np.log(LARGEST) * 2, np.zeros_like(coefs)
        error, of_noising = self._error(noising)
        adjoint = lfilter([1.0], coefs, of_noising[::-1])[::-1]
        of_coefs = -correlate(adjoint, noising, method="fft")[self._n - 1 : self._n - 1 + len(coefs)]
        return np.log(error), of_coefs / error


def choose_num_bands(
    n: int, most: int, noise_multiplier_of: Callable[[int], float], workload: Workload | None = None
) -> int:
    """The number of bands with the least error of the iterates where bands cost amplification.

    Args:
        n: steps.
        most: largest number of bands; it and the powers of two below it are looked through.
        noise_multiplier_of: noise stddev that so many bands need, for columns of norm 1.
        workload: linear map of n steps; None for prefix sums.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153, Section 5.
    """
    check_count("most", most)

    def error(num_bands: int) -> float:
        strategy = optimize_banded(n, num_bands, workload=workload)
        return noise_multiplier_of(num_bands) * strategy.mean_loss(n, Participation(), workload)

    return min({2**i for i in range(int(most).bit_length())} | {int(most)}, key=error)


def _num_bands_of(options: Mapping[str, Any]) -> int | None:
    """Bands that the options ask for; None if they leave it open."""
    coefs = options.get("coefs")
    if coefs is None:
        return options.get("num_bands")
    if not isinstance(coefs, Sequence) or isinstance(coefs, str):
        raise DPConfigError(f"coefs={coefs!r} is no list of bands. Use noise_kwargs={{'coefs': [1.0, 0.5]}}.")
    return len(coefs)


@register(
    "banded",
    sampler="cyclic_poisson",
    summary="banded Toeplitz with amplification by sampling",
    compared_with=("cyclic_poisson",),
    num_bands_of=_num_bands_of,
)
def tune_banded(
    setting: Setting, num_bands: int | None = None, coefs: Sequence[float] | None = None
) -> BandedToeplitz:
    """The best bands, or the given ones.

    Args:
        setting: the run.
        num_bands: p; None for as many as the participations leave apart, 16 at most.
        coefs: c_0 .. c_{p-1}, not to be tuned.
    """
    if coefs is not None:
        return BandedToeplitz(tuple(coefs))
    most = min(setting.participation.min_sep, setting.num_steps)
    wanted = min(most, DEFAULT_BANDS) if num_bands is None else num_bands
    return optimize_banded(setting.num_steps, wanted, participation=setting.participation, workload=setting.workload)
