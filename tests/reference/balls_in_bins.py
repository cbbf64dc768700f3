"""Monte Carlo estimates of delta for balls in bins: numbers with standard errors, to compare bounds with."""

from __future__ import annotations

import dataclasses

from hf_dpopt.accounting.certificates import Shares
from hf_dpopt.accounting.random_allocation import StrategyMatrices, bin_grams


@dataclasses.dataclass(frozen=True)
class DeltaEstimate:
    """Estimates of delta when a record is removed and when it is added, with their standard errors."""

    remove: float
    add: float
    remove_error: float
    add_error: float

    @property
    def delta(self) -> float:
        """The larger of the two."""
        return max(self.remove, self.add)


def balls_in_bins_delta(
    strategy: StrategyMatrices, draw_stddev: float, epsilon: float, *, num_steps: int, num_bins: int, num_samples: int
) -> DeltaEstimate:
    """Estimate delta at `epsilon`, with `num_samples` samples for each direction."""
    shares = Shares(bin_grams(strategy, num_steps, num_bins), draw_stddev, epsilon)
    means, errors = shares.moments(num_samples, seed=0)
    return DeltaEstimate(*map(float, (*means, *errors)))
