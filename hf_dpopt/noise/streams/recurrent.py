"""Banded Toeplitz noise: ``x_t = (z_t - sum_{i=1}^{p-1} c_i x_{t-i}) / c_0``, from the last p - 1 outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_dpopt.noise.streams.base import CorrelatedStream, State
from hf_dpopt.randomness.cipher import NoiseSource


class RecurrentStream(CorrelatedStream):
    """Stream that keeps the last p - 1 outputs of every tensor in a ring: they cannot be drawn again.

    Args:
        coefs: c_0 .. c_{p-1} of C; (p,).
        source: standard normals under a key that no other stream uses.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, coefs: Sequence[float], source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._coefs = tuple(coefs)
        self._outputs: dict[str, list[torch.Tensor]] = {}  # of step s at s % (p - 1)

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        output = self._normal(total, tensor, t)
        ring, size = self._outputs.setdefault(name, []), len(self._coefs) - 1
        for i in range(1, min(size, t) + 1):
            output.sub_(ring[(t - i) % size], alpha=self._coefs[i])
        output.div_(self._coefs[0])
        total.add_(output, alpha=self.scale)
        if t < size:
            ring.append(output)
        elif size:
            ring[t % size] = output

    def _own_state(self) -> State:
        return {"outputs": self._outputs}
