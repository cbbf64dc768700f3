r"""Noisy numbers about the training units in the log: which there are, and what share of a step's budget they take.

A step releases one vector: the clipped gradients, and beside them what `hf_dpopt.clipping.measures` says of the
losses and of the lengths of gradients. With C the bound on the clipped part and m that on the rest, a unit moves the
vector by at most ``T = sqrt(C^2 + m^2)``, and noise of ``z T`` on every coordinate makes it one Gaussian mechanism of
noise multiplier z. So epsilon is that of a run without the numbers, and the noise in the gradient is T / C as large. A
share s of the budget means ``m^2 = s T^2``: it is a share of the squared signal to noise, which is what Gaussian
mechanisms add up (rho of zCDP, mu^2 of GDP), and the noise in the gradient grows by ``1 / sqrt(1 - s)``.

**Formal guarantee.** `PrivateMetrics.sensitivity_ratio` is T / C of all that a step sums. The sensitivity of
correlated noise is that of vectors whose norm is bounded in each step, whatever their coordinates are, so the same T
serves there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hf_dpopt.clipping.measures import Measures
from hf_dpopt.common.checks import check_known, check_positive, check_real, check_share
from hf_dpopt.common.errors import DPConfigError, shown

THRESHOLDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # clipping norms
MOST_THRESHOLDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateMetrics:
    """Public description of the numbers; see the module.

    Args:
        share: share of each step's budget that they take together, in (0, 1).
        loss_bound: losses of single units above count as this, > 0; declared, not looked up in the data.
        loss_share: share of that for the loss, in (0, 1); the rest is for the norms.
        norm_thresholds: norms, in clipping norms, between which units are counted; increasing, > 0. With 1 among them
            the share of units that are clipped is known.

    Raises:
        DPConfigError: for values out of range.
    """

    share: float
    loss_bound: float
    loss_share: float = 0.5
    norm_thresholds: tuple[float, ...] = THRESHOLDS

    def __post_init__(self) -> None:
        check_share("log_private_metrics", self.share, "0.02")
        check_share("loss_share of private_metrics_kwargs", self.loss_share, "0.5")
        check_positive(loss_bound_of_private_metrics_kwargs=self.loss_bound)
        given: Any = self.norm_thresholds
        ends = tuple(given) if isinstance(given, (list, tuple)) else ()
        for end in ends:
            check_real("norm_thresholds of private_metrics_kwargs", end, "numbers > 0, in clipping norms")
        is_increasing = all(a < b for a, b in zip((0.0, *ends), ends, strict=False))
        if not ends or len(ends) > MOST_THRESHOLDS or not is_increasing:
            raise DPConfigError(
                f"norm_thresholds={shown(given)} of private_metrics_kwargs are no increasing numbers > 0. Use 1 to "
                f"{MOST_THRESHOLDS} of them, in clipping norms, such as [0.5, 1, 2]."
            )
        object.__setattr__(self, "norm_thresholds", tuple(map(float, ends)))

    @classmethod
    def of(cls, share: float | None, options: Mapping[str, Any]) -> PrivateMetrics | None:
        """Make what two options ask for: `log_private_metrics` and `private_metrics_kwargs`; None for no numbers."""
        known = {field.name for field in dataclasses.fields(cls)} - {"share"}
        check_known("private_metrics_kwargs", options, sorted(known))
        if share is None:
            if options:
                raise DPConfigError(
                    f"private_metrics_kwargs={shown(dict(options))} is for private metrics, and there are none. Add "
                    "--log_private_metrics 0.02, or leave it out."
                )
            return None
        if "loss_bound" not in options:
            raise DPConfigError(
                f"log_private_metrics={shown(share)} has no bound on the loss of a unit. Declare one: "
                "--private_metrics_kwargs '{\"loss_bound\": 2}'; losses above count as the bound."
            )
        return cls(share=share, **options)

    def sensitivity_ratio(self, ratio: float, num_queries: int) -> float:
        """Sensitivity of all that a step sums / that of one clipped sum.

        Args:
            ratio: the same without these numbers.
            num_queries: clipped sums of a step; what else is counted beside them has a share of the budget, too.

        Raises:
            DPConfigError: if the numbers and what is counted beside them take the whole budget.
        """
        left = num_queries / ratio**2 - self.share
        if left <= 0:
            raise DPConfigError(
                f"log_private_metrics={self.share:g} and what the preconditioner counts take the whole budget of a "
                "step. Use a smaller share, or more count_noise."
            )
        return math.sqrt(num_queries / left)

    def measures(self, total: float, clipping_norm: float, centre: float) -> Measures:
        """Make the vector that a unit adds.

        Args:
            total: bound on what a unit moves all that a step sums, gradient units: T.
            clipping_norm: C of the rule.
            centre: loss that noise is smallest around, in [0, loss_bound]; of released values.
        """
        norm = math.sqrt(self.share) * total
        return Measures(
            loss_weight=math.sqrt(self.loss_share) * norm,
            norm_weight=math.sqrt(1 - self.loss_share) * norm,
            loss_bound=self.loss_bound,
            centre=centre,
            thresholds=self.norm_thresholds,
            clipping_norm=clipping_norm,
        )

    def parameters(self) -> dict[str, Any]:
        """Plain JSON values, from which the noise in the numbers follows."""
        return {**dataclasses.asdict(self), "norm_thresholds": list(self.norm_thresholds)}
