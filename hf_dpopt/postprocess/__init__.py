"""After the noise everything is free: maps of the noisy sum, in any order and number, at no privacy cost.

A new one is one file with a function or an object `(name -> tensor) -> (name -> tensor)` and one line in
`POSTPROCESSORS`. They run inside `private_step`, after `# private from here`, on released values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Gradients = dict[str, torch.Tensor]
Postprocess = Callable[[Gradients], Gradients]

POSTPROCESSORS: dict[str, Callable[..., Postprocess]] = {}


def mean_over_expected_batch(noisy_sums: Gradients, expected_batch_size: int) -> Gradients:
    """Divides by the public expected size. The realised size of a logical batch is data and may not be the divisor."""
    for total in noisy_sums.values():
        total.div_(expected_batch_size)
    return noisy_sums


def apply(chain: Iterable[Postprocess], released: Gradients) -> Gradients:
    """The chain from left to right."""
    for postprocess in chain:
        released = postprocess(released)
    return released
