"""Private training of linear models of sparse records, computed exactly and fast.

A record's gradient is the product of its features and of the residuals of its outputs, so a clipped sum is one product
of sparse matrices. Plan, batches, noise and preconditioners are the package's; there is one parameter, "w".

Shape legend: N = records, B = records of a batch, W = features, K = outputs; weights are (W, K).
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, hstack
from scipy.special import softmax

from hf_dpopt.clipping.scaling import Diagonal, Scale
from hf_dpopt.clipping.squared_sum import COLUMNS, ROWS, squared_sensitivity
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.preclip import OneQuery, Preclip
from recipes.paper.steps import PrivateSteps, Scales

WEIGHTS = "w"
SMALLEST = 1e-30  # of a norm that something is divided by


@dataclasses.dataclass(frozen=True)
class Records(abc.ABC):
    """Features, (N, W), and labels, (N,); a kind of model says what the loss is."""

    x_NW: csr_matrix
    labels_N: np.ndarray

    @abc.abstractmethod
    def residuals(self, weights_WK: np.ndarray) -> np.ndarray:
        """Derivatives of every record's loss by its outputs, (N, K)."""

    @abc.abstractmethod
    def accuracy(self, weights_WK: np.ndarray) -> float:
        """Share of the records that are classified correctly."""

    @property
    def num_features(self) -> int:
        return self.x_NW.shape[1]

    @property
    def squares_NW(self) -> csr_matrix:
        """Squared features."""
        return csr_matrix((self.x_NW.data**2, self.x_NW.indices, self.x_NW.indptr), shape=self.x_NW.shape)

    def gradient(self, weights_WK: np.ndarray) -> np.ndarray:
        """Gradient of the mean loss, (W, K)."""
        return self.x_NW.T @ self.residuals(weights_WK) / len(self.labels_N)

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, rows: Any) -> Any:
        return type(self)(self.x_NW[rows], self.labels_N[rows])


class TwoClasses(Records):
    """Labels 0 or 1, one output: logistic loss."""

    def residuals(self, weights_WK: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-self.x_NW @ weights_WK)) - self.labels_N[:, None]

    def accuracy(self, weights_WK: np.ndarray) -> float:
        return float(((self.x_NW @ weights_WK[:, 0] > 0) == (self.labels_N > 0)).mean())


class ManyClasses(Records):
    """Labels 0 to K - 1, an output for each: cross entropy of their softmax."""

    def residuals(self, weights_WK: np.ndarray) -> np.ndarray:
        residuals_NK = softmax(self.x_NW @ weights_WK, axis=1)
        residuals_NK[np.arange(len(self)), self.labels_N] -= 1
        return residuals_NK

    def accuracy(self, weights_WK: np.ndarray) -> float:
        return float(((self.x_NW @ weights_WK).argmax(axis=1) == self.labels_N).mean())


def with_bias(x_NW: csr_matrix, feature: float = 1.0) -> csr_matrix:
    """Features, and behind them one that all records have."""
    return csr_matrix(hstack([x_NW, np.full((x_NW.shape[0], 1), feature)], format="csr"))


# --- clipped sums ----------------------------------------------------------------------------------------------------


def norms(batch: Records, residuals_BK: np.ndarray, inverse_WK: np.ndarray | None) -> np.ndarray:
    """Norm of every record's gradient times 1 / D, (B,); None for no D."""
    if inverse_WK is None:
        of_features_B1 = np.asarray(batch.squares_NW.sum(axis=1))
        return np.sqrt((residuals_BK**2 * of_features_B1).sum(axis=1))
    return np.sqrt((residuals_BK**2 * (batch.squares_NW @ inverse_WK**2)).sum(axis=1))


def clipped_residuals(
    batch: Records, weights_WK: np.ndarray, inverse_WK: np.ndarray | None, clip: float
) -> np.ndarray:
    """Residuals times the factors that clip ``g_b / D``, (B, K)."""
    residuals_BK = batch.residuals(weights_WK)
    factors_B = np.minimum(1.0, clip / np.maximum(norms(batch, residuals_BK, inverse_WK), SMALLEST))
    return factors_B[:, None] * residuals_BK


def clipped_sum(batch: Records, weights_WK: np.ndarray, inverse_WK: np.ndarray | None, clip: float) -> np.ndarray:
    """``sum_b clip(g_b / D)``, (W, K)."""
    total_WK = batch.x_NW.T @ clipped_residuals(batch, weights_WK, inverse_WK, clip)
    return total_WK if inverse_WK is None else total_WK * inverse_WK


def squared_sum(records: Records, weights_WK: np.ndarray, clip: float, *, by_rows: bool) -> dict[str, np.ndarray]:
    """``sum_b clip(g_b)^2`` under the names that `OneQuery` takes: by coordinates, or summed over rows and columns."""
    squares_NK = clipped_residuals(records, weights_WK, None, clip) ** 2
    if not by_rows:
        return {WEIGHTS: records.squares_NW.T @ squares_NK}
    rows_W = records.squares_NW.T @ squares_NK.sum(axis=1)
    columns_K = (np.asarray(records.squares_NW.sum(axis=1)) * squares_NK).sum(axis=0)
    return {WEIGHTS + ROWS: rows_W, WEIGHTS + COLUMNS: columns_K}


# --- runs ------------------------------------------------------------------------------------------------------------


class PublicMean:
    """Gradients of all public records, every time: a `hf_dpopt.preclip.preconditioner.PublicSource`.

    Args:
        records: the public records.
        weights_WK: weights of the run, which are changed in place.
    """

    def __init__(self, records: Records, weights_WK: np.ndarray):
        self._records, self._weights_WK = records, weights_WK

    def mean(self) -> dict[str, torch.Tensor]:
        return {WEIGHTS: torch.tensor(self._records.gradient(self._weights_WK), dtype=torch.float32)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


class PrivateGradients(PrivateSteps):
    """Releases of one run, as arrays.

    Args:
        records: training records.
        weights_WK: weights of the run, which its optimizer changes in place.
        plan: made for a clipping norm of 1; the noise grows with the clip.
        clip: bound on the norm of ``g_b / D``.
        keys, start: see `PrivateSteps`.
    """

    def __init__(
        self,
        records: Records,
        weights_WK: np.ndarray,
        plan: PrivacyPlan,
        *,
        clip: float,
        keys: tuple[bytes, bytes],
        start: Callable[[MechanismLevel], Any],
    ):
        self._records, self._weights_WK, self._clip = records, weights_WK, clip
        self._known: tuple[Scale | None, np.ndarray | None] = (None, None)  # a scale, and 1 / D of it
        super().__init__(plan, self._sums, keys=keys, start=start, sensitivity=clip * plan.sensitivity)

    def __call__(self) -> np.ndarray:
        """What the optimizer sees of the next step, float64, (W, K)."""
        return super().__call__()[WEIGHTS].double().numpy()

    def _sums(self, rows: np.ndarray, scales: Scales) -> ClippedSums:
        (scale,) = scales
        if scale is not self._known[0]:
            self._known = (scale, inverse_of(scale, self._weights_WK.shape))
        total_WK = clipped_sum(self._records[rows], self._weights_WK, self._known[1], self._clip)
        return ClippedSums({WEIGHTS: torch.tensor(total_WK, dtype=torch.float32)})


def inverse_of(scale: Scale | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """1 / D of a scale, float64, in the shape of the weights; None for no D."""
    if scale is None:
        return None
    if not scale.parts:
        return np.full(shape, scale.factor)
    part = scale.parts[WEIGHTS]
    inverse = part.inverse if isinstance(part, Diagonal) else part.matrix(part.inverse_P.new_empty(shape))
    return scale.factor * inverse.double().numpy()


def opening_answer(
    spec: OneQuery, records: Records, weights_WK: np.ndarray, clip: float, rng: np.random.Generator
) -> Released:
    """Answer to the opening query: mean squares with noise from `rng`."""
    stddev = spec.query_noise * squared_sensitivity(clip, by_rows=spec.by_rows)
    answer = {}
    for name, total in squared_sum(records, weights_WK, clip, by_rows=spec.by_rows).items():
        total = total + stddev * rng.standard_normal(total.shape)
        answer[name] = torch.tensor(total / len(records), dtype=torch.float32)
    return Released(answer)


def private_run(
    records: Records,
    plan: PrivacyPlan,
    run: Any,
    preclip: Callable[[MechanismLevel], Preclip],
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    *,
    num_outputs: int = 1,
    rates: Sequence[float] | None = None,
    public: Records | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Train from zero; yields the number of each step and the weights after it.

    Args:
        records: training records.
        plan: made for a clipping norm of 1.
        run: its `clip` and `seed`; runs of one seed and sampler share batches, the noise is fresh in each.
        preclip: makes the preconditioner from the level of the noise.
        optimizer: of the weights.
        num_outputs: of the model.
        rates: learning rates relative to the optimizer's own; None for 1.
        public: records for a preconditioner that asks for them.
    """
    fresh = np.random.default_rng([run.seed, zlib.crc32(repr(run).encode())])
    keys = np.random.default_rng(run.seed).bytes(32), fresh.bytes(32)
    weights_WK = np.zeros((records.num_features, num_outputs))
    parameter = torch.from_numpy(weights_WK)  # the same memory
    source = None if public is None else PublicMean(public, weights_WK)

    def start(level: MechanismLevel) -> Any:
        spec = preclip(level)
        made = spec.start({WEIGHTS: parameter}, clipping_norm=run.clip, noise=level, public=source)
        if isinstance(spec, OneQuery):
            made.receive_opening(opening_answer(spec, records, weights_WK, run.clip, fresh))
        return made

    gradients = PrivateGradients(records, weights_WK, plan, clip=run.clip, keys=keys, start=start)
    made = optimizer([parameter])
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda done: 1.0 if rates is None else [*rates, 0.0][done])
    for step in range(1, plan.num_steps + 1):
        parameter.grad = torch.from_numpy(gradients())
        made.step()
        scheduler.step()
        yield step, weights_WK
