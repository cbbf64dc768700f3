"""Mechanisms: noise on the clipped sums. Between a sum and its noise nothing runs; after it, anything may.

A mechanism is a frozen specification of public values (`NoiseMechanism`); its `stream` is what a run mutates
(`NoiseStream`). Independent noise (`gaussian.py`) is the trivial strategy, not another path.

To add one: write ``mechanisms/<name>.py`` with a class that satisfies `NoiseMechanism`, draws from the `NoiseSource`
it is handed and from nothing else, and states its guarantee; add one line to `MECHANISMS`. Configurations, command
lines and the contract tests read the registry.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hf_dpopt.mechanisms.gaussian import GaussianMechanism, GaussianStream
from hf_dpopt.mechanisms.randomness import NoiseSource, make_noise_source


class NoiseStream(Protocol):
    """The noise of one run."""

    noise_stddev: float  #: of each coordinate of each step, absolute, in gradient units

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Adds the noise of ``step`` to every coordinate of the float32 ``sums``; each step once, in order."""


class NoiseMechanism(Protocol):
    """Public description of the noise: a frozen dataclass, checked at construction."""

    @property
    def noise_multiplier(self) -> float:
        """Noise stddev / sensitivity; unitless."""

    def sensitivity(self) -> float:
        """Sensitivity of the strategy: largest L2 norm of C u over the allowed participation vectors u; unitless."""

    def stream(self, source: NoiseSource, query_sensitivity: float) -> NoiseStream:
        """The noise of one run, for sums that one record moves by at most ``query_sensitivity`` (L2) per step."""


MECHANISMS: dict[str, type[GaussianMechanism]] = {
    "gaussian": GaussianMechanism,
}

__all__ = [
    "MECHANISMS",
    "GaussianMechanism",
    "GaussianStream",
    "NoiseMechanism",
    "NoiseSource",
    "NoiseStream",
    "make_noise_source",
]
