"""Numbers about the units of a step, summed beside their clipped gradients: losses, and how long gradients are.

They are released with the gradients, as coordinates of one vector, and nothing else in a step may read them.

Shape legend: U = units of privacy (records, users), K = coordinates: 1 for the loss, the others for lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

MEASURES = "numbers of the units"  # a name in the sums that is no parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
    """Vector (K,) that a unit adds to the sums of a step.

    One coordinate is the unit's loss, cut to [0, loss_bound], less ``centre``, as a share of the farthest that it can
    be from there; times loss_weight. The others are 0 but for the one of the interval that the norm of its gradient
    lies in, before the clip and in clipping norms; times norm_weight.

    Formal guarantee: the L2 norm of what one unit adds is at most `norm`, whatever its loss and its gradient are, no
    number among them. It depends on that unit and on public or released values alone. A unit without gradient, which
    takes the place of another under ``zero_out``, adds nothing.

    Args:
        loss_weight: largest size of the coordinate of the loss, gradient units; > 0.
        norm_weight: size of the coordinate of an interval, gradient units; > 0.
        loss_bound: losses above count as this; > 0.
        centre: loss that distances are taken from, in [0, loss_bound]; public, or made of what was released.
        thresholds: ends of the intervals, increasing, in units of ``clipping_norm``.
        clipping_norm: that of the rule, gradient units.
    """

    loss_weight: float
    norm_weight: float
    loss_bound: float
    centre: float
    thresholds: tuple[float, ...]
    clipping_norm: float

    @property
    def norm(self) -> float:
        """Largest L2 norm of what one unit adds, gradient units."""
        return (self.loss_weight**2 + self.norm_weight**2) ** 0.5

    @property
    def farthest(self) -> float:
        """Largest distance of a loss from the centre."""
        return max(self.centre, self.loss_bound - self.centre)

    def total_of(self, losses_U: torch.Tensor, squares: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of what units add, (K,), float64, on the CPU.

        Args:
            losses_U: their losses; what is no number counts as ``loss_bound``.
            squares: group of parameters -> squared norms, (U,); what is no number counts as the longest.
        """
        losses_U = losses_U.detach().double().cpu()
        losses_U = losses_U.nan_to_num(nan=self.loss_bound, posinf=self.loss_bound).clamp(0.0, self.loss_bound)
        of_losses = (losses_U - self.centre) / self.farthest
        norms_U = torch.stack([s.detach().double().cpu() for s in squares.values()]).sum(dim=0).sqrt()
        counts_U = norms_U != 0  # what is no number counts
        of_losses, norms_U = of_losses[counts_U], norms_U[counts_U]
        norms_U = norms_U.nan_to_num(nan=torch.inf, posinf=torch.inf) / self.clipping_norm
        intervals_U = torch.bucketize(norms_U, torch.tensor(self.thresholds, dtype=torch.float64))
        counts = torch.bincount(intervals_U, minlength=len(self.thresholds) + 1).double()
        return torch.cat([of_losses.sum().view(1) * self.loss_weight, counts * self.norm_weight])

    def nothing(self) -> torch.Tensor:
        """The sum over no units, (K,), float64."""
        return torch.zeros(len(self.thresholds) + 2, dtype=torch.float64)
