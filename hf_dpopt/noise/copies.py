"""Strategies whose steps are dealt out to copies of one strategy, which share no noise.

`Restarted` begins a copy after so many steps. `Phased` has a copy for every kind of step, such as the plain and the
divided steps of DP^2: a copy goes on where it stopped when its kind comes back, and takes back noise of its own kind
alone. The matrix of the run is the interleaving of those of the copies, and its sensitivity is that of the whole: in a
copy's own clock the uses of a record lie closer than in that of the run.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.linalg import block_diag

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, State, StreamCost
from hf_dpopt.noise.workloads import Workload
from hf_dpopt.randomness.cipher import NoiseSource

MAX_GRAM_STEPS = 4096  # steps whose inner products are looked at one by one


class Copies(NoiseStrategy):
    """Copies of a strategy: step t takes the next row of its copy."""

    base: NoiseStrategy
    comes_back: ClassVar[bool]  # whether steps of a copy follow those of another one

    @property
    def anytime(self) -> bool:  # type: ignore[override]
        return self.base.anytime

    @abc.abstractmethod
    def steps_of_copies(self, n: int) -> list[np.ndarray]:
        """Steps of each copy among the first n, ascending."""

    @abc.abstractmethod
    def place(self, t: int) -> tuple[int, int]:
        """Copy of step t, and how many of its steps came before."""

    @abc.abstractmethod
    def step(self, copy: int, clock: int) -> int:
        """Step of the run in which a copy has its step `clock`."""

    @abc.abstractmethod
    def begun(self, n: int) -> list[tuple[int, int]]:
        """Copies that have begun and not ended after n steps, and how many steps each has had."""

    @abc.abstractmethod
    def length(self, copy: int, num_steps: int) -> int:
        """Steps that a copy is made for in a run of so many."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        return self._interleaved(n, self.base.strategy_matrix)

    def noising_matrix(self, n: int) -> np.ndarray:
        return self._interleaved(n, self.base.noising_matrix)

    def _interleaved(self, n: int, matrix: Callable[[int], np.ndarray]) -> np.ndarray:
        copies = [steps for steps in self.steps_of_copies(n) if len(steps)]
        whole, order = block_diag(*[matrix(len(steps)) for steps in copies]), np.argsort(np.concatenate(copies))
        return whole[np.ix_(order, order)] if self.comes_back else whole

    def sensitivity(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies, each with the separation that is left in its clock.

        Exact if no copy is longer than the separation.
        """
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for copy, steps in enumerate(self.steps_of_copies(n)):
            own = self._within(copy, participation)
            worst = [0.0] + [
                self.base.sensitivity(len(steps), dataclasses.replace(own, max_participations=k)) ** 2
                for k in range(1, own.fits(len(steps)) + 1)
            ]
            best = np.array(
                [max(best[j - k] + worst[k] for k in range(min(j, len(worst) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def _within(self, copy: int, participation: Participation) -> Participation:
        """Participation in the clock of a copy."""
        return participation

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        if workload is not None:
            return super().per_query_error(n, workload)
        error, known = np.zeros(n), {0: np.zeros(1)}
        for steps in self.steps_of_copies(n):  # which are independent, so that their variances add up
            if len(steps) not in known:
                known[len(steps)] = np.append(0.0, self.base.per_query_error(len(steps)))
            error += known[len(steps)][np.searchsorted(steps, np.arange(n), side="right")]
        return error

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        copy, clock = self.place(t)
        return self.base.row_norm(clock, None if num_steps is None else self.length(copy, num_steps))

    def check_row_norms(self, num_steps: int) -> None:
        self.base.check_row_norms(max(len(steps) for steps in self.steps_of_copies(num_steps)))

    def _make_stream(self, source: NoiseSource, backend: str, block: int, common: dict[str, Any]) -> NoiseStream:
        def make(copy: int) -> CorrelatedStream:
            rows, steps = _RowsOfCopy(source, self, copy), max(1, self.length(copy, common["num_steps"]))
            stream = self.base.stream(rows, scale=common["scale"], num_steps=steps, backend=backend, block=block)
            assert isinstance(stream, CorrelatedStream), "independent noise is refused at construction"
            return stream

        make(0)  # refuses what it cannot make
        return CopiesStream(self, make, source, **common)


@dataclasses.dataclass(frozen=True)
class Restarted(Copies):
    """A copy of a strategy for every `every` steps: warm restarts, for any number of steps if the base is for any.

    Args:
        base: any strategy but one that restarts by itself, as a tree does (``TreeAggregation(restart_every=..)``).
        every: steps of a copy, >= 1.

    Raises:
        DPConfigError: for a strategy that restarts by itself, and for independent noise.
    """

    base: NoiseStrategy
    every: int
    name: ClassVar[str] = "restarted"
    comes_back: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("every", self.every)
        object.__setattr__(self, "every", int(self.every))
        if self.base.restarted(self.every) is not None:
            raise DPConfigError(f"{self.base.name!r} restarts by itself. Use its own restart_every={self.every}.")

    @property
    def num_bands(self) -> int | None:
        return self.base.num_bands

    def steps_of_copies(self, n: int) -> list[np.ndarray]:
        return [np.arange(first, min(first + self.every, n)) for first in range(0, n, self.every)]

    def place(self, t: int) -> tuple[int, int]:
        return divmod(t, self.every)

    def step(self, copy: int, clock: int) -> int:
        if not 0 <= clock < self.every:
            raise DPConfigError(
                f"A copy of {self.every} steps asked for row {clock} of the noise, which belongs to the next copy. "
                "A strategy that draws more than one row a step has to restart by itself (NoiseStrategy.restarted)."
            )
        return copy * self.every + clock

    def begun(self, n: int) -> list[tuple[int, int]]:
        return [self.place(n)] if n % self.every else []

    def length(self, copy: int, num_steps: int) -> int:
        return min(self.every, num_steps)

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        length = None if num_steps is None else min(num_steps, self.every)
        blocks = []
        for start in range(first - first % self.every, end, self.every):
            here = max(first, start) - start, min(end - start, self.every)
            blocks.append(self.base.noising_rows(*here, length))
        return block_diag(*blocks)

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "every": self.every}

    def cost(self, num_steps: int, *, backend: str = "auto", block: int = 1) -> StreamCost:
        return self.base.cost(min(self.every, num_steps), backend=backend, block=block)


def restart(strategy: NoiseStrategy, every: int) -> NoiseStrategy:
    """The strategy that starts anew after `every` steps, by itself or as copies.

    Raises:
        DPConfigError: for independent noise.
    """
    own = strategy.restarted(every)
    return Restarted(strategy, every) if own is None else own


@dataclasses.dataclass(frozen=True)
class Phases:
    """Kinds of steps that take turns: ``lengths[0]`` steps of kind 0, ``lengths[1]`` of kind 1, .., and again.

    Args:
        lengths: steps of each kind in a period; each >= 1.
    """

    lengths: tuple[int, ...]

    @property
    def period(self) -> int:
        """Steps until the first kind comes back."""
        return sum(self.lengths)

    def kinds(self, n: int) -> np.ndarray:
        """Kind of each of n steps, (n,)."""
        return np.resize(np.repeat(np.arange(len(self.lengths)), self.lengths), n)

    def place(self, t: int) -> tuple[int, int]:
        """Kind of step t, and how many steps of its kind came before."""
        periods, within = divmod(t, self.period)
        for kind, length in enumerate(self.lengths):
            if within < length:
                return kind, periods * length + within
            within -= length
        raise AssertionError(t)

    def count(self, kind: int, n: int) -> int:
        """Number of steps of a kind among the first n."""
        periods, within = divmod(n, self.period)
        return periods * self.lengths[kind] + min(max(within - sum(self.lengths[:kind]), 0), self.lengths[kind])

    def step(self, kind: int, clock: int) -> int:
        """Step of the run in which a kind has its step `clock`."""
        periods, within = divmod(clock, self.lengths[kind])
        return periods * self.period + sum(self.lengths[:kind]) + within

    def closest(self, kind: int, separation: int) -> int:
        """Least distance, in the clock of a kind, of two of its steps that are at least `separation` apart."""
        firsts = [self.step(kind, clock) for clock in range(self.lengths[kind])]
        return min(self.count(kind, t + separation) - self.count(kind, t) for t in firsts)


@dataclasses.dataclass(frozen=True)
class Phased(Copies):
    """A copy of a strategy for every kind of step; step t takes the next row of the copy of its kind.

    Args:
        base: a strategy with one row a step, for any number of steps.
        lengths: steps of each kind in a period; two kinds or more.

    Raises:
        DPConfigError: for fewer than two kinds, and for a strategy that depends on the number of steps, has more rows
            than steps, or is independent.
    """

    base: NoiseStrategy
    lengths: tuple[int, ...]
    name: ClassVar[str] = "phased"
    comes_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for length in self.lengths:
            check_count("lengths", length, "the steps of each kind of phase, integers >= 1")
        object.__setattr__(self, "lengths", tuple(int(length) for length in self.lengths))
        if len(self.lengths) < 2:
            raise DPConfigError("One kind of phase has one stream of noise: use the strategy as it is.")
        if self.base.is_independent or not self.base.is_square or not self.base.anytime:
            raise DPConfigError(
                f"{self.base.name} noise cannot have a stream for each kind of phase: that takes correlated noise "
                "with one row a step that is made for any number of steps. Use nu_dpftrl, blt or banded, or "
                "noise_at_changes='carry_on'."
            )

    @property
    def phases(self) -> Phases:
        """Kinds of steps and their turns."""
        return Phases(self.lengths)

    def steps_of_copies(self, n: int) -> list[np.ndarray]:
        kinds = self.phases.kinds(n)
        return [np.flatnonzero(kinds == kind) for kind in range(len(self.lengths))]

    def place(self, t: int) -> tuple[int, int]:
        return self.phases.place(t)

    def step(self, copy: int, clock: int) -> int:
        return self.phases.step(copy, clock)

    def begun(self, n: int) -> list[tuple[int, int]]:
        counts = enumerate(self.phases.count(kind, n) for kind in range(len(self.lengths)))
        return [(kind, count) for kind, count in counts if count]

    def length(self, copy: int, num_steps: int) -> int:
        return self.phases.count(copy, num_steps)

    def is_orthogonal_every(self, separation: int) -> bool:
        """Whether no copy meets two columns within its bands, of steps that are multiples of `separation` apart."""
        bands, phases = self.base.num_bands, self.phases
        if bands is None:
            return False
        for t in range(phases.period):  # what follows a step repeats with the period
            kind, clock = phases.place(t)
            later = t + separation
            while phases.count(kind, later) - clock < bands:
                if phases.place(later)[0] == kind:
                    return False
                later += separation
        return True

    def sensitivity(self, n: int, participation: Participation) -> float:
        """Largest ``||C u||`` of the whole interleaved matrix.

        Exact for coefficients >= 0 under "fixed_epoch"; from the sizes of the inner products up to `MAX_GRAM_STEPS`
        steps; else an upper bound, from the separation that is left in the clock of each copy.
        """
        if participation.fits(n) == 1:
            return max(self.base.sensitivity(len(s), participation) for s in self.steps_of_copies(n) if len(s))
        coefs = self.base.toeplitz_coefs(n)
        if coefs is not None and (coefs >= 0).all() and participation.kind == "fixed_epoch":
            return self._of_an_epoch(n, participation, coefs)
        if n <= MAX_GRAM_STEPS:
            return NoiseStrategy.sensitivity(self, n, participation)
        return super().sensitivity(n, participation)

    def _of_an_epoch(self, n: int, participation: Participation, coefs: np.ndarray) -> float:
        """The worst offset of a record that comes back after every `min_sep` steps."""
        b, worst = participation.min_sep, 0.0
        counts = [len(steps) for steps in self.steps_of_copies(n)]
        for offset in range(min(b, n)):
            sums = [np.zeros(count) for count in counts]
            for t in range(offset, n, b)[: participation.max_participations]:
                kind, clock = self.phases.place(t)
                sums[kind][clock:] += coefs[: counts[kind] - clock]
            worst = max(worst, sum(float(total @ total) for total in sums))
        return float(np.sqrt(worst))

    def _within(self, copy: int, participation: Participation) -> Participation:
        separation = max(1, self.phases.closest(copy, participation.min_sep))
        return Participation(participation.max_participations, separation)

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        rows = np.zeros((end - first, end))
        for steps in self.steps_of_copies(end):
            asked = steps[steps >= first]
            if len(asked):
                before = len(steps) - len(asked)
                rows[np.ix_(asked - first, steps)] = self.base.noising_rows(before, len(steps))
        return rows

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "lengths": list(self.lengths)}

    def cost(self, num_steps: int, *, backend: str = "auto", block: int = 1) -> StreamCost:
        counts = [count for _, count in self.begun(num_steps)]
        costs = [(n / num_steps, self.base.cost(n, backend=backend, block=block)) for n in counts]
        return StreamCost(
            sum(share * cost.draws for share, cost in costs),
            sum(share * cost.passes for share, cost in costs),
            sum(cost.kept for _, cost in costs),
        )


class _RowsOfCopy(NoiseSource):
    """A source whose row r is the row of another one for the step in which a copy has its step r."""

    def __init__(self, source: NoiseSource, copies: Copies, copy: int):
        self._source, self._copies, self._copy = source, copies, copy
        self.name, self.stream, self.description = source.name, source.stream, source.description  # type: ignore[misc]

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self._source.normal(shape, step=self._row(step), tensor=tensor, device=device)

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        self._source.add_to(totals, stddev=stddev, step=self._row(step))

    def _row(self, step: int) -> int:
        return self._copies.step(self._copy, step)


class CopiesStream(CorrelatedStream):
    """Stream of copies; it keeps what the streams of the copies keep that have begun and not ended.

    Args:
        copies: the strategy.
        make: makes the stream of one copy, whose steps count from 0.
        source: where the streams draw from.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, copies: Copies, make: Callable[[int], CorrelatedStream], source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._copies, self._make = copies, make
        # of each tensor, for one may be ahead of the others; of all together, where no copy is ever dropped
        self._streams: dict[str, dict[int, CorrelatedStream]] = {}

    def _of(self, name: str, copy: int) -> CorrelatedStream:
        """The stream of a copy; it takes the place of one that has ended."""
        streams = self._streams.setdefault("" if self._copies.comes_back else name, {})
        if copy not in streams:
            if not self._copies.comes_back:
                streams.clear()
            streams[copy] = self._make(copy)
        return streams[copy]

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        copy, clock = self._copies.place(t)
        self._of(name, copy)._add_to(total, name, tensor, clock)

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        for copy, done in self._copies.begun(num_steps):
            self._of(name, copy)._replay(like, name, tensor, done)

    def _own_state(self) -> State:
        kept = self._streams.items()
        return {"copies": {name: {i: one._own_state() for i, one in streams.items()} for name, streams in kept}}
