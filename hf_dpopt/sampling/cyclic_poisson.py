"""Cyclic Poisson sampling: groups of records take turns, and each record of a group is drawn independently."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.randomness.cipher import WORD_BLOCK, word_blocks
from hf_dpopt.randomness.source import derive_key
from hf_dpopt.sampling.sampler import Sampler, Steps, as_chains, repeat, sensitivity_over

MOST_KEPT = 2**26  # records whose groups are kept: a byte each, or two; beyond, they are drawn anew in every step


def _draw_groups(key: bytes, num_examples: int, num_groups: int) -> Iterator[np.ndarray]:
    """Yield the groups of the records, `WORD_BLOCK` at a time."""
    for _, words in word_blocks(derive_key(key, "cyclic groups"), 0, num_examples):
        yield (words % np.uint64(num_groups)).astype(np.min_scalar_type(num_groups - 1))


@functools.lru_cache(maxsize=1)
def _groups(key: bytes, num_examples: int, num_groups: int) -> tuple[np.ndarray, ...]:
    """The groups of all records, in blocks; kept because they are the same in every step."""
    return tuple(_draw_groups(key, num_examples, num_groups))


def _places(blocks: Iterator[np.ndarray]) -> np.ndarray:
    """Places of what is True, over blocks of `WORD_BLOCK`; int64."""
    return np.concatenate([i * WORD_BLOCK + np.flatnonzero(block) for i, block in enumerate(blocks)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampler(Sampler):
    r"""Step t samples from group ``t mod p`` alone, each of its records with probability ``p expected / n``.

    A record can take part in every p-th step at most: with a strategy of p bands or fewer it meets orthogonal columns,
    and the run is that of ``ceil(T / p)`` Poisson-sampled Gaussian mechanisms.

    Formal guarantee: every record is assigned to a group independently of all others (uniformly up to p 2^-64), so one
    record more or less leaves the groups of the others as they are. Given its group, it takes part in at most
    ``ceil(T / p)`` steps with the probability that `event` states; the average over groups is no worse than the worst.
    The event is that of noise with at most `num_groups` bands and columns of norm 1, independent noise included.

    Args:
        num_groups: p, >= 1; at most ``n / expected_batch_size``. One group is plain Poisson sampling.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153, Theorem 4 and Algorithm 2.
    """

    num_groups: int = 1

    name: ClassVar[str] = "cyclic_poisson"
    repeats_one_event: ClassVar[bool] = True
    has_groups: ClassVar[bool] = True
    takes_changing_scales: ClassVar[bool] = True
    adjacencies: ClassVar[tuple[str, ...]] = ("add_or_remove_one", "zero_out")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_groups", self.num_groups)
        most = self.num_examples // self.expected_batch_size
        if self.num_groups > most:
            raise DPConfigError(
                f"{self.num_groups} groups of {self.num_examples} records are too small for batches of "
                f"{self.expected_batch_size}. Use num_groups <= {most}, or a smaller batch."
            )

    @property
    def group_rate(self) -> float:
        """Probability with which a record takes part when its group is on."""
        return self.num_groups * self.expected_batch_size / self.num_examples

    def participation(self, num_steps: int) -> Participation:
        return Participation(max(1, self.max_participations(num_steps)), self.num_groups)

    def draw(self, key: bytes, step: int) -> np.ndarray:
        group = step % self.num_groups
        groups = _groups if self.num_examples <= MOST_KEPT else _draw_groups
        blocks = groups(key, self.num_examples, self.num_groups)
        if self.group_rate == 1:
            return _places(are_on == group for are_on in blocks)
        # scaling a float by 2^64 is exact and int() rounds down: never more often than `event` says
        threshold = np.uint64(int(self.group_rate * 2.0**64))
        words = word_blocks(key, step, self.num_examples)
        return _places((are_on == group) & (word < threshold) for are_on, (_, word) in zip(blocks, words, strict=True))

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_stddev_over_clip)
        if self.group_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.group_rate, step)
        return repeat(step, self.max_participations(num_steps))

    def refuses(self, strategy: NoiseStrategy) -> str:
        """Strategies of more bands than groups: Theorem 4 needs orthogonal columns."""
        bands = 1 if strategy.is_independent else strategy.num_bands
        if bands is None:
            return (
                "a record's group comes back every few steps, and noise without bands ties all its steps "
                "together. Use noise_mechanism='banded', or sampling='fixed_order'."
            )
        if bands <= self.num_groups:  # `check_claims` compares them with the matrix wherever noise is made of it
            return ""
        return (
            f"{bands} bands tie steps together that are {self.num_groups} apart, when a record's group "
            f"comes back. Use num_bands <= {self.num_groups}, or more groups."
        )

    def sensitivity_of(self, strategy: NoiseStrategy, num_steps: int) -> float:
        """Largest column norm: a record meets one column at a time."""
        return 1.0 if strategy.is_independent else sensitivity_over(strategy, num_steps, Participation())

    def _correlated_event(self, strategy: NoiseStrategy, noise_stddev: float, num_steps: int) -> dp_accounting.DpEvent:
        return self.event(noise_stddev / self.sensitivity_of(strategy, num_steps), num_steps)

    def with_groups(self, num_groups: int) -> Sampler:
        return dataclasses.replace(self, num_groups=num_groups)

    def max_participations(self, num_steps: Steps) -> int:
        # each chain has groups of its own
        return sum(-(-steps // self.num_groups) for steps in as_chains(num_steps))

    def why_not(self, adjacency: str) -> str:
        return "the analysis compares a record with none."

    def describe(self, unit: str = "record") -> str:
        return (
            f"Cyclic Poisson sampling: the {self.num_examples} {unit}s are dealt to {self.num_groups} groups at "
            f"random, once; groups take turns, and each {unit} of the one that is on takes part with probability "
            f"{self.group_rate:.6g} ({self.expected_batch_size} {unit}s on average)."
        )
