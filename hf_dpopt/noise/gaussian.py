"""Independent noise, fresh in every step: the mechanism of DP-SGD, and the trivial strategy C = B = I.

Formal guarantee: if one record moves the sum of step t by at most ``query_sensitivity`` (L2, over all tensors
together), step t is a Gaussian mechanism, and steps compose with fresh noise each. Every coordinate of every tensor is
noised in every step, the empty one included. Abadi et al. (2016), arXiv:1607.00133, Alg. 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch

from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.reduction import Layout
from hf_dpopt.noise.registry import INDEPENDENT, Setting, register
from hf_dpopt.noise.slices import Flattened, add_in_slices
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.streams import NoiseStream
from hf_dpopt.randomness.source import AddressedSource, NoiseSource


@dataclasses.dataclass(frozen=True)
class IdentityStrategy(ToeplitzStrategy):
    """Independent noise, as in DP-SGD."""

    name: ClassVar[str] = "identity"
    is_independent: ClassVar[bool] = True

    @property
    def num_bands(self) -> int | None:
        return 1

    def strategy_coefs(self, n: int) -> np.ndarray:
        coefs = np.zeros(n)
        coefs[0] = 1.0
        return coefs

    def noising_coefs(self, n: int) -> np.ndarray:
        return self.strategy_coefs(n)

    def restarted(self, every: int) -> NoiseStrategy | None:
        raise DPConfigError("Independent noise has nothing to restart: leave noise_restart_every out.")

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        return IndependentStream(source, draw_stddev=common["scale"])


class IndependentStream(NoiseStream):
    """Noise of any number of steps, which a step needs the key alone for.

    Args:
        source: standard normals under a key that no other stream uses.
        draw_stddev: stddev of a coordinate; absolute, in gradient units; 0 adds nothing.
    """

    def __init__(self, source: NoiseSource, *, draw_stddev: float):
        self.draw_stddev = draw_stddev
        self._source = source
        self._last_step = -1
        self._device = torch.device("cpu")
        self._ranks = Ranks()
        self._layout: Layout | None = None

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Add the noise of `step` in place, to every coordinate of every tensor.

        Args:
            sums: clipped sums over the whole logical batch, float32; the tensors of all ranks and shards together, for
                a tensor's noise depends on the position of its name in sorted order.
            step: optimizer step; larger than in every earlier call, for a step's noise hides one batch only.

        Raises:
            DPConfigError: for a step that had its noise already, or sums that are not float32.
        """
        if step <= self._last_step:
            raise DPConfigError(
                f"The noise of step {step} was asked for after that of step {self._last_step}. A step's noise hides "
                "one batch only: count the steps upwards."
            )
        if any(total.dtype != torch.float32 for total in sums.values()):
            raise DPConfigError("Noise is added to float32 sums: what is rounded before it is noised is not covered.")
        self._last_step = step
        numbers = {name: tensor for tensor, name in enumerate(sorted(sums))}
        totals = {tensor: sums[name] for name, tensor in numbers.items()}
        self._device = next((total.device for total in totals.values()), self._device)
        if self._layout is not None or self._is_shared(totals.values()):
            assert isinstance(self._source, AddressedSource)
            whole = Flattened(totals, self._layout, numbers)
            add_in_slices(self._source, whole, stddev=self.draw_stddev, step=step, ranks=self._ranks)
        else:
            self._source.add_to(totals, stddev=self.draw_stddev, step=step)

    def share_over(self, ranks: Ranks, layout: Layout | None = None) -> None:
        self._ranks, self._layout = ranks, layout

    def takes_pieces(self, device: torch.device) -> bool:
        self._device = device
        return self._is_shared(())

    def _is_shared(self, totals: Iterable[torch.Tensor]) -> bool:
        """Whether each rank draws a slice: where it takes time, and with a source that can. All ranks agree on it."""
        can = isinstance(self._source, AddressedSource) and all(total.is_contiguous() for total in totals)
        if self._ranks.size == 1 or not can:
            return False
        assert isinstance(self._source, AddressedSource)
        return bool(self._ranks.largest(int(not self._source.is_drawn_at(self._device))))

    def continue_at(self, num_steps: int) -> None:
        """Nothing to bring back: steps are told apart by their numbers."""


@register(
    INDEPENDENT,
    sampler="truncated_poisson",
    summary="independent noise: DP-SGD",
    compared_with=("truncated_poisson",),
    is_independent=True,
    max_steps=None,
)
def tune_independent(setting: Setting) -> NoiseStrategy:
    """Nothing to tune."""
    return IdentityStrategy()
