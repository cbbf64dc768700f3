"""Poisson sampling with a cap on the batch size, so that the memory and time of a step are bounded."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.cipher import random_words
from hf_dpopt.sampling.poisson import PoissonSampler
from hf_dpopt.sampling.sampler import Steps, repeat

# The default cap is the mean plus 7 standard deviations plus 8, which corrects for the skewness of small batches
# (Cornish-Fisher: (7^2 - 1) / 6). It is exceeded about once in 1e12 steps, whatever the batch size.
CAP_SDS = 7
CAP_SKEW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampler(PoissonSampler):
    r"""Poisson sampling; a batch of more than ``cap`` records is replaced by a uniformly random subset of ``cap``.

    The default cap is ``ceil(nq + 7 sqrt(n q (1 - q)) + 8)``, at most n. A cap of n or more never acts: the law and
    the event are then those of `PoissonSampler`.

    Formal guarantee: no batch exceeds ``cap``. The event charges for the truncation, in which one record more can
    push another one out (a change of 2C in the sum).

    Args:
        cap: largest logical batch; in [expected_batch_size, num_examples]. None takes the default.

    Raises:
        DPConfigError: if the cap lies below the expected batch size.

    References:
        Ganesh (2025), arXiv:2508.15089 (privacy of truncated Poisson sampling, as implemented in dp_accounting).
        Chua et al. (2024), arXiv:2411.04205 (an earlier, looser bound).
    """

    cap: int | None = None

    name: ClassVar[str] = "truncated_poisson"
    repeats_one_event: ClassVar[bool] = True
    adjacencies: ClassVar[tuple[str, ...]] = PoissonSampler.adjacencies

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is not None and self.cap < self.expected_batch_size:
            raise DPConfigError(
                f"cap={self.cap} lies below expected_batch_size={self.expected_batch_size}: most batches would be "
                "cut. Use a larger cap, or None for the mean plus 7 standard deviations."
            )

    @property
    def max_batch_size(self) -> int:
        """The cap in force."""
        if self.cap is not None:
            return min(self.cap, self.num_examples)
        sd = math.sqrt(self.num_examples * self.sample_rate * (1 - self.sample_rate))
        return min(math.ceil(self.expected_batch_size + CAP_SDS * sd + CAP_SKEW), self.num_examples)

    def draw(self, key: bytes, step: int) -> np.ndarray:
        batch = super().draw(key, step)
        if len(batch) <= self.max_batch_size:
            return batch
        # Fresh words: those that follow the n Bernoulli draws in the step's stream. The smallest are kept.
        priorities = random_words(key, step, len(batch), first=self.num_examples)
        return np.sort(batch[np.argsort(priorities, kind="stable")[: self.max_batch_size]])

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        if self.max_batch_size == self.num_examples:
            return super().event(noise_stddev_over_clip, num_steps)
        step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            # The larger of two neighbours: under add_or_remove_one it may have one record more than this dataset, and
            # truncation is likelier there. Under the other two adjacencies this is slightly pessimistic.
            dataset_size=self.num_examples + 1,
            sampling_probability=self.sample_rate,
            truncated_batch_size=self.max_batch_size,
            noise_multiplier=noise_stddev_over_clip,
        )
        return repeat(step, self.max_participations(num_steps))

    def parameters(self) -> dict[str, object]:
        return {**super().parameters(), "cap": self.max_batch_size}

    def describe(self, unit: str = "record") -> str:
        return (
            f"{super().describe(unit)} A batch of more than {self.max_batch_size} {unit}s is cut to a random subset."
        )
