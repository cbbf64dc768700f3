"""Poisson sampling: an independent Bernoulli draw for every record in every step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.randomness.cipher import word_blocks
from hf_dpopt.sampling.sampler import Sampler, Steps, repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonSampler(Sampler):
    """Each record enters each batch independently with probability q = ``expected_batch_size / num_examples``.

    Formal guarantee: the probability realised by the integer comparison is at most the q of `event`, and less by no
    more than 2^-53 q. With q = 1 every batch is the whole dataset and the event is the plain Gaussian mechanism.

    The batch size is random with variance n q (1 - q); an empty batch is a legal outcome and still costs one step.

    References:
        Zhu, Dong and Wang (2022), arXiv:2106.08567, Thm. 11 (dominating pairs, add or remove).
        Lebeda et al. (2024), arXiv:2405.20769 (the pair under replace_one).
    """

    name: ClassVar[str] = "poisson"
    repeats_one_event: ClassVar[bool] = True
    adjacencies: ClassVar[tuple[str, ...]] = ("add_or_remove_one", "zero_out", "replace_one")

    def draw(self, key: bytes, step: int) -> np.ndarray:
        if self.sample_rate == 1:
            return np.arange(self.num_examples, dtype=np.int64)
        blocks = word_blocks(key, step, self.num_examples)
        return np.concatenate([first + np.flatnonzero(words < self._threshold) for first, words in blocks])

    @property
    def _threshold(self) -> np.uint64:
        # Scaling a float by 2^64 is exact and int() rounds down, so no record is drawn more often than the
        # accountant was told. sample_rate < 1 makes this < 2^64.
        return np.uint64(int(self.sample_rate * 2.0**64))

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_stddev_over_clip)
        if self.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.sample_rate, step)
        return repeat(step, self.max_participations(num_steps))

    def describe(self, unit: str = "record") -> str:
        return (
            f"Poisson sampling: in each step each of the {self.num_examples} {unit}s takes part independently with "
            f"probability {self.sample_rate:.6g} ({self.expected_batch_size} {unit}s on average)."
        )
