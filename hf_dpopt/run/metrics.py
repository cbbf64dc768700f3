"""Means of private metrics for the log, over the released values of the steps since its last line; at no cost."""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.clipping.measures import MEASURES, Measures
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.types import Released
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.private_metrics import PrivateMetrics
from hf_dpopt.preclip.preconditioner import check_keys

PREFIX = "private_"
QUANTILES = {"norm_p50": 0.5, "norm_p90": 0.9}
RATE = 0.1  # of the mean that the centre follows: about the last ten steps


class NoMetrics:
    """The numbers of a run that releases gradients alone."""

    def measures(self) -> Measures | None:
        """Vector that units add to the sums of the next step, beside their gradients; None for nothing."""
        return None

    def receive(self, released: Released) -> Released:
        """Take the numbers out of a release, and give what is left of it: gradients, and counts of others."""
        return released

    def read(self) -> dict[str, float]:
        """Read the numbers over the steps since this was called last, by the names of the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All that the next line of the log needs, for a checkpoint; released values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        check_keys(state, set())


class MetricsAtWork(NoMetrics):
    """Numbers of a run with `PrivateMetrics`.

    The loss is summed as its distance from a centre, which follows the losses that were released: how many units a
    batch has differs from the expected number, by which sums are divided, and that matters for the distance alone.

    Args:
        spec: which numbers.
        total: bound on what a unit moves all that a step sums, gradient units.
        clipping_norm: C of the rule.
        has_one_norm: whether C bounds the norm of a whole unit, so that one above is one that was clipped.
    """

    def __init__(self, spec: PrivateMetrics, *, total: float, clipping_norm: float, has_one_norm: bool):
        self._spec, self._total, self._clipping_norm, self._has_one_norm = spec, total, clipping_norm, has_one_norm
        self._centre = spec.loss_bound / 2
        self._num_steps, self._loss_sum = 0, 0.0
        self._counts = [0.0] * (len(spec.norm_thresholds) + 1)  # of units / expected batch, by interval

    def measures(self) -> Measures:
        return self._spec.measures(self._total, self._clipping_norm, self._centre)

    def receive(self, released: Released) -> Released:
        gradients, measures = Released(dict(released)), self.measures()
        values = gradients.pop(MEASURES).double().tolist()
        loss = measures.centre + values[0] / measures.loss_weight * measures.farthest
        self._num_steps += 1
        self._loss_sum += loss
        self._counts = [a + b / measures.norm_weight for a, b in zip(self._counts, values[1:], strict=True)]
        self._centre = min(max(self._centre + RATE * (loss - self._centre), 0.0), self._spec.loss_bound)
        return gradients

    def read(self) -> dict[str, float]:
        num_steps, counts = self._num_steps, self._counts
        if not num_steps:
            return {}
        found = {"loss": min(max(self._loss_sum / num_steps, 0.0), self._spec.loss_bound)}
        ends, total = self._spec.norm_thresholds, sum(counts)
        if total > 0:
            if self._has_one_norm and 1.0 in ends:
                found["clip_fraction"] = min(max(sum(counts[ends.index(1.0) + 1 :]) / total, 0.0), 1.0)
            found |= {name: quantile_of(counts, ends, share) for name, share in QUANTILES.items()}
        self._num_steps, self._loss_sum, self._counts = 0, 0.0, [0.0] * len(counts)
        return {PREFIX + name: value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "centre": self._centre,
            "num_steps": self._num_steps,
            "private_loss": self._loss_sum,
            "counts": torch.tensor(self._counts, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, {"centre", "num_steps", "private_loss", "counts"})
        self._centre = min(max(float(state["centre"]), 0.0), self._spec.loss_bound)
        self._num_steps, self._loss_sum = int(state["num_steps"]), float(state["private_loss"])
        self._counts = state["counts"].tolist()


def metrics_of(plan: PrivacyPlan) -> NoMetrics:
    """The numbers that a plan releases with its gradients."""
    if plan.private_metrics is None:
        return NoMetrics()
    total = plan.sensitivity / SENSITIVITY_FACTOR[plan.adjacency]
    norm, has_one_norm = plan.clipper.clipping_norm, plan.config.clipping == "flat"
    return MetricsAtWork(plan.private_metrics, total=total, clipping_norm=norm, has_one_norm=has_one_norm)


def quantile_of(counts: list[float], ends: tuple[float, ...], share: float) -> float:
    """Quantile of lengths that were counted by intervals, noise and all; between ends on a logarithmic scale.

    Args:
        counts: below the first end, between the ends, above the last one; those below 0 count as 0.
        ends: increasing, > 0.
        share: rank of the quantile, in (0, 1).

    Returns:
        A number from half of the first end to twice the last one: lengths beyond were not told apart.
    """
    counts = [max(count, 0.0) for count in counts]
    edges, left = [ends[0] / 2, *ends, ends[-1] * 2], share * sum(counts)
    for count, low, high in zip(counts, edges, edges[1:], strict=True):
        if left <= count and count > 0:
            return low * (high / low) ** (left / count)
        left -= count
    return edges[-1]
