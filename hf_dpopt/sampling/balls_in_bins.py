"""Balls in bins: every record is thrown into one batch of the epoch, once and for all epochs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.accounting.certificates import (
    Certificate,
    calibrate_balls_in_bins,
    verified_epsilon,
)
from hf_dpopt.accounting.random_allocation import BallsInBinsDpEvent
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.noise.gaussian import IdentityStrategy
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.randomness.cipher import word_blocks
from hf_dpopt.randomness.source import derive_key
from hf_dpopt.sampling.sampler import Sampler, Steps, as_chains

MOST_KEPT = 2**22  # records whose bins are found in one pass over the words of all
MAX_CERTIFIED_BINS = 200  # a verification of four million samples takes minutes beyond


def _announce(num_samples: int) -> None:
    logger.info(
        f"Balls in bins with correlated noise: verifying epsilon by {num_samples} samples, which takes seconds to "
        "minutes. --amplification_samples 0 leaves it out, for a larger epsilon or more noise."
    )


@functools.lru_cache(maxsize=1)
def _bins(key: bytes, num_examples: int, num_bins: int, first: int, end: int) -> tuple[np.ndarray, ...]:
    """The records of the bins [first, end); kept because the steps that come next ask for them."""
    records, found = [], []
    for start, words in word_blocks(derive_key(key, "balls in bins"), 0, num_examples):
        bins = words % np.uint64(num_bins)
        these = np.flatnonzero((bins >= first) & (bins < end))
        records.append(start + these)
        found.append(bins[these].astype(np.uint32))  # no more bins than steps of an epoch
    bins = np.concatenate(found)
    order = np.argsort(bins, kind="stable")
    sorted_records = np.concatenate(records)[order]
    sorted_records.setflags(write=False)
    return tuple(np.split(sorted_records, np.searchsorted(bins[order], np.arange(first + 1, end))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsSampler(Sampler):
    r"""Step t serves bin ``t mod b``; every record lies in one of ``b = steps_per_epoch`` bins, drawn uniformly.

    Batches look like those of ordinary epochs: each record once per epoch, but batches of random size (``n / b`` on
    average), the same ones in every epoch.

    Formal guarantee: bins are independent of each other, secret, uniform up to b 2^-64, and drawn once for a chain.
    One record more or less leaves the bins of all others as they are as long as b does not change: b is public and has
    to be held fixed, like the rate of Poisson sampling. A record takes part in at most ``ceil(T / b)`` steps of a
    chain, b apart. `event` is that of independent noise; correlated noise has its own `BallsInBinsDpEvent` with the
    same bins.

    References:
        Chua et al. (2024), arXiv:2412.16802; Choquette-Choo et al. (2024), arXiv:2410.06266.
    """

    name: ClassVar[str] = "balls_in_bins"
    adjacencies: ClassVar[tuple[str, ...]] = ("add_or_remove_one", "zero_out")
    takes_changing_scales: ClassVar[bool] = True

    def draw(self, key: bytes, step: int) -> np.ndarray:
        bin_, num_bins = step % self.steps_per_epoch, self.steps_per_epoch
        at_once = max(1, MOST_KEPT * num_bins // self.num_examples)
        first = bin_ - bin_ % at_once
        return _bins(key, self.num_examples, num_bins, first, min(first + at_once, num_bins))[bin_ - first]

    def participation(self, num_steps: int) -> Participation:
        """Participation of a record that a strategy can rely on."""
        return Participation(max(1, self.max_participations(num_steps)), self.steps_per_epoch, "fixed_epoch")

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        chains = [
            BallsInBinsDpEvent(IdentityStrategy(), noise_stddev_over_clip, steps, self.steps_per_epoch)
            for steps in as_chains(num_steps)
            if steps > 0
        ]
        if not chains:
            return dp_accounting.NoOpDpEvent()
        return chains[0] if len(chains) == 1 else dp_accounting.ComposedDpEvent(chains)

    def refuses(self, strategy: NoiseStrategy) -> str:
        """Strategies without a square matrix; the event looks at the signs of all coefficients."""
        if strategy.is_square:
            return ""
        return "its analysis needs a square matrix. Use nu_dpftrl or blt, or sampling='fixed_order'."

    def _correlated_event(self, strategy: NoiseStrategy, noise_stddev: float, num_steps: int) -> dp_accounting.DpEvent:
        return BallsInBinsDpEvent(strategy, noise_stddev, num_steps, self.steps_per_epoch)

    def certify(
        self, strategy: NoiseStrategy, noise_stddev: float, num_steps: int, delta: float, *, num_samples: int
    ) -> Certificate | None:
        """Correlated noise alone: for independent noise the computed epsilon is exact but for rounding."""
        if strategy.is_independent or num_samples == 0 or self.steps_per_epoch > MAX_CERTIFIED_BINS:
            return None
        event = BallsInBinsDpEvent(strategy, noise_stddev, num_steps, self.steps_per_epoch)
        _announce(num_samples)
        try:
            return verified_epsilon(event, delta, num_samples=num_samples)
        except DPConfigError:  # too few samples for a delta as small as this
            return None

    def calibrate(
        self, strategy: NoiseStrategy, num_steps: int, *, epsilon: float, delta: float, num_samples: int
    ) -> Certificate | None:
        if strategy.is_independent or num_samples == 0 or self.steps_per_epoch > MAX_CERTIFIED_BINS:
            return None
        _announce(num_samples)
        return calibrate_balls_in_bins(
            strategy, num_steps, self.steps_per_epoch, epsilon=epsilon, delta=delta, num_samples=num_samples
        )

    def excess(self, strategy: NoiseStrategy, chains: Sequence[int], planned: int) -> int | None:
        return sum(chains) - planned if len(chains) == 1 else None

    def steps_for_log(self, num_steps: int, planned: int) -> int:
        """Whole epochs, for the epsilon of every other number of steps takes a second to compute."""
        if num_steps > planned:
            return num_steps
        return min(-(-num_steps // self.steps_per_epoch) * self.steps_per_epoch, planned)

    def max_participations(self, num_steps: Steps) -> int:
        # each chain has bins of its own
        return sum(-(-steps // self.steps_per_epoch) for steps in as_chains(num_steps))

    def why_not(self, adjacency: str) -> str:
        return "the analysis compares a record with none."

    def describe(self, unit: str = "record") -> str:
        return (
            f"Balls in bins: each of the {self.num_examples} {unit}s is put into one of {self.steps_per_epoch} "
            f"batches at random, once and in secret ({self.num_examples / self.steps_per_epoch:.6g} {unit}s on "
            f"average; sums are divided by {self.expected_batch_size}); the batches take turns, the same in every "
            "epoch."
        )
