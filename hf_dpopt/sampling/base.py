"""What every sampler offers: the batches, and the event that says what those batches cost."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation

Steps = int | Sequence[int]  # optimizer steps of one uninterrupted chain, or of each chain of a run that branched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(abc.ABC):
    """A law over logical batches, together with its accounting.

    Formal guarantee: over a secret, uniformly random ``key``, the batches ``draw(key, 0), draw(key, 1), ...`` follow
    the law that `event` was proven for, under each adjacency in ``adjacencies`` and no other. A batch is a pure
    function of (key, step): it does not depend on ranks, on micro-batches or on where a run was resumed.

    Args:
        num_examples: number of records n in the dataset; >= 1. Public.
        expected_batch_size: records per logical batch on average; in [1, num_examples].

    Raises:
        DPConfigError: if the dataset is empty or smaller than one batch.
    """

    num_examples: int
    expected_batch_size: int

    name: ClassVar[str]
    adjacencies: ClassVar[tuple[str, ...]]  # those for which `event` has a proof

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise DPConfigError(
                f"num_examples={self.num_examples}: nothing to sample. Use a dataset with >= 1 record."
            )
        if not 1 <= self.expected_batch_size <= self.num_examples:
            raise DPConfigError(
                f"expected_batch_size={self.expected_batch_size} is outside [1, {self.num_examples}], the size of the "
                "dataset. Use a smaller batch (per-device batch x devices x accumulation steps)."
            )

    @abc.abstractmethod
    def draw(self, key: bytes, step: int) -> np.ndarray:
        """Indices of the records of one logical batch, over all ranks.

        Args:
            key: 32 secret bytes.
            step: optimizer step, >= 0.

        Returns:
            int64, ascending, without repetition; may be empty.
        """

    @abc.abstractmethod
    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        """What the noisy sums of these batches release, over all chains.

        Args:
            noise_stddev_over_clip: noise stddev of the sum / bound on one record's norm (unitless), > 0. This is
                dp_accounting's ``noise_multiplier`` for every adjacency; its accountants add the factor 2 of
                ``replace_one`` themselves.
            num_steps: optimizer steps, >= 0; a sequence if the run has several chains. A chain is a range of
                consecutive steps under one key; resuming from an older checkpoint starts another one.
        """

    def participation(self, num_steps: int) -> Participation:
        """How often, and how far apart, one record takes part in one chain: what correlated noise can rely on."""
        return Participation(max(1, num_steps))

    def max_participations(self, num_steps: Steps) -> int:
        """Largest number of steps, over all chains, in which one record can take part."""
        return sum(as_chains(num_steps))

    @abc.abstractmethod
    def describe(self, unit: str = "record") -> str:
        """One sentence for the privacy statement.

        Args:
            unit: of privacy, which is what is sampled: "record" or "user".
        """

    @property
    def sample_rate(self) -> float:
        """Fraction of the records in one logical batch, on average."""
        return self.expected_batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every record takes part once on average."""
        return -(-self.num_examples // self.expected_batch_size)

    def check_adjacency(self, adjacency: str) -> None:
        """Refuses an adjacency for which this sampler's event has no proof."""
        if adjacency not in self.adjacencies:
            allowed = " or ".join(f"adjacency={name!r}" for name in self.adjacencies)
            raise DPConfigError(
                f"sampling={self.name!r} has no privacy proof under adjacency={adjacency!r}: "
                f"{self.why_not(adjacency)} Use {allowed}, or sampling='auto'."
            )

    def why_not(self, adjacency: str) -> str:
        """The reason behind a refusal of `check_adjacency`."""
        return "no analysis is known."

    def parameters(self) -> dict[str, Any]:
        """Every public value that fixes the law of the batches; JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}


def as_chains(num_steps: Steps) -> tuple[int, ...]:
    """The steps of each chain."""
    return tuple(num_steps) if isinstance(num_steps, Sequence) else (num_steps,)


def repeat(event: dp_accounting.DpEvent, num_steps: int) -> dp_accounting.DpEvent:
    """The event, ``num_steps`` times over; no event at all for 0 steps."""
    assert num_steps >= 0, num_steps
    return dp_accounting.SelfComposedDpEvent(event, num_steps) if num_steps else dp_accounting.NoOpDpEvent()
