"""After the noise everything is free: maps of the released mean gradient, in any order and number, at no privacy cost.

A new one is one file with a class that follows `Postprocess`. They run inside `private_step`, after `# released from
here`, on released values only; so their state may be stored and published.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from hf_dpopt.postprocess.noise_level import IndependentNoise, NoiseLevel

Gradients = dict[str, torch.Tensor]


class Postprocess(Protocol):
    """A map of the released mean gradient, called once per optimizer step; it may keep state."""

    def __call__(self, released: Gradients, /) -> Gradients:
        """Parameter name -> float32 tensor of the parameter's shape, to the same."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: tensors, numbers, texts, and lists and dicts of them; {} if there is none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken, bit for bit."""


def mean_over_expected_batch(noisy_sums: Gradients, expected_batch_size: int) -> Gradients:
    """Divides by the public expected size. The realised size of a logical batch is data and may not be the divisor."""
    torch._foreach_div_(list(noisy_sums.values()), expected_batch_size)
    return noisy_sums


def apply(chain: Iterable[Postprocess], released: Gradients) -> Gradients:
    """The chain from left to right."""
    for postprocess in chain:
        released = postprocess(released)
    return released


__all__ = [
    "Gradients",
    "IndependentNoise",
    "NoiseLevel",
    "Postprocess",
    "apply",
    "mean_over_expected_batch",
]
