"""Budget of the evaluations of a private evaluation set: each is a Gaussian mechanism on the people of that set.

The set is another dataset than the training set. Somebody who is in both is protected by the sum of both epsilons.

**Formal guarantee.** An evaluation releases a sum of vectors of norm at most 1 (`hf_dpopt.records.scores`) with noise
of stddev ``noise_multiplier`` times the sensitivity: 1, or 2 under ``replace_one``. Several are composed exactly,
whatever was done between them with their answers: `epsilon_of` is the epsilon of Gaussian mechanisms whose precisions
add up (Balle and Wang 2018, arXiv:1805.06530), adaptively chosen weights included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import dp_accounting

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.calibrate import calibrate_gaussian
from hf_dpopt.accounting.delta import resolve_delta
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.size_limits import check_budget


@dataclasses.dataclass(frozen=True)
class EvaluationBudget:
    """Budget of the people in the evaluation sets of a run, and the noise of one evaluation. Public values only.

    Args:
        target_epsilon: budget of all evaluations together.
        delta: failure probability of the guarantee, in (0, 1).
        adjacency: that of the run.
        num_planned: evaluations that the budget is shared out over; fewer leave some of it, and more are refused.
    """

    target_epsilon: float
    delta: float
    adjacency: str
    num_planned: int

    @classmethod
    def of(cls, target_epsilon: float, adjacency: str, num_planned: int, num_records: int) -> EvaluationBudget:
        """Make the checked budget, with the default delta of a set of that many records.

        Raises:
            DPConfigError: for a budget out of range, or a set of one record.
        """
        check_budget(target_epsilon)
        check_count("eval_times", num_planned, "an integer >= 1: evaluations that eval_target_epsilon is shared over")
        delta = resolve_delta(None, max(1, num_records), allow_large=False)
        return cls(
            float(target_epsilon), delta, "add_or_remove_one" if adjacency == "auto" else adjacency, num_planned
        )

    @property
    def noise_multiplier(self) -> float:
        """Stddev of the noise / sensitivity, of every evaluation; unitless."""

        def epsilon_at(noise_multiplier: float, relative_error: float) -> float:
            return epsilon_of([noise_multiplier] * self.num_planned, self.delta, self.adjacency)

        precision = self.num_planned / events.noise_stddev_over_clip(1.0, self.adjacency) ** 2
        return calibrate_gaussian(epsilon_at, self.target_epsilon, self.delta, precision, self.adjacency)

    def spent(self, evaluations: Iterable[Any]) -> float:
        """Epsilon of evaluations that were charged.

        Args:
            evaluations: each with its `noise_multiplier` and `adjacency`, see `hf_dpopt.run.ledger.Evaluation`.

        Raises:
            DPConfigError: if one was made under another adjacency, for which its noise says something else.
        """
        made = list(evaluations)
        others = sorted({one.adjacency for one in made} - {self.adjacency})
        if others:
            raise DPConfigError(
                f"adjacency={self.adjacency!r} is not that of earlier evaluations, {', '.join(map(repr, others))}, "
                "which their noise was made for. Use the same adjacency, or another output_dir."
            )
        return epsilon_of([one.noise_multiplier for one in made], self.delta, self.adjacency)

    @property
    def noise_stddev(self) -> float:
        """Stddev of the noise of every coordinate of the sum, in norms of one record."""
        return self.noise_multiplier * SENSITIVITY_FACTOR[self.adjacency]

    @property
    def knows_size(self) -> bool:
        """Whether the number of records is public: neighbouring sets are of one size."""
        return self.adjacency != "add_or_remove_one"


def epsilon_of(noise_multipliers: Sequence[float], delta: float, adjacency: str) -> float:
    """Epsilon of evaluations with these noise multipliers, together; 0 for none."""
    if not noise_multipliers:
        return 0.0
    leaves = [dp_accounting.GaussianDpEvent(events.noise_stddev_over_clip(z, adjacency)) for z in noise_multipliers]
    return accountants.epsilon(dp_accounting.ComposedDpEvent(leaves), delta, adjacency).epsilon
