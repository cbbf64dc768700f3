"""Mechanisms: noise on the clipped sums. Between a sum and its noise nothing runs; after it, anything may.

A mechanism is a frozen specification of public values (`NoiseMechanism`); its `stream` is what a run mutates
(`NoiseStream`). Independent noise (`gaussian.py`) is the trivial strategy, not another path.

To add one: write a strategy (`strategies/`), and name it in `families.py`. Configurations, command lines and the
contract tests read the registry `MECHANISMS`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hf_dpopt.noise.banded import BandedInverse, BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.families import MECHANISMS, Family, Setting, make_strategy
from hf_dpopt.noise.gaussian import GaussianMechanism, GaussianStream
from hf_dpopt.noise.mechanism import CorrelatedNoise
from hf_dpopt.noise.nu_dpftrl import (
    AntiPGD,
    DampedAntiPGD,
    IdentityStrategy,
    LambdaCGD,
    NuDPFTRL,
    OptimalCC,
)
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.restarted import Restarted, Stamped
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.noise.workloads import Workload, linear_cooldown, momentum_workload, prefix_sum_workload
from hf_dpopt.randomness.cipher import NoiseSource, make_noise_source


class NoiseStream(Protocol):
    """The noise of one run."""

    @property
    def draw_stddev(self) -> float:
        """Of a coordinate of the draws ``Z``, scaled; absolute, in gradient units."""

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Adds the noise of ``step`` to every coordinate of the float32 ``sums``; each step once, in order."""

    def state(self) -> dict[str, Any]:
        """What later steps need besides the key; secret. Empty where the key is enough."""

    def continue_at(self, num_steps: int, state: dict[str, Any] | None) -> None:
        """Goes on after the first ``num_steps`` steps; ``state`` saves time and changes nothing."""


class NoiseMechanism(Protocol):
    """Public description of the noise: a frozen dataclass, checked at construction."""

    @property
    def noise_multiplier(self) -> float:
        """Noise stddev / sensitivity; unitless."""

    @property
    def strategy(self) -> NoiseStrategy:
        """How the noise of the steps is correlated."""

    def sensitivity(self) -> float:
        """Sensitivity of the strategy: largest L2 norm of C u over the allowed participation vectors u; unitless."""

    def row_norm(self, t: int) -> float:
        """Stddev of the noise of step t (0-based) relative to that of its draw."""

    def stream(
        self, source: NoiseSource, query_sensitivity: float, *, first_step: int = 0, num_steps: int | None = None
    ) -> NoiseStream:
        """The noise of one run, for sums that one record moves by at most ``query_sensitivity`` (L2) per step."""


__all__ = [
    "AntiPGD",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedLinearToeplitz",
    "ColumnNormalized",
    "CorrelatedNoise",
    "DampedAntiPGD",
    "DenseStrategy",
    "Family",
    "GaussianMechanism",
    "GaussianStream",
    "IdentityStrategy",
    "LambdaCGD",
    "MECHANISMS",
    "NoiseMechanism",
    "NoiseSource",
    "NoiseStrategy",
    "NoiseStream",
    "NuDPFTRL",
    "OptimalCC",
    "Participation",
    "Restarted",
    "Setting",
    "Stamped",
    "ToeplitzStrategy",
    "TreeAggregation",
    "Workload",
    "linear_cooldown",
    "make_noise_source",
    "make_strategy",
    "momentum_workload",
    "prefix_sum_workload",
]
