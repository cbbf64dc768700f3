"""Buffered linear Toeplitz noise: m buffers, each a decaying sum of all draws before.

``x_t = z_t + sum_i w_i h_i`` and then ``h_i = zeros_i h_i + z_t`` (the direct form: it depends on the draws alone).
McMahan, Xu and Zhang (2024), arXiv:2408.08868.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.streams.base import CorrelatedStream, State
from hf_dpopt.randomness.cipher import NoiseSource


class BufferedStream(CorrelatedStream):
    """Keeps m float32 buffers per tensor; one draw and 2 m passes over them in a step."""

    def __init__(self, strategy: BufferedLinearToeplitz, source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._decays, self._weights = list(strategy.zeros), strategy.noising_scale.tolist()
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        normal = self._normal(total, tensor, t)
        total.add_(normal, alpha=self.scale)
        if name not in self._buffers:
            self._buffers[name] = [normal.clone() for _ in self._decays]
            return
        for buffer, weight, decay in zip(self._buffers[name], self._weights, self._decays, strict=True):
            total.add_(buffer, alpha=self.scale * weight)
            torch.add(normal, buffer, alpha=decay, out=buffer)

    def _kept(self) -> State:
        return {"buffers": self._buffers}

    def _restore(self, state: State) -> None:
        self._buffers = state["buffers"]
