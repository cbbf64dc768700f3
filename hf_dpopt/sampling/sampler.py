"""Contract of a sampler: its batches, the noise they have a proof with, and what a run of the two releases.

`noise_stddev` is that of the draws Z relative to the bound on ONE record (dp_accounting's convention, see
`hf_dpopt.accounting.events`), called sigma_z in the papers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from hf_dpopt.accounting.certificates import Certificate
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy

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
    has_groups: ClassVar[bool] = False  # records take turns in groups, as many as a strategy may have bands
    samples_records_of_users: ClassVar[bool] = False  # with users as the unit; else whole users are sampled
    takes_changing_scales: ClassVar[bool] = False  # correlated noise may go on where scales change: it has a proof
    repeats_one_event: ClassVar[bool] = False  # `event` is one mechanism, as often as a record may take part
    takes: ClassVar[tuple[str, ...]] = ()  # fields that a config of the run gives, besides batch size and examples

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a sampler that draws in its own way and says of its batches what another one says of its own."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        missing = [name for name in ("name", "event", "describe", "adjacencies") if name not in own]
        if "draw" in own and missing:
            raise TypeError(
                f"{cls.__qualname__} draws its own batches, so it needs {' and '.join(missing)} of its own: they "
                "would be those of another law."
            )
        if "event" in own and "excess" not in own:
            cls.excess = Sampler.excess  # type: ignore[method-assign]  # costs of another law are not compared
        if "event" in own and "repeats_one_event" not in own:
            cls.repeats_one_event = False
        if ("event" in own or "draw" in own) and "takes_changing_scales" not in own:
            cls.takes_changing_scales = False  # the proof of another law

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise DPConfigError(
                f"num_examples={self.num_examples}: nothing to sample. Use a dataset with >= 1 record."
            )
        if not 1 <= self.expected_batch_size <= self.num_examples:
            raise DPConfigError(
                f"expected_batch_size={self.expected_batch_size} is outside [1, {self.num_examples}], the size of the "
                "dataset. Use a smaller batch."
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
        """Event of the noisy sums of these batches, over all chains.

        Args:
            noise_stddev_over_clip: noise stddev of the sum / bound on one record's norm (unitless), > 0. This is
                dp_accounting's ``noise_multiplier`` for every adjacency; its accountants add the factor 2 of
                ``replace_one`` themselves.
            num_steps: optimizer steps, >= 0; a sequence if the run has several chains. A chain is a range of
                consecutive steps under one key; resuming from an older checkpoint starts another one.
        """

    def participation(self, num_steps: int) -> Participation:
        """Participation of a record in one chain: how often and how far apart, which correlated noise relies on."""
        return Participation(max(1, num_steps))

    # --- noise -------------------------------------------------------------------------------------------------------

    def refuses(self, strategy: NoiseStrategy) -> str:
        """Reason why a strategy has no proof with these batches, and what would do; empty for one that has.

        A sampler without a rule of its own allows independent noise alone.
        """
        if strategy.is_independent:
            return ""
        return (
            "a record may take part in any step, so the noise of correlated steps does not compose, and no "
            "amplification is known. Use sampling='fixed_order' (or 'cyclic_poisson' for banded noise), or 'auto'."
        )

    def check_strategy(self, strategy: NoiseStrategy) -> None:
        """Refuse a strategy whose noise has no proof with these batches.

        Raises:
            DPConfigError: with the reason, and the samplers that would do.
        """
        if reason := self.refuses(strategy):
            raise DPConfigError(f"{strategy.name} noise with sampling={self.name!r} has no privacy proof: {reason}")

    def sensitivity_of(self, strategy: NoiseStrategy, num_steps: int) -> float:
        """Sensitivity of C that the noise multiplier of `num_steps` steps is relative to; unitless, 1 without C."""
        if strategy.is_independent:
            return 1.0
        return sensitivity_over(strategy, num_steps, self.participation(num_steps))

    def release(
        self, strategy: NoiseStrategy, noise_stddev: float, num_steps: Steps, *, planned_steps: int
    ) -> dp_accounting.DpEvent:
        """Event of the noisy sums of a run with this noise, over all its chains.

        Formal guarantee: every chain has noise of its own, so their events compose (correctness.md, F6: with z shared
        up to a branch, the squared sensitivities add up just the same). The first t steps of an anytime strategy are
        charged as such; of any other, as all `planned_steps`.

        Args:
            strategy: C, which the sampler does not refuse.
            noise_stddev: stddev of the draws / bound on one record; unitless, > 0.
            num_steps: optimizer steps, >= 0; a sequence if the run has several chains.
            planned_steps: those the strategy was made for.

        Raises:
            DPBudgetExceeded: for a chain of more steps than planned, if the strategy is not anytime.
            DPConfigError: for a pair without a proof.
        """
        if strategy.is_independent:
            return self.event(noise_stddev, num_steps)
        self.check_strategy(strategy)
        chains = [charged_steps(strategy, t, planned_steps) for t in as_chains(num_steps) if t > 0]
        events = [self._correlated_event(strategy, noise_stddev, t) for t in chains]
        return dp_accounting.ComposedDpEvent(events) if events else dp_accounting.NoOpDpEvent()

    def _correlated_event(self, strategy: NoiseStrategy, noise_stddev: float, num_steps: int) -> dp_accounting.DpEvent:
        """One chain under a strategy that `refuses` lets pass: without amplification, one Gaussian mechanism."""
        return dp_accounting.GaussianDpEvent(noise_stddev / self.sensitivity_of(strategy, num_steps))

    def excess(self, strategy: NoiseStrategy, chains: Sequence[int], planned: int) -> int | None:
        """Sign of what these steps cost above those planned: 0 for the same, None if only epsilon can tell.

        A sampler without a rule of its own says None: what is compared is then computed.

        Args:
            strategy: C.
            chains: steps that each chain is charged as, > 0.
            planned: steps that the plan is charged as, in one chain.
        """
        return self._excess_of_participations(strategy, chains, planned) if self.repeats_one_event else None

    def _excess_of_participations(self, strategy: NoiseStrategy, chains: Sequence[int], planned: int) -> int | None:
        """`excess` where the event is one mechanism, as often as a record may take part."""
        if len({self.sensitivity_of(strategy, t) for t in (*chains, planned)}) > 1:
            return None  # a chain shorter than the bands has columns of other norms
        return self.max_participations(chains) - self.max_participations(planned)

    def certify(
        self, strategy: NoiseStrategy, noise_stddev: float, num_steps: int, delta: float, *, num_samples: int
    ) -> Certificate | None:
        """Proof by samples of the epsilon of one chain; None where the computed one is as good."""
        return None

    def calibrate(
        self, strategy: NoiseStrategy, num_steps: int, *, epsilon: float, delta: float, num_samples: int
    ) -> Certificate | None:
        """Certificate of the least noise that samples prove; None where a computation finds it."""
        return None

    def steps_for_log(self, num_steps: int, planned: int) -> int:
        """Return so many steps, or a few more whose epsilon is known sooner, which a log line may show."""
        return num_steps

    def with_groups(self, num_groups: int) -> Sampler:
        """The same with another number of groups; itself where there are none."""
        return self

    # --- what it promises --------------------------------------------------------------------------------------------

    def max_participations(self, num_steps: Steps) -> int:
        """Largest number of steps, over all chains, in which one record can take part."""
        return sum(as_chains(num_steps))

    @abc.abstractmethod
    def describe(self, unit: str = "record") -> str:
        """One sentence for the privacy statement.

        Args:
            unit: unit of privacy, which is what is sampled: "record" or "user".
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
        """Refuse an adjacency for which this sampler's event has no proof."""
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


@functools.lru_cache(maxsize=4096)
def sensitivity_over(strategy: NoiseStrategy, num_steps: int, participation: Participation) -> float:
    """Sensitivity of C over the participation patterns, which a calibration asks for many times."""
    return strategy.sensitivity(num_steps, participation)


def charged_steps(strategy: NoiseStrategy, num_steps: int, planned_steps: int) -> int:
    """Steps that a chain is charged as: its own under an anytime strategy, else all that were planned.

    Raises:
        DPBudgetExceeded: for more steps than planned, if the strategy is not anytime.
    """
    if strategy.anytime:
        return num_steps
    if num_steps > planned_steps:
        raise DPBudgetExceeded(
            f"{strategy.name} noise was made for {planned_steps} steps, and {num_steps} were asked for. Plan more "
            "steps, or use a mechanism without a horizon (nu_dpftrl, blt, banded, honaker)."
        )
    return planned_steps


def as_chains(num_steps: Steps) -> tuple[int, ...]:
    """The steps of each chain."""
    return tuple(num_steps) if isinstance(num_steps, Sequence) else (num_steps,)


def repeat(event: dp_accounting.DpEvent, num_steps: int) -> dp_accounting.DpEvent:
    """The event, ``num_steps`` times over; no event at all for 0 steps."""
    assert num_steps >= 0, num_steps
    return dp_accounting.SelfComposedDpEvent(event, num_steps) if num_steps else dp_accounting.NoOpDpEvent()
