"""Any lower-triangular C, and the best one for a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import sensitivity
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy, lower_root
from hf_dpopt.noise.workloads import Workload, descend

DUALITY_GAP = 1e-5  # relative, of the mean square error
BLURS = (3e-3, 3e-4, 3e-5)  # one after the other; the last costs less than 1e-5 of the loss

Scale = Callable[[torch.Tensor], torch.Tensor]
MAX_STEPS = 2048  # beyond them tuning takes too long


class DenseStrategy(NoiseStrategy):
    """A given matrix; for research, and for runs of up to about 2,000 steps.

    Args:
        matrix: C, (n, n), lower-triangular with a positive diagonal; copied.

    Raises:
        DPConfigError: if it is not of that form.

    References:
        Denisov et al. (2022), arXiv:2202.08312; Choquette-Choo et al. (2023), arXiv:2306.08153.
    """

    name: ClassVar[str] = "dense"
    anytime: ClassVar[bool] = False
    is_whole_in_json: ClassVar[bool] = False
    default_backend: ClassVar[str] = "regenerate"

    def __init__(self, matrix: np.ndarray):
        matrix = np.array(matrix, dtype=float) + 0.0  # -0.0 and 0.0 are one strategy
        is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not is_square or not np.isfinite(matrix).all() or np.triu(matrix, 1).any() or (np.diag(matrix) <= 0).any():
            raise DPConfigError(
                "A strategy matrix is square and lower-triangular, finite, with a positive diagonal; one of shape "
                f"{matrix.shape}, is not. Rotate others first: C' with C'^T C' = C^T C has the same privacy."
            )
        matrix.setflags(write=False)
        self._matrix = matrix
        lower = np.nonzero(np.abs(np.tril(matrix, -1)).max(axis=1, initial=0.0))[0]
        self._bands = 1 + max((int(i - np.nonzero(matrix[i])[0][0]) for i in lower), default=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseStrategy) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @property
    def num_bands(self) -> int | None:
        return self._bands

    @property
    def num_steps(self) -> int:
        """The only number of steps it is for, or fewer."""
        return len(self._matrix)

    def strategy_matrix(self, n: int) -> np.ndarray:
        if n > self.num_steps:
            raise DPConfigError(f"This strategy is for {self.num_steps} steps, not {n}. Make one for {n} steps.")
        return self._matrix[:n, :n]

    def sensitivity(self, n: int, participation: Participation) -> float:
        matrix = self.strategy_matrix(n)
        if participation.fits(n) == 1 or (self._bands <= participation.min_sep and participation.kind == "min_sep"):
            return sensitivity.banded_sensitivity(np.linalg.norm(matrix, axis=0), participation)
        return sensitivity.gram_sensitivity(matrix.T @ matrix, participation)

    def parameters(self) -> dict[str, Any]:
        entries = hashlib.sha256(self._matrix.tobytes()).hexdigest()
        return {"name": self.name, "num_steps": self.num_steps, "sha256": entries}


# --- tuning ----------------------------------------------------------------------------------------------------------


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
        return _dense_by_gradient(queries, min(participation.min_sep, n), [_unit_columns], _unit_columns)
    blurred = [partial(_unit_epochs, participation=participation, blur=blur) for blur in BLURS]
    return _dense_by_gradient(queries, n, blurred, partial(_unit_epochs, participation=participation))


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


def _unit_epochs(matrix: torch.Tensor, participation: Participation, blur: float = 0.0) -> torch.Tensor:
    """Columns that one record meets, scaled to sensitivity 1 together.

    The worst signs give ``sum |X_ij|`` over their Gram matrix X, which has a kink where X_ij = 0, and the optimum lies
    there; ``sqrt(X_ij^2 + blur^2 X_ii X_jj)`` has none.
    """
    n, b = len(matrix), participation.min_sep
    num_epochs = -(-n // b)
    epochs = torch.nn.functional.pad(matrix, (0, num_epochs * b - n)).view(n, num_epochs, b)
    met = epochs[:, : participation.max_participations].permute(2, 0, 1)  # (offset, n, participation)
    gram = met.mT @ met
    squares = gram.diagonal(dim1=1, dim2=2)
    sizes = (gram.square() + blur**2 * squares[:, :, None] * squares[:, None, :]).sqrt() if blur else gram.abs()
    return matrix / sizes.sum(dim=(1, 2)).sqrt().repeat(num_epochs)[:n]


def _dense_by_gradient(queries: np.ndarray, bands: int, scales: Sequence[Scale], last: Scale) -> DenseStrategy:
    """Descend with one scaling after another, each from where the one before ended; `last` is for the result."""
    n = len(queries)
    step = torch.arange(n)
    inside = (step[:, None] >= step[None, :]) & (step[:, None] - step[None, :] < bands)
    wanted = torch.tensor(queries)

    def matrix_of(free: torch.Tensor, scale: Scale) -> torch.Tensor:
        return scale(torch.zeros(n, n, dtype=torch.float64).masked_scatter(inside, free))

    def loss(x: np.ndarray, scale: Scale) -> tuple[float, np.ndarray]:
        free = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        # A C^-1, solved from the right
        noise = torch.linalg.solve_triangular(matrix_of(free, scale), wanted, upper=False, left=False)
        value = noise.square().sum().log()
        value.backward()
        assert free.grad is not None
        return value.item(), free.grad.numpy()

    found = torch.tensor(NuDPFTRL(1 / bands).strategy_matrix(n))[inside].numpy()
    for scale in scales:
        found = descend(partial(loss, scale=scale), found, maxiter=400, maxfun=500, ftol=1e-10, maxcor=20)
    matrix = matrix_of(torch.tensor(found), last).numpy()
    return DenseStrategy(matrix * np.sign(np.diag(matrix)))


@register("dense", sampler="fixed_order", summary="the optimal matrix, for research", max_steps=MAX_STEPS)
def tune_dense(setting: Setting) -> NoiseStrategy:
    """The matrix with the least mean error."""
    return optimize_dense(setting.num_steps, setting.participation, setting.workload)
