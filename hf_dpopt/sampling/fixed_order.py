"""One order for all epochs: no amplification is claimed, and every record takes part exactly once per epoch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.randomness.cipher import random_words, word_blocks
from hf_dpopt.sampling.sampler import Sampler, Steps, as_chains

WINDOW = 2**22  # places of the order that are found in one pass over the words of all records
_BITS = 20  # of a word, by which a pass knows which words come near a place


@functools.lru_cache(maxsize=1)
def _counts(key: bytes, num_examples: int) -> np.ndarray:
    """Number of words that begin with each `_BITS` bits: the order is known so far; 8 MB."""
    counts = np.zeros(2**_BITS, np.int64)
    for _, words in word_blocks(key, 0, num_examples):
        counts += np.bincount((words >> np.uint64(64 - _BITS)).astype(np.int64), minlength=len(counts))
    return counts


@functools.lru_cache(maxsize=2)  # a batch may reach over two of them
def _window(key: bytes, num_examples: int, window: int) -> np.ndarray:
    """Places [window, window + 1) * WINDOW of the random order of the records, which is that of their words."""
    low, high = window * WINDOW, min((window + 1) * WINDOW, num_examples)
    if num_examples <= WINDOW:
        order = np.argsort(random_words(key, 0, num_examples), kind="stable")
        skipped = 0
    else:
        counts = _counts(key, num_examples)
        ends = np.cumsum(counts)
        first, last = np.searchsorted(ends, [low, high - 1], side="right")
        skipped = low - int(ends[first] - counts[first])
        records, found = [], []
        for start, words in word_blocks(key, 0, num_examples):
            begins = words >> np.uint64(64 - _BITS)
            near = np.flatnonzero((begins >= first) & (begins <= last))
            records.append(start + near)
            found.append(words[near])
        order = np.concatenate(records)[np.argsort(np.concatenate(found), kind="stable")]
    part = order[skipped : skipped + high - low].astype(np.int64)
    part.setflags(write=False)
    return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedOrderSampler(Sampler):
    r"""Consecutive blocks of ``expected_batch_size`` records of one random order, the same order in every epoch.

    The last block of an epoch may be smaller. A record takes part in at most k = ceil(num_steps / steps_per_epoch)
    steps of a chain, always ``steps_per_epoch`` apart, and k Gaussian mechanisms are one with stddev / sqrt(k). Chains
    add up: ten chains of one step each may show the same record ten times.

    Formal guarantee: holds for any order, known or not, so the event rests on no secret and no amplification. It does
    not cover ``add_or_remove_one``: one record more shifts the boundaries of all later blocks.

    References:
        Dong, Roth and Su (2022), arXiv:1905.02383, Cor. 2 (composition of Gaussian mechanisms).
    """

    name: ClassVar[str] = "fixed_order"
    adjacencies: ClassVar[tuple[str, ...]] = ("zero_out", "replace_one")
    takes_changing_scales: ClassVar[bool] = True

    def draw(self, key: bytes, step: int) -> np.ndarray:
        start = (step % self.steps_per_epoch) * self.expected_batch_size
        end = min(start + self.expected_batch_size, self.num_examples)
        windows = range(start // WINDOW, -(-end // WINDOW))
        found = [_window(key, self.num_examples, i) for i in windows]
        return np.sort(np.concatenate(found)[start - windows[0] * WINDOW : end - windows[0] * WINDOW])

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        participations = self.max_participations(num_steps)
        if participations == 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(noise_stddev_over_clip / math.sqrt(participations))

    def participation(self, num_steps: int) -> Participation:
        return Participation(max(1, -(-num_steps // self.steps_per_epoch)), self.steps_per_epoch, "fixed_epoch")

    def refuses(self, strategy: NoiseStrategy) -> str:
        """Nothing: any C is one Gaussian mechanism of its sensitivity (arXiv:2211.06530)."""
        return ""

    def excess(self, strategy: NoiseStrategy, chains: Sequence[int], planned: int) -> int | None:
        if strategy.is_independent:
            return self._excess_of_participations(strategy, chains, planned)
        return sum(chains) - planned if len(chains) == 1 else None

    def max_participations(self, num_steps: Steps) -> int:
        # Each chain has an order of its own: a record may be first in the one and last in the other.
        return sum(-(-steps // self.steps_per_epoch) for steps in as_chains(num_steps))

    def why_not(self, adjacency: str) -> str:
        return "one record more or less shifts the blocks of all the others."

    def describe(self, unit: str = "record") -> str:
        return (
            f"Fixed order: the {self.num_examples} {unit}s are shuffled once and served in blocks of "
            f"{self.expected_batch_size}, the same in every epoch. No amplification by sampling is claimed."
        )
