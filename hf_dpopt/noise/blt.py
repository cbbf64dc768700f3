"""Buffered linear Toeplitz: coefficients that are sums of m decays, so that m buffers make the noise.

``C(z) = prod_i (1 - zeros_i z) / (1 - poles_i z)``; for interlaced poles and zeros its coefficients are non-negative
and do not increase, whatever the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import least_squares
from scipy.special import expit

from hf_dpopt.common.checks import check_at_most, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation, squared_sensitivity
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, StreamCost
from hf_dpopt.noise.workloads import ErrorAndSlope, Workload, descend, squared_error
from hf_dpopt.randomness.source import NoiseSource

LOWEST_FREQUENCY = 0.1  # of a fit, in radians per run
MAX_BUFFERS = 16


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
                f"Poles {self.poles} and zeros {self.zeros} are not interlaced: 1 > pole_1 > zero_1 > pole_2 > .. > 0 "
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

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        if backend == "auto":
            return BufferedStream(self, source, **common)
        return super()._make_stream(source, backend, common)

    def cost(self, num_steps: int, *, backend: str = "auto") -> StreamCost:
        if backend == "auto":
            return StreamCost(1, 1 + 2 * len(self.poles), len(self.poles))
        return super().cost(num_steps, backend=backend)


def residues(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Weights of the decays in ``prod (1 - zeros z) / prod (1 - poles z) = 1 + sum_t z^t sum_i w_i poles_i^(t-1)``."""
    among = poles[:, None] - poles[None, :]
    np.fill_diagonal(among, 1.0)
    return (poles[:, None] - zeros[None, :]).prod(axis=1) / among.prod(axis=1)


def decays(rates: tuple[float, ...], scale: np.ndarray, n: int) -> np.ndarray:
    powers = np.array(rates)[None, :] ** np.arange(n - 1)[:, None]
    return np.concatenate([[1.0], powers @ scale])


class BufferedStream(CorrelatedStream):
    """Stream with m float32 buffers per tensor, decaying sums of the earlier draws; one draw and 2 m passes a step.

    ``x_t = z_t + sum_i w_i h_i`` and then ``h_i = zeros_i h_i + z_t`` (the direct form: it depends on the draws
    alone). McMahan, Xu and Zhang (2024), arXiv:2408.08868.
    """

    def __init__(self, strategy: BufferedLinearToeplitz, source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._decays, self._weights = list(strategy.zeros), strategy.noising_scale.tolist()
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        normal = self._normal(total, tensor, t)
        total.add_(normal, alpha=self.scale)
        if name not in self._buffers:
            self._buffers[name] = [normal.clone() for _ in self._decays]
            return
        for buffer, weight, decay in zip(self._buffers[name], self._weights, self._decays, strict=True):
            total.add_(buffer, alpha=self.scale * weight)
            torch.add(normal, buffer, alpha=decay, out=buffer)


# --- tuning ----------------------------------------------------------------------------------------------------------


def check_num_buffers(num_buffers: Any) -> None:
    """Refuse what is no number of buffers, and more than can be fitted: their equations are no longer solved."""
    check_count("num_buffers", num_buffers)
    check_at_most(
        "num_buffers", num_buffers, MAX_BUFFERS,
        "each is a copy of the gradient, and more than 4 hardly help. Use 3 or 4, or noise_mechanism='banded'.",
    )  # fmt: skip


def optimize_blt(
    n: int, participation: Participation, num_buffers: int = 3, *, workload: Workload | None = None
) -> BufferedLinearToeplitz:
    """The buffers with the least mean error, over interlaced poles and zeros.

    L-BFGS over a parametrisation in which every point is interlaced, from several starts; with m buffers also from the
    optimum of m - 1, one of whose pairs is split.

    Args:
        n: steps.
        participation: k and b.
        num_buffers: m >= 1; more than 4 hardly ever help.
        workload: linear map of n steps; None for prefix sums. A schedule takes n^2 numbers of memory.

    References:
        McMahan, Xu and Zhang (2024), arXiv:2408.08868, Section 5; arXiv:2504.21413 (interlacing).
    """
    check_num_buffers(num_buffers)
    participation.check(n)
    objective = _BltObjective(n, participation, squared_error(n, workload))
    best = np.empty(0)
    for m in range(1, num_buffers + 1):
        starts = [_from_times(np.log(n) * np.linspace(1, 0.15, m + 1)[:-1] + shift) for shift in (0.0, -1.0)]
        starts += _splits(objective.interlaced(torch.tensor(best)).tolist())
        candidates = [descend(objective, start, bounds=(-30.0, 30.0)) for start in starts]
        best = min(candidates, key=lambda x: objective(x)[0])
    falling = objective.interlaced(torch.tensor(best)).tolist()
    return BufferedLinearToeplitz(tuple(falling[0::2]), tuple(falling[1::2]))


class _BltObjective:
    """Log loss and its gradient, as a function of the logits of successive ratios of poles and zeros."""

    def __init__(self, n: int, participation: Participation, error: ErrorAndSlope):
        self._participation, self._error = participation, error
        self._powers = torch.arange(n - 1, dtype=torch.float64)

    @staticmethod
    def interlaced(x: torch.Tensor) -> torch.Tensor:
        """pole_1 > zero_1 > pole_2 > .. in (0, 1), whatever x is; (2 m,)."""
        return torch.cumprod(torch.sigmoid(x.double()), dim=0)

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        falling = self.interlaced(free)
        poles, zeros = falling[0::2], falling[1::2]
        strategy, noising = self._decays(poles, zeros), self._decays(zeros, poles)
        square, of_strategy = squared_sensitivity(strategy.detach().numpy(), self._participation)
        error, of_noising = self._error(noising.detach().numpy())
        slopes = [torch.tensor(of_strategy / square), torch.tensor(of_noising / error)]
        torch.autograd.backward([strategy, noising], slopes)
        assert free.grad is not None
        return 0.5 * float(np.log(square) + np.log(error)), 0.5 * free.grad.numpy()

    def _decays(self, rates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        among = rates[:, None] - rates[None, :] + torch.eye(len(rates), dtype=torch.float64)
        weights = (rates[:, None] - others[None, :]).prod(1) / among.prod(1)
        powers = torch.exp(self._powers[:, None] * rates.log()[None, :])
        return torch.cat([torch.ones(1, dtype=torch.float64), powers @ weights])


def _logits_of(falling: np.ndarray) -> np.ndarray:
    ratios = np.clip(falling / np.concatenate([[1.0], falling[:-1]]), 1e-12, 1 - 1e-12)
    return np.log(ratios) - np.log1p(-ratios)


def _from_times(log_times: np.ndarray) -> np.ndarray:
    """A start whose poles decay over the given times, in steps, with a zero near each."""
    poles = np.sort(np.exp(-1 / np.exp(np.maximum(log_times, 0.1))))[::-1]
    zeros = poles * (1 - 0.5 * np.minimum(1, 4 * (1 - poles)))
    falling = np.stack([poles, zeros], axis=1).ravel()
    return _logits_of(np.minimum.accumulate(falling) * (1 - 1e-9) ** np.arange(len(falling)))


def _splits(falling: list[float]) -> list[np.ndarray]:
    """The same strategy with one more pole and zero, close together, at several places; none for no strategy."""
    starts: list[np.ndarray] = []
    if not falling:
        return starts
    for place in (0.999 * falling[-1], 0.5 * falling[-1], 1 - 0.1 * (1 - falling[0])):
        more = sorted([*falling, place, 0.98 * place], reverse=True)
        starts.append(_logits_of(np.array(more)))
    return starts


def fit_blt(nu: float, num_buffers: int = 6, *, num_steps: int | None = None) -> BufferedLinearToeplitz:
    """The buffers whose coefficients are nearest to those of nu-DP-FTRL: its noise from m buffers, not from a history.

    Least squares between the logarithms of the two ``|C(exp(i w))|``, over interlaced poles and zeros, on 400
    frequencies between ``nu / 20`` and pi, evenly spaced in their logarithm. Sensitivity and error of what comes out
    are its own and exact; the fit decides about the loss alone: 0.1 % with 4 buffers, 0.01 % with 6, less with 8.

    Args:
        nu: damping, in [0, 1).
        num_buffers: m >= 1.
        num_steps: length of the run. Needed for nu = 0, which no buffers match for ever; with it, frequencies far
            below those of the run are left out, and more buffers are left for the others.

    Raises:
        DPConfigError: for nu = 1, independent noise, which needs no buffers; for nu = 0 without num_steps.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771 (nu-DP-FTRL); Dvijotham et al. (2024), arXiv:2404.16706 (the
        approximation of its square root by decays).
    """
    check_num_buffers(num_buffers)
    if not 0 <= nu < 1:
        raise DPConfigError(f"nu={nu} is outside [0, 1). 1 is independent noise and has no buffers: IdentityStrategy.")
    if num_steps is not None:
        check_count("num_steps", num_steps)
    elif nu == 0:
        raise DPConfigError("nu=0 never forgets, which buffers imitate up to some number of steps: give num_steps.")
    lowest = max(nu / 20, 0.0 if num_steps is None else LOWEST_FREQUENCY / num_steps)
    half_sine_squares = np.sin(np.geomspace(min(lowest, 1.0), np.pi, 400) / 2) ** 2

    def log_size(decay: np.ndarray | float) -> np.ndarray:  # of 1 - decay exp(-i w)
        return 0.5 * np.log((1 - decay) ** 2 + 4 * decay * half_sine_squares)

    wanted = -0.5 * log_size(1 - nu)
    signs = np.where(np.arange(2 * num_buffers) % 2, 1.0, -1.0)  # poles, zeros

    def misfit(x: np.ndarray) -> np.ndarray:
        return signs @ np.stack([log_size(decay) for decay in np.cumprod(expit(x))]) - wanted

    def slope(x: np.ndarray) -> np.ndarray:
        falling = np.cumprod(expit(x))[:, None]
        of_decays = (2 * half_sine_squares - (1 - falling)) / ((1 - falling) ** 2 + 4 * falling * half_sine_squares)
        of_logs = (signs[:, None] * of_decays * falling)[::-1].cumsum(axis=0)[::-1]  # a ratio moves all that follow
        return (of_logs * expit(-x)[:, None]).T

    # decay times from the lowest frequency to one step
    spread = np.geomspace(lowest, 1.0, 2 * num_buffers + 1)[:-1]
    start = _logits_of(np.exp(-np.maximum(spread, nu)) * (1 - nu) * 0.98 ** np.arange(2 * num_buffers))
    found = least_squares(misfit, start, slope, bounds=(-30, 30), x_scale="jac", ftol=1e-14, xtol=1e-12, gtol=1e-14)
    falling = np.cumprod(expit(found.x)).tolist()
    return BufferedLinearToeplitz(tuple(falling[0::2]), tuple(falling[1::2]))


@register(
    "blt",
    sampler="fixed_order",
    summary="buffered linear Toeplitz, 3 copies of the gradient",
    compared_with=("fixed_order",),
)
def tune_blt(
    setting: Setting,
    num_buffers: int = 3,
    poles: Sequence[float] | None = None,
    zeros: Sequence[float] | None = None,
) -> NoiseStrategy:
    """The best buffers, or those with the given decays.

    Args:
        setting: the run.
        num_buffers: m >= 1.
        poles, zeros: decays of C and of its inverse, (m,), not to be tuned.
    """
    if poles is not None or zeros is not None:
        return BufferedLinearToeplitz(tuple(poles or ()), tuple(zeros or ()))
    return optimize_blt(setting.num_steps, setting.participation, num_buffers, workload=setting.workload)
