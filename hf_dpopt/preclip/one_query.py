"""A fixed preconditioner from one private query: the second moment of clipped gradients before the first step.

Correlated noise serves best where the optimizer behind it is linear. So the division comes before the noise, and D has
to come from somewhere else than the noisy steps: from one query over all units at the initial weights, paid for once.
D then stays, so nothing about the noise of the steps changes.

Formal guarantee: the query adds up, over all units, what `SquaredSum` says one of them adds; with noise of
`query_noise` times its sensitivity it is one Gaussian mechanism, composed with that of the steps, once for every chain
of a run. D is a function of its release.

The division before the noise: Ganesh, McMahan and Thakurta (2025), arXiv:2507.01129. D from one query is ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Diagonal, Factored
from hf_dpopt.clipping.squared_sum import COLUMNS, ROWS, SquaredSum, squared_sensitivity
from hf_dpopt.common.checks import check_kind, check_positive
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Gradients, Released
from hf_dpopt.preclip.preconditioner import OpeningQuery, Preconditioning, RunOptions, check_keys
from hf_dpopt.preclip.scale import Dividing, ScaledStep

LEAST_NOISE = 0.1  # of the query, relative to its sensitivity: below, it alone would cost epsilon 40 and more


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneQuery(Dividing):
    r"""``D = (sqrt(v) + floor rms) / ((1 + floor) rms)``, v the released mean of ``clip(g_b)^2``, rms its root mean.

    By rows and columns, ``D_ij`` is a product: of the roots of the mean square of row i and of column j, each with the
    floor, over that of the whole parameter, as in Adafactor (arXiv:1804.04235, Algorithm 1). Asked for as sums, a row
    has the noise of one number; its coordinates one by one would have that of the root of their number.

    Args:
        query_noise: stddev of the noise in the query / its sensitivity; at least `LEAST_NOISE`. About 10 costs the
            steps 0.2 % (epsilon 8) to 2 % (epsilon 2) more noise.
        floor: f, > 0: of D, in root mean squares of a coordinate; the larger, the nearer to no division.
        by_rows: ask for row and column sums of parameters of two dimensions or more, else for every coordinate.
        clipping_norm, learning_rate_ratio: those of `Dividing`. Units are clipped to the norm of the clipping rule
            before they are squared.

    Raises:
        DPConfigError: for values out of range.
    """

    query_noise: float = 10.0
    floor: float = 2.0
    by_rows: bool = True
    name: ClassVar[str] = "one_query"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(query_noise=self.query_noise, floor=self.floor)
        if self.query_noise < LEAST_NOISE:
            raise DPConfigError(
                f"query_noise={self.query_noise} would make the query cost more than the run. Use {LEAST_NOISE} or "
                "more; 3 to 10 is usual."
            )
        check_kind("by_rows", self.by_rows, bool)

    @property
    def opening(self) -> OpeningQuery:
        return _SecondMoments(self.query_noise, self.by_rows)

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0

    def check_config(self, config: RunOptions) -> None:
        """Refuse what users give in place of gradients, and rules of clipping without one norm."""
        if config.local_training is not None:
            raise DPConfigError(
                "preconditioner='one_query' squares gradients, and local training gives how far weights moved. Leave "
                "local_training out."
            )
        if config.clipping != "flat":
            raise DPConfigError(
                f"clipping={config.clipping!r}: the query is calibrated to one norm that whole units are clipped to. "
                "Use clipping='flat' with 'one_query'."
            )


@dataclasses.dataclass(frozen=True)
class _SecondMoments(OpeningQuery):
    noise_multiplier: float
    by_rows: bool

    def sensitivity(self, clipping_norm: float) -> float:
        return squared_sensitivity(clipping_norm, by_rows=self.by_rows)

    def empty_sum(self, parameters: Mapping[str, torch.Tensor]) -> SquaredSum:
        return SquaredSum(parameters, by_rows=self.by_rows)


class FromOneQuery(Preconditioning):
    """`OneQuery` at work: it keeps what the query released, and D is made of that."""

    _spec: OneQuery

    def __init__(self, spec: OneQuery, parameters: Mapping[str, torch.Tensor], *of_run: Any):
        super().__init__(spec, parameters, *of_run)
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._moments: Gradients = {}  # as they were released: means over all units
        self._step: ScaledStep | None = None

    @property
    def awaits_opening(self) -> bool:
        return not self._moments

    @property
    def gain(self) -> float | None:
        return self._divided().gain

    def receive_opening(self, released: Released) -> None:
        self._moments, self._step = dict(released), None

    def pass_over_opening(self) -> None:
        self._step = None
        self._moments = {name: torch.zeros(shape, device=self._devices[name]) for name, shape in self._shapes.items()}

    def _divided(self) -> ScaledStep:
        if self._step is None:
            self._step = self._spec.step(self.inverse() if self._moments else {}, self._clipping_norm)
        return self._step

    def inverse(self) -> dict[str, Diagonal | Factored]:
        """Name -> 1 / D."""
        total = sum(self._sum_of(name) for name in self._shapes)
        rms = math.sqrt(max(total, 0.0) / sum(shape.numel() for shape in self._shapes.values()))
        if rms == 0.0:  # noise below zero in all, or no gradients at all
            return {}
        floor, size = self._spec.floor * rms, (1 + self._spec.floor) * rms
        parts: dict[str, Diagonal | Factored] = {}
        for name, shape in self._shapes.items():
            if name in self._moments:
                parts[name] = Diagonal(size / (self._moments[name].clamp(min=0.0).sqrt() + floor))
                continue
            num_rows, num_columns = shape[0], shape[1:].numel()
            rows_P = (self._moments[name + ROWS] / num_columns).clamp(min=0.0).sqrt() + floor
            columns_Q = (self._moments[name + COLUMNS] / num_rows).clamp(min=0.0).sqrt() + floor
            whole = math.sqrt(max(self._sum_of(name), 0.0) / shape.numel()) + floor
            parts[name] = Factored(whole / rows_P, size / columns_Q)
        return parts

    def _sum_of(self, name: str) -> float:
        """Mean squared norm of a parameter's gradient; of two sums that estimate it, the mean."""
        if name in self._moments:
            return float(self._moments[name].double().sum())
        return float(self._moments[name + ROWS].double().sum() + self._moments[name + COLUMNS].double().sum()) / 2

    def scales(self) -> tuple[Any, ...]:
        return (self._divided().scale,)

    def receive(self, released: Released) -> Released:
        return self._divided().receive(released)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": {name: v.clone() for name, v in self._moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, {"moments"})
        self._moments = {
            name: v.to(self._devices[name.removesuffix(ROWS).removesuffix(COLUMNS)], copy=True)
            for name, v in state["moments"].items()
        }
        self._step = None


OneQuery.at_work = FromOneQuery
