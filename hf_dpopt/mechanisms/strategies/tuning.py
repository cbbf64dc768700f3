"""Strategies tuned for a run: least error of the iterates per unit of privacy.

Every function minimises ``sensitivity * rms error`` for given steps n, participation and workload; none looks at data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.signal import correlate, lfilter

from hf_dpopt.config import check_count
from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms.strategies.banded import BandedToeplitz
from hf_dpopt.mechanisms.strategies.base import lower_root
from hf_dpopt.mechanisms.strategies.blt import BufferedLinearToeplitz
from hf_dpopt.mechanisms.strategies.dense import DenseStrategy
from hf_dpopt.mechanisms.strategies.participation import Participation
from hf_dpopt.mechanisms.strategies.toeplitz import NuDPFTRL
from hf_dpopt.mechanisms.strategies.workloads import Workload

Error = Literal["mean", "max"]
DUALITY_GAP = 1e-5  # relative, of the mean square error


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
    found = NuDPFTRL(float(np.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 3e-3}).x)))
    return min(found, NuDPFTRL(0.0), NuDPFTRL(1.0), key=lambda s: s.mean_loss(n, participation, workload))


def _descend(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    bound: float | None = None,
    **options: float,
) -> np.ndarray:
    """Where L-BFGS ends; `loss` returns value and gradient."""
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-13, "gtol": 1e-9, **options}
    bounds = None if bound is None else [(-bound, bound)] * len(start)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x


# --- buffered linear Toeplitz ----------------------------------------------------------------------------------------


def optimize_blt(
    n: int,
    participation: Participation,
    num_buffers: int = 3,
    *,
    error: Error = "mean",
    workload: Workload | None = None,
) -> BufferedLinearToeplitz:
    """The buffers with the least error, over interlaced poles and zeros.

    L-BFGS over a parametrisation in which every point is interlaced, from several starts; with m buffers also from the
    optimum of m - 1, one of whose pairs is split.

    Args:
        n: steps.
        participation: k and b.
        num_buffers: m >= 1; more than 4 hardly ever help.
        error: "mean" or "max" over the iterates.
        workload: a Toeplitz one (no schedule); None for prefix sums.

    References:
        McMahan, Xu and Zhang (2024), arXiv:2408.08868, Section 5; arXiv:2504.21413 (interlacing).
    """
    check_count("num_buffers", num_buffers)
    participation.check(n)
    if workload is not None and workload.step_sizes is not None:
        raise DPConfigError("optimize_blt takes Toeplitz workloads: leave the schedule out, or tune nu for it.")
    objective = _BltObjective(n, participation, error, workload)
    starts = [np.log(n) * np.linspace(1, 0.15, num_buffers + 1)[:-1] + shift for shift in (0.0, -1.0)]
    candidates = [objective.minimize(_from_times(start)) for start in starts]
    if num_buffers > 1:
        fewer = optimize_blt(n, participation, num_buffers - 1, error=error, workload=workload)
        candidates += [objective.minimize(start) for start in _splits(fewer)]
    best = min(candidates, key=lambda x: objective(x)[0])
    falling = objective.interlaced(torch.tensor(best)).tolist()
    return BufferedLinearToeplitz(tuple(falling[0::2]), tuple(falling[1::2]))


class _BltObjective:
    """Log loss and its gradient, as a function of the logits of successive ratios of poles and zeros."""

    def __init__(self, n: int, participation: Participation, error: Error, workload: Workload | None):
        self._n, self._participation, self._error = n, participation, error
        self._powers = torch.arange(n - 1, dtype=torch.float64)
        self._impulse = None if workload is None else torch.tensor(workload.coefs, dtype=torch.float64)

    @staticmethod
    def interlaced(x: torch.Tensor) -> torch.Tensor:
        """pole_1 > zero_1 > pole_2 > .. in (0, 1), whatever x is; (2 m,)."""
        return torch.cumprod(torch.sigmoid(x.double()), dim=0)

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        falling = self.interlaced(free)
        poles, zeros = falling[0::2], falling[1::2]
        strategy, noising = self._decays(poles, zeros), self._decays(zeros, poles)
        total = torch.zeros(self._n, dtype=torch.float64)
        for j in range(self._participation.fits(self._n)):
            first = j * self._participation.min_sep
            total = total + torch.nn.functional.pad(strategy[: self._n - first], (first, 0))
        if self._impulse is None:
            summed = noising.cumsum(0)
        else:
            size = 2 * self._n
            summed = torch.fft.irfft(torch.fft.rfft(noising, size) * torch.fft.rfft(self._impulse, size), size)[
                : self._n
            ]
        errors = summed.square().cumsum(0)
        loss = total.square().sum().log() + (errors.mean() if self._error == "mean" else errors[-1]).log()
        loss.backward()
        assert free.grad is not None
        return 0.5 * loss.item(), 0.5 * free.grad.numpy()

    def _decays(self, rates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        among = rates[:, None] - rates[None, :] + torch.eye(len(rates), dtype=torch.float64)
        weights = (rates[:, None] - others[None, :]).prod(1) / among.prod(1)
        powers = torch.exp(self._powers[:, None] * rates.log()[None, :])
        return torch.cat([torch.ones(1, dtype=torch.float64), powers @ weights])

    def minimize(self, start: np.ndarray) -> np.ndarray:
        return _descend(self, start, bound=30.0)


def _logits_of(falling: np.ndarray) -> np.ndarray:
    ratios = np.clip(falling / np.concatenate([[1.0], falling[:-1]]), 1e-12, 1 - 1e-12)
    return np.log(ratios) - np.log1p(-ratios)


def _from_times(log_times: np.ndarray) -> np.ndarray:
    """A start whose poles decay over the given times, in steps, with a zero near each."""
    poles = np.sort(np.exp(-1 / np.exp(np.maximum(log_times, 0.1))))[::-1]
    zeros = poles * (1 - 0.5 * np.minimum(1, 4 * (1 - poles)))
    falling = np.stack([poles, zeros], axis=1).ravel()
    return _logits_of(np.minimum.accumulate(falling) * (1 - 1e-9) ** np.arange(len(falling)))


def _splits(blt: BufferedLinearToeplitz) -> list[np.ndarray]:
    """The same strategy with one more pole and zero, close together, at several places."""
    falling = [x for pair in zip(blt.poles, blt.zeros, strict=True) for x in pair]
    starts = []
    for place in (0.999 * falling[-1], 0.5 * falling[-1], 1 - 0.1 * (1 - falling[0])):
        more = sorted([*falling, place, 0.98 * place], reverse=True)
        starts.append(_logits_of(np.array(more)))
    return starts


# --- banded ----------------------------------------------------------------------------------------------------------


def optimize_banded(n: int, num_bands: int) -> BandedToeplitz:
    """The banded strategy with the least mean error of prefix sums for a record that never meets two of its columns.

    Good for every participation with ``min_sep >= num_bands``: the sensitivity is then that of one participation times
    the root of their number.

    Args:
        n: steps.
        num_bands: p, at most n.

    References:
        McKenna (2024), arXiv:2405.15913, Section 4.
    """
    check_count("num_bands", num_bands)
    if num_bands > n:
        raise DPConfigError(f"num_bands={num_bands} is more than the {n} steps. Use at most {n}.")
    unit, remaining = np.zeros(n), np.arange(n, 0, -1) / n
    unit[0] = 1.0

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        coefs = np.concatenate([[1.0], free])
        noising = lfilter([1.0], coefs, unit)
        summed = np.cumsum(noising)
        error = float(remaining @ summed**2)
        if not np.isfinite(error):
            return 1e30, np.zeros_like(free)
        of_noising = np.cumsum((2 * remaining * summed)[::-1])[::-1]
        adjoint = lfilter([1.0], coefs, of_noising[::-1])[::-1]
        of_coefs = -correlate(adjoint, noising, method="fft")[n - 1 : n - 1 + num_bands]
        norm = float(coefs @ coefs)
        return np.log(error) + np.log(norm), (of_coefs / error + 2 * coefs / norm)[1:]

    start = NuDPFTRL(1 / num_bands**2).strategy_coefs(num_bands)[1:]
    if num_bands > 1:
        start = _descend(loss, start)
    return BandedToeplitz((1.0, *start))


# --- dense -----------------------------------------------------------------------------------------------------------


def optimize_dense(n: int, participation: Participation, workload: Workload | None = None) -> DenseStrategy:
    """The matrix with the least mean error.

    One participation: a fixed point, certified by its dual value. Several under "fixed_epoch": the columns that one
    record meets are scaled to sensitivity 1 together. Several under "min_sep": b bands and columns of norm 1, so that
    a record meets orthogonal columns. The last two by L-BFGS, in a minute at n = 512.

    References:
        Denisov et al. (2022), arXiv:2202.08312, Theorem 3.2; Choquette-Choo et al., arXiv:2211.06530
        (2023) and arXiv:2306.08153 (2023).
    """
    participation.check(n)
    queries = np.tril(np.ones((n, n))) if workload is None else workload.matrix()
    if participation.max_participations == 1:
        return _dense_single(queries)
    if participation.kind == "min_sep":
        bands = min(participation.min_sep, n)
        scale: Callable[[torch.Tensor], torch.Tensor] = _unit_columns
    else:
        bands, scale = n, lambda matrix: _unit_epochs(matrix, participation)
    return _dense_by_gradient(queries, bands, scale)


def _dense_single(queries: np.ndarray) -> DenseStrategy:
    gram = queries.T @ queries
    dual = np.diag(gram).copy() ** 0.5
    for _ in range(1000):
        root = np.sqrt(dual)
        values, vectors = np.linalg.eigh(root[:, None] * gram * root[None, :])
        square_root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        diagonal = np.diag(square_root).copy()
        # error of the matrix below, its columns scaled to norm 1, less the dual value, which no error is below
        gap = diagonal.sum() * (diagonal / dual).max() - (2 * diagonal.sum() - dual.sum())
        if gap <= DUALITY_GAP * diagonal.sum():
            break
        dual = diagonal
    privacy = square_root / root[:, None] / root[None, :]
    privacy /= np.sqrt(np.outer(np.diag(privacy), np.diag(privacy)))  # columns of norm exactly 1
    return DenseStrategy(lower_root(privacy))


def _unit_columns(matrix: torch.Tensor) -> torch.Tensor:
    return matrix / matrix.norm(dim=0)


def _unit_epochs(matrix: torch.Tensor, participation: Participation) -> torch.Tensor:
    n, b = len(matrix), participation.min_sep
    scaled = matrix.clone()
    for offset in range(min(b, n)):
        steps = torch.arange(offset, n, b)[: participation.max_participations]
        together = (matrix[:, steps].T @ matrix[:, steps]).abs().sum().sqrt()
        scaled[:, offset::b] = matrix[:, offset::b] / together
    return scaled


def _dense_by_gradient(
    queries: np.ndarray, bands: int, scale: Callable[[torch.Tensor], torch.Tensor]
) -> DenseStrategy:
    n = len(queries)
    step = torch.arange(n)
    inside = (step[:, None] >= step[None, :]) & (step[:, None] - step[None, :] < bands)
    wanted = torch.tensor(queries)

    def matrix_of(free: torch.Tensor) -> torch.Tensor:
        return scale(torch.zeros(n, n, dtype=torch.float64).masked_scatter(inside, free))

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        # A C^-1, solved from the right
        noise = torch.linalg.solve_triangular(matrix_of(free), wanted, upper=False, left=False)
        value = noise.square().sum().log()
        value.backward()
        assert free.grad is not None
        return value.item(), free.grad.numpy()

    start = torch.tensor(NuDPFTRL(1 / bands).strategy_matrix(n))[inside].numpy()
    found = _descend(loss, start, maxiter=400, maxfun=500, ftol=1e-10, maxcor=20)
    matrix = matrix_of(torch.tensor(found)).numpy()
    return DenseStrategy(matrix * np.sign(np.diag(matrix)))
