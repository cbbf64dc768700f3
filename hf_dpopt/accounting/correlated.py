"""Correlated noise without amplification: a run is one Gaussian mechanism, whatever part of it is looked at.

Under a fixed order (no secret sampling) the whole run is a Gaussian mechanism on ``C G`` with the sensitivity of C for
the participations of one record. The first t steps are one too, with the leading part of C: an anytime strategy may
stop or go on at any step, and its epsilon is that of the steps it took.
"""

from __future__ import annotations

import dataclasses
import math

from dp_accounting import GaussianDpEvent, get_sigma_gaussian

from hf_dpopt.accounting import accountants
from hf_dpopt.clipping import SENSITIVITY_FACTOR
from hf_dpopt.config import check_count
from hf_dpopt.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.mechanisms.randomness import NoiseSource
from hf_dpopt.mechanisms.strategies import NoiseStrategy, Participation
from hf_dpopt.mechanisms.streams import CorrelatedStream, make_stream

ADJACENCIES = ("zero_out", "replace_one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedMechanism:
    """A strategy, the participations it is used with, and the noise: what an epsilon belongs to.

    Formal guarantee: `epsilon` holds for the first steps of a stream of this object, if every record takes part within
    `participation`, in an order that does not depend on the data, and moves a sum by at most the clipping norm.

    Args:
        strategy: C.
        participation: k and b, as the sampler promises them.
        num_steps: steps planned.
        draw_stddev: sigma_z, stddev of the draws Z relative to the clipping norm; unitless, > 0. Not the noise
            multiplier: that is `noise_multiplier`.
        adjacency: "zero_out" or "replace_one". With one record more or less, a fixed order shifts all others.

    References:
        Denisov et al. (2022), arXiv:2202.08312, Theorem 2.1 (adaptive gradients); Choquette-Choo et al. (2023),
        arXiv:2211.06530 (several participations).
    """

    strategy: NoiseStrategy
    participation: Participation
    num_steps: int
    draw_stddev: float
    adjacency: str = "zero_out"

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        _check_adjacency(self.adjacency)
        self.participation.check(self.num_steps)
        if not 1e-9 <= self.draw_stddev <= 1e9:
            raise DPConfigError(f"draw_stddev={self.draw_stddev} is outside [1e-9, 1e9]: no noise, or nothing else.")

    @property
    def noise_multiplier(self) -> float:
        """Noise stddev / sensitivity of the planned run: what one Gaussian event of it would have."""
        return self._event(self.num_steps).noise_multiplier / SENSITIVITY_FACTOR[self.adjacency]

    def event(self, num_steps: int) -> GaussianDpEvent:
        """What the first `num_steps` steps release together, in dp_accounting's convention; one event, not one a step.

        Raises:
            DPBudgetExceeded: beyond the planned steps, if the strategy is not anytime.
        """
        check_count("num_steps", num_steps)
        if num_steps > self.num_steps and not self.strategy.anytime:
            raise DPBudgetExceeded(
                f"{self.strategy.name} noise was made for {self.num_steps} steps, and {num_steps} were asked for. "
                "Plan more steps, or use an anytime strategy (nu_dpftrl, blt, tree, damped_anti_pgd)."
            )
        # the matrix of a shorter run need not be the beginning of the planned one: then the plan is charged at once
        return self._event(num_steps if self.strategy.anytime else self.num_steps)

    def _event(self, num_steps: int) -> GaussianDpEvent:
        # beyond the plan, records come back as often as their separation lets them
        participation = self.participation
        if num_steps > self.num_steps:
            more = -(-num_steps // participation.min_sep)
            participation = dataclasses.replace(participation, max_participations=more)
        return GaussianDpEvent(self.draw_stddev / self.strategy.sensitivity(num_steps, participation))

    def epsilon(self, delta: float, num_steps: int | None = None) -> float:
        """Epsilon of the first `num_steps` steps; of the planned run by default."""
        return accountants.epsilon(
            self.event(self.num_steps if num_steps is None else num_steps), delta, self.adjacency
        ).epsilon

    def stream(
        self,
        source: NoiseSource,
        *,
        clipping_norm: float,
        max_steps: int | None = None,
        first_step: int = 0,
        backend: str = "auto",
        block: int = 1,
    ) -> CorrelatedStream:
        """The noise of one run, under a key that no other stream uses."""
        steps = max(self.num_steps, max_steps or 0)
        self.event(steps)
        return make_stream(
            self.strategy, source, scale=self.draw_stddev * clipping_norm, num_steps=steps, first_step=first_step,
            backend=backend, block=block,
        )  # fmt: skip


def calibrate_correlated(
    strategy: NoiseStrategy,
    participation: Participation,
    num_steps: int,
    *,
    target_epsilon: float,
    delta: float,
    adjacency: str = "zero_out",
) -> CorrelatedMechanism:
    """The least noise with which the planned run spends at most `target_epsilon`.

    References:
        Balle and Wang (2018), arXiv:1805.06530 (analytic Gaussian mechanism).
    """
    _check_adjacency(adjacency)
    if not 0 < target_epsilon < math.inf or not 0 < delta < 1:
        raise DPConfigError(
            f"target_epsilon={target_epsilon} and delta={delta}: use an epsilon > 0 and a delta in (0, 1)."
        )
    sensitivity = strategy.sensitivity(num_steps, participation) * SENSITIVITY_FACTOR[adjacency]
    stddev, more = get_sigma_gaussian(target_epsilon, delta) * sensitivity, 1e-9
    while True:
        found = CorrelatedMechanism(
            strategy=strategy,
            participation=participation,
            num_steps=num_steps,
            draw_stddev=stddev,
            adjacency=adjacency,
        )
        if found.epsilon(delta) <= target_epsilon:
            return found
        stddev *= 1 + more  # the inverse stops within rounding on either side
        more *= 2


def _check_adjacency(adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise DPConfigError(
            f"adjacency={adjacency!r} has no proof for correlated noise in a fixed order: one record more or less "
            "shifts all the others. Use 'zero_out' or 'replace_one'."
        )
