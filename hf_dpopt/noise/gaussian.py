"""Independent Gaussian noise: the mechanism of DP-SGD, and the trivial strategy of a matrix mechanism."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from hf_dpopt.common.checks import check_noise_multiplier
from hf_dpopt.noise.nu_dpftrl import IdentityStrategy
from hf_dpopt.randomness.cipher import NoiseSource


@dataclasses.dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian noise, fresh in every step.

    Adds ``noise_multiplier * sensitivity() * query_sensitivity * z_t`` to the clipped sum of step t, z_t ~ N(0, I)
    independent over steps and coordinates. The strategy matrix is the identity, so `sensitivity` is 1.

    Formal guarantee: if one record moves the sum of step t by at most ``query_sensitivity`` (L2, over all tensors
    together), step t is a Gaussian mechanism with ``noise_multiplier``, and steps compose with fresh noise each.
    Every coordinate of every tensor is noised in every step, the empty one included.

    Args:
        noise_multiplier: noise stddev / sensitivity; unitless, finite, >= 0. 0.0 adds nothing and guarantees nothing.

    Raises:
        DPConfigError: if ``noise_multiplier`` is negative or not finite.

    References:
        Abadi et al. (2016), arXiv:1607.00133, Alg. 1.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def sensitivity(self) -> float:
        """Sensitivity of the strategy (unitless): what multiplies that of one step's sum."""
        return 1.0

    @property
    def strategy(self) -> IdentityStrategy:
        """No correlation."""
        return IdentityStrategy()

    def row_norm(self, t: int) -> float:
        """Stddev of the noise of step t relative to that of its draw."""
        return 1.0

    def stream(
        self, source: NoiseSource, query_sensitivity: float, *, first_step: int = 0, num_steps: int | None = None
    ) -> GaussianStream:
        """The noise of one run.

        Args:
            source: standard normals under a key that no other run uses.
            query_sensitivity: largest L2 change of one step's clipped sum between adjacent datasets, as the clipper
                states it; gradient units, finite, > 0.
            first_step, num_steps: without effect: steps are independent, and any number may follow.
        """
        assert math.isfinite(query_sensitivity) and query_sensitivity > 0, query_sensitivity
        return GaussianStream(source, draw_stddev=self.noise_multiplier * self.sensitivity() * query_sensitivity)


class GaussianStream:
    """The noise of one run, step by step; `draw_stddev` is absolute, in gradient units."""

    def __init__(self, source: NoiseSource, *, draw_stddev: float):
        self.draw_stddev = draw_stddev
        self._source = source
        self._last_step = -1

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Adds the noise of ``step`` in place, to every coordinate of every tensor.

        Args:
            sums: clipped sums over the whole logical batch, float32; the tensors of all ranks and shards together, for
                a tensor's noise depends on the position of its name in sorted order.
            step: optimizer step; larger than in every earlier call, for a step's noise hides one batch only.
        """
        assert step > self._last_step, f"noise of step {step} was asked for after that of step {self._last_step}"
        assert all(total.dtype == torch.float32 for total in sums.values()), {n: t.dtype for n, t in sums.items()}
        self._last_step = step
        for tensor, name in enumerate(sorted(sums)):
            normal = self._source.normal(sums[name].shape, step=step, tensor=tensor, device=sums[name].device)
            sums[name].add_(normal, alpha=self.draw_stddev)

    def state(self) -> dict[str, Any]:
        """Nothing: a step needs the key alone."""
        return {}

    def continue_at(self, num_steps: int, state: dict[str, Any] | None) -> None:
        """Nothing to bring back: steps are told apart by their numbers."""
