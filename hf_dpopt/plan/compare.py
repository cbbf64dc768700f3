"""Comparison of noise for a run and a budget: the error of every mechanism with its sampler, side by side.

The predicted error is that of the optimizer's linear map applied to the noise (`Workload`), at the clipping norm 1 and
at the noise that the budget asks for. It knows nothing of the data: clipping bias, curvature and the second moments of
adaptive optimizers are outside of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.noise import NoiseStrategy, Workload
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.preclip import ScaleChanges

INDIFFERENT = 0.02  # relative difference of predicted errors below which memory decides
MAX_SCALED_STEPS = 4096  # of a run whose scales are taken into account; matrices of longer ones take gigabytes
MAX_WORKLOAD_STEPS = 2048  # of one whose optimizer is, too, by a product of two matrices


@dataclasses.dataclass(frozen=True)
class ComparedNoise:
    """One row of the comparison.

    Attributes:
        plan: plan of the run with this noise.
        rmse: root mean square error of the iterates over the run, per coordinate, in clipping norms times the learning
            rate; of sums of gradients, not means.
        max_error: the largest of an iterate, likewise.
        score: what decides; the smaller, the better. `rmse` for SGD. For an adaptive optimizer its geometric mean with
            the noise of a single step, which shortens every step: a rule that was measured, not derived
            (docs/mechanisms.md).
    """

    plan: PrivacyPlan
    rmse: float
    max_error: float
    score: float

    @property
    def mechanism(self) -> str:
        """Its name in `MECHANISMS`."""
        return self.plan.config.noise_mechanism

    @property
    def step_stddev(self) -> float:
        """Stddev of the noise of the last step, in clipping norms."""
        return step_stddev(self.plan)


def ranked(plans: Sequence[PrivacyPlan], workload: Workload | None) -> list[ComparedNoise]:
    """Plans at one budget, the best score first; of those as good, the one that keeps least.

    Args:
        plans: one or more, with the same budget.
        workload: what the optimizer makes of the gradients; None for plain sums.
    """
    is_adaptive, rows = workload is not None and workload.adaptive, []
    for plan in plans:
        errors = predicted_errors(plan, workload)
        rmse = float(math.sqrt(np.square(errors).mean()))
        score = math.sqrt(rmse * step_stddev(plan)) if is_adaptive else rmse
        rows.append(ComparedNoise(plan=plan, rmse=rmse, max_error=float(errors.max()), score=score))
    rows.sort(key=lambda row: row.score)
    as_good = [row for row in rows if row.score <= (1 + INDIFFERENT) * rows[0].score]
    best = min(as_good, key=lambda row: row.plan.cost.kept)
    return [best, *(row for row in rows if row is not best)]


def predicted_errors(plan: PrivacyPlan, workload: Workload | None = None) -> np.ndarray:
    """Stddev of a coordinate of every iterate due to the noise, in clipping norms times the learning rate, (n,)."""
    changes = plan.preclip.changes(plan.config.clipping_norm)
    return _draw_stddev(plan) * np.sqrt(errors_across(plan.strategy, plan.num_steps, workload, changes))


def step_stddev(plan: PrivacyPlan) -> float:
    """Stddev of a coordinate of the noise in the last step's sum, in clipping norms."""
    return _draw_stddev(plan) * plan.mechanism.row_norm(plan.noise_steps - 1)


def _draw_stddev(plan: PrivacyPlan) -> float:
    """Stddev of a draw in the sum of a step, in clipping norms."""
    return plan.draw_stddev * SENSITIVITY_FACTOR[plan.adjacency] * plan.sensitivity_ratio


def errors_across(
    strategy: NoiseStrategy, n: int, workload: Workload | None, changes: ScaleChanges | None
) -> np.ndarray:
    """Variance of every iterate per unit of the variance of a draw, (n,), in coordinates of the clip of kind 0.

    Where the weights do not see the noise in the same coordinates before and after a change, that of two phases adds
    up as if it were independent. Beyond `MAX_SCALED_STEPS` steps the scale is taken to stay, and beyond
    `MAX_WORKLOAD_STEPS` the sums of the releases stand for the iterates.

    Args:
        strategy: C and B.
        n: steps.
        workload: what the optimizer makes of the releases; None for their sums.
        changes: when the scale changes; None for never.
    """
    if changes is None:
        return strategy.per_query_error(n, workload)
    workload = workload if n <= MAX_WORKLOAD_STEPS else None
    if not changes.is_seen or n > MAX_SCALED_STEPS:
        return changes.factors[0] ** 2 * strategy.per_query_error(n, workload)
    factors = changes.factor_of_steps(n)
    if strategy.is_independent:
        if workload is None:
            return np.cumsum(factors**2)
        return np.square(workload.matrix() * factors).sum(axis=1)
    noise = factors[:, None] * strategy.noising_matrix(n)  # a new one: the strategy's own makes the noise
    sums = None if workload is None else workload.matrix()
    if changes.is_taken_back:
        iterates = np.cumsum(noise, axis=0, out=noise) if sums is None else sums @ noise
        return np.einsum("ts,ts->t", iterates, iterates)
    errors = np.zeros(n)
    for first in range(0, n, changes.every):
        phase = slice(first, min(first + changes.every, n))
        if sums is None:
            of_phase = np.square(np.cumsum(noise[phase], axis=0)).sum(axis=1)
            errors[phase] += of_phase
            errors[phase.stop :] += of_phase[-1]
        else:
            errors += np.square(sums[:, phase] @ noise[phase]).sum(axis=1)
    return errors
