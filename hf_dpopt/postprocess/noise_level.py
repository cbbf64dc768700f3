"""Level of the noise in the released gradient, which optimizers and filters that correct for noise ask for."""

from __future__ import annotations

import dataclasses
from typing import Protocol


class NoiseLevel(Protocol):
    """The noise of the latest release, per coordinate of the mean gradient; public. Never typed in by the user."""

    def variance(self) -> float:
        """Variance of a coordinate of the latest released mean gradient, gradient units squared; 0 without noise."""

    def variance_of_draw(self) -> float:
        """Variance, in a coordinate of the mean, of a draw that the noise of all steps is made of; as it was added."""

    def covariance(self, lag: int) -> float:
        """Covariance of that coordinate's noise with its noise `lag` >= 1 releases before; 0 if it is independent."""

    def variance_of_mean(self, num_steps: int) -> float:
        """Variance of the mean of that coordinate over the latest `num_steps` releases."""


@dataclasses.dataclass(frozen=True)
class IndependentNoise:
    """Noise of one stddev in every step, independent over the steps.

    Args:
        stddev: stddev of a coordinate of the released mean gradient, gradient units; >= 0.
    """

    stddev: float = 0.0

    def variance(self) -> float:
        return self.stddev**2

    def variance_of_draw(self) -> float:
        return self.stddev**2

    def covariance(self, lag: int) -> float:
        return 0.0

    def variance_of_mean(self, num_steps: int) -> float:
        return self.variance() / num_steps
