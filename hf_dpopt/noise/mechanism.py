"""Noise of a run: a strategy, its level, and how its stream is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hf_dpopt.common.checks import check_count, check_noise_multiplier
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.gaussian import IdentityStrategy
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.streams import NoiseStream
from hf_dpopt.randomness.source import NoiseSource


class _NoDraws(NoiseSource):
    """A source of zeros: for asking a stream whether it can be made."""

    name = description = "none"

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return torch.zeros(tuple(shape), device=device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseMechanism:
    """Noise of a run: a strategy, its level, and how its stream is kept.

    Adds ``noise_multiplier * sensitivity() * query_sensitivity * (B Z)_t`` to the clipped sum of step t, Z standard
    normal and ``B C = I``. The whole run is one Gaussian mechanism on ``C G``; what it costs depends on the sampler
    (`hf_dpopt.sampling`). Independent noise is the strategy with ``B = C = I``.

    Args:
        noise_multiplier: noise stddev / sensitivity of the event that is accounted for; unitless, > 0. Independent
            noise may have 0.0, which adds nothing and guarantees nothing.
        strategy: C and B.
        strategy_sensitivity: sensitivity of C, for the planned run and its sampler; unitless, > 0.
        num_steps: steps the strategy was made for.
        backend: how the noise of earlier steps is kept; see `NoiseStrategy.stream`.

    Raises:
        DPConfigError: for noise that is absent, or numbers out of range.

    References:
        Denisov et al. (2022), arXiv:2202.08312, Theorem 2.1.
    """

    noise_multiplier: float
    strategy: NoiseStrategy
    strategy_sensitivity: float
    num_steps: int
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_count("num_steps", self.num_steps)
        self.strategy.check_claims(self.num_steps)
        if self.strategy.is_independent:
            return
        if self.noise_multiplier == 0:
            raise DPConfigError(
                "noise_multiplier=0 adds no noise, so there is nothing to correlate. Use "
                "noise_mechanism='gaussian' for a run without noise."
            )
        assert math.isfinite(self.strategy_sensitivity) and self.strategy_sensitivity > 0, self.strategy_sensitivity
        self.stream(_NoDraws(), 1.0)  # what it would refuse in the first step is refused now

    def sensitivity(self) -> float:
        """Sensitivity of the strategy (unitless): what multiplies that of one step's sum."""
        return self.strategy_sensitivity

    def row_norm(self, t: int) -> float:
        """Stddev of the noise of step t (0-based) relative to that of its draw: what an optimizer corrects for."""
        return self.strategy.row_norm(t, None if self.strategy.anytime else self.num_steps)

    def stream(
        self, source: NoiseSource, query_sensitivity: float, *, first_step: int = 0, num_steps: int | None = None
    ) -> NoiseStream:
        """Noise of one uninterrupted run.

        Args:
            source: standard normals under a key that no other run uses.
            query_sensitivity: largest L2 change of one step's clipped sum between adjacent datasets, as the clipper
                states it; gradient units, finite, > 0.
            first_step: number of its first step.
            num_steps: steps at most, the planned ones by default; more only if the strategy is anytime.
        """
        assert math.isfinite(query_sensitivity) and query_sensitivity > 0, query_sensitivity
        steps = self.num_steps if num_steps is None or not self.strategy.anytime else num_steps
        return self.strategy.stream(
            source,
            scale=self.noise_multiplier * self.sensitivity() * query_sensitivity,
            num_steps=steps,
            first_step=first_step,
            backend=self.backend,
        )


def independent_noise(noise_multiplier: float) -> NoiseMechanism:
    """Noise of DP-SGD: fresh in every step, for any number of steps.

    Args:
        noise_multiplier: noise stddev / sensitivity; unitless, finite, >= 0.
    """
    return NoiseMechanism(
        noise_multiplier=noise_multiplier, strategy=IdentityStrategy(), strategy_sensitivity=1.0, num_steps=1
    )


class MechanismLevel:
    r"""The noise of a release per coordinate of the mean: ``stddev * (B z)_t`` with rows z of unit variance.

    Args:
        mechanism: what makes the noise.
        stddev: stddev of a draw in the mean: noise multiplier x sensitivities / expected batch size; gradient units.
        num_steps: steps the mechanism is made for.
        steps_done: asked for the number of releases so far, on the chain in progress.
        gain: asked for what the latest release was multiplied by after the noise; None if coordinates differ in it.
    """

    def __init__(
        self,
        mechanism: NoiseMechanism,
        *,
        stddev: float,
        num_steps: int,
        steps_done: Callable[[], int],
        gain: Callable[[], float | None] = lambda: 1.0,
    ):
        self._mechanism, self._stddev, self._num_steps = mechanism, stddev, num_steps
        self._steps_done, self._gain = steps_done, gain
        self._gains: dict[int, float] = {}  # of the releases it was asked about

    def _gain_now(self) -> float:
        gain = self._gain()
        if gain is None:
            raise DPConfigError(
                "The noise of this gradient is not of one known level: a map after the noise scaled or filtered it. "
                "Use adamw_torch or sgd; a map that multiplies all by one number says so in the attribute gain."
            )
        self._gains[self._t()] = gain
        return gain

    def _t(self) -> int:
        return max(self._steps_done() - 1, 0)

    def variance(self) -> float:
        return (self._stddev * self._gain_now() * self._mechanism.row_norm(self._t())) ** 2

    def variance_of_draw(self) -> float:
        return self._stddev**2

    def covariance(self, lag: int) -> float:
        t = self._t()
        if lag > t or self._mechanism.strategy.is_independent:
            return 0.0
        rows, gain = self._rows(t - lag, t + 1), self._gain_now()
        before = self._gains.get(t - lag, gain)  # known if it was asked for then
        return self._stddev**2 * gain * before * float(rows[0] @ rows[-1])

    def variance_of_mean(self, num_steps: int) -> float:
        t = self._t()
        known = min(num_steps, t + 1)  # what came before belongs to a chain with noise of its own
        if self._mechanism.strategy.is_independent:
            return (self._stddev * self._gain_now()) ** 2 / num_steps
        of_known = float(np.square(self._rows(t + 1 - known, t + 1).sum(axis=0)).sum())
        of_others = (num_steps - known) * self._mechanism.row_norm(0) ** 2
        return (self._stddev * self._gain_now() / num_steps) ** 2 * (of_known + of_others)

    def _rows(self, first: int, end: int) -> np.ndarray:
        strategy = self._mechanism.strategy
        return strategy.noising_rows(first, end, None if strategy.anytime else self._num_steps)
