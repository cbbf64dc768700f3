"""A stream of noise for every kind of phase: each goes on where it stopped when its phase comes back.

Steps of a run that take turns in kinds, such as the plain and the divided steps of DP^2, take back the noise of their
own kind alone. The matrix of the run is the interleaving of one copy of a strategy per kind; its sensitivity is that
of the whole matrix, for in a copy's own clock the uses of a record lie closer than in that of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, State, StreamCost
from hf_dpopt.noise.streams.base import UNUSED_ROW
from hf_dpopt.noise.workloads import Workload
from hf_dpopt.randomness.cipher import NoiseSource

MAX_GRAM_STEPS = 4096  # steps whose inner products are looked at one by one


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
class Phased(NoiseStrategy):
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
    anytime: ClassVar[bool] = True

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

    def _copies(self, n: int) -> list[np.ndarray]:
        """Steps of each kind among the first n."""
        kinds = self.phases.kinds(n)
        return [np.flatnonzero(kinds == kind) for kind in range(len(self.lengths))]

    def _interleaved(self, n: int, matrix: Callable[[int], np.ndarray]) -> np.ndarray:
        whole = np.zeros((n, n))
        for steps in self._copies(n):
            if len(steps):
                whole[np.ix_(steps, steps)] = matrix(len(steps))
        return whole

    def strategy_matrix(self, n: int) -> np.ndarray:
        return self._interleaved(n, self.base.strategy_matrix)

    def noising_matrix(self, n: int) -> np.ndarray:
        return self._interleaved(n, self.base.noising_matrix)

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
            return max(self.base.sensitivity(len(steps), participation) for steps in self._copies(n) if len(steps))
        coefs = self.base.toeplitz_coefs(n)
        if coefs is not None and (coefs >= 0).all() and participation.kind == "fixed_epoch":
            return self._of_an_epoch(n, participation, coefs)
        if n <= MAX_GRAM_STEPS:
            return super().sensitivity(n, participation)
        return self._bound(n, participation)

    def _of_an_epoch(self, n: int, participation: Participation, coefs: np.ndarray) -> float:
        """The worst offset of a record that comes back after every `min_sep` steps."""
        b, worst = participation.min_sep, 0.0
        counts = [len(steps) for steps in self._copies(n)]
        for offset in range(min(b, n)):
            sums = [np.zeros(count) for count in counts]
            for t in range(offset, n, b)[: participation.max_participations]:
                kind, clock = self.phases.place(t)
                sums[kind][clock:] += coefs[: counts[kind] - clock]
            worst = max(worst, sum(float(total @ total) for total in sums))
        return float(np.sqrt(worst))

    def _bound(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies, each with its least separation."""
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for kind, steps in enumerate(self._copies(n)):
            separation = max(1, self.phases.closest(kind, participation.min_sep))
            own = Participation(participation.max_participations, separation)
            squares = [0.0] + [
                self.base.sensitivity(len(steps), dataclasses.replace(own, max_participations=k)) ** 2
                for k in range(1, own.fits(len(steps)) + 1)
            ]
            best = np.array(
                [max(best[j - k] + squares[k] for k in range(min(j, len(squares) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        if workload is not None:
            return super().per_query_error(n, workload)
        kinds, error = self.phases.kinds(n), np.zeros(n)
        for kind, steps in enumerate(self._copies(n)):
            own = np.concatenate([[0.0], self.base.per_query_error(len(steps))]) if len(steps) else np.zeros(1)
            error += own[np.cumsum(kinds == kind)]  # streams of different kinds are independent
        return error

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return self.base.row_norm(self.phases.place(t)[1])

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        rows = np.zeros((end - first, end))
        for steps in self._copies(end):
            asked = steps[steps >= first]
            if len(asked):
                before = len(steps) - len(asked)
                rows[np.ix_(asked - first, steps)] = self.base.noising_rows(before, len(steps))
        return rows

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "lengths": list(self.lengths)}

    def check_row_norms(self, num_steps: int) -> None:
        self.base.check_row_norms(max(len(steps) for steps in self._copies(num_steps)))

    def cost(self, num_steps: int, *, backend: str = "auto", block: int = 1) -> StreamCost:
        shares = [(len(steps), steps) for steps in self._copies(num_steps) if len(steps)]
        costs = [(count / num_steps, self.base.cost(count, backend=backend, block=block)) for count, _ in shares]
        return StreamCost(
            sum(share * cost.draws for share, cost in costs),
            sum(share * cost.passes for share, cost in costs),
            sum(cost.kept for _, cost in costs),
        )

    def _make_stream(self, source: NoiseSource, backend: str, block: int, common: dict[str, Any]) -> NoiseStream:
        streams = []
        for kind in range(len(self.lengths)):
            steps = max(1, self.phases.count(kind, common["num_steps"]))
            stream = self.base.stream(
                _OfKind(source, self.phases, kind),
                scale=common["scale"],
                num_steps=steps,
                backend=backend,
                block=block,
            )
            assert isinstance(stream, CorrelatedStream), "independent noise is refused at construction"
            streams.append(stream)
        return PhasedStream(self.phases, streams, source, **common)


class _OfKind(NoiseSource):
    """A source whose row r is the row of another one for the step in which a kind has its step r."""

    def __init__(self, source: NoiseSource, phases: Phases, kind: int):
        self._source, self._phases, self._kind = source, phases, kind
        self.name, self.stream, self.description = source.name, source.stream, source.description  # type: ignore[misc]

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self._source.normal(shape, step=self._row(step), tensor=tensor, device=device)

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        self._source.add_to(totals, stddev=stddev, step=self._row(step))

    def _row(self, step: int) -> int:
        return step if step == UNUSED_ROW else self._phases.step(self._kind, step)


class PhasedStream(CorrelatedStream):
    """Stream of a phased strategy; it keeps what the streams of all kinds keep.

    Args:
        phases: kinds of steps and their turns.
        streams: stream of each kind, whose steps count from 0 and which no one else uses.
        source: where the streams draw from.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, phases: Phases, streams: Sequence[CorrelatedStream], source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._phases, self._streams = phases, tuple(streams)

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        kind, clock = self._phases.place(t)
        self._streams[kind]._add_to(total, name, tensor, clock)

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        for kind, stream in enumerate(self._streams):
            if done := self._phases.count(kind, num_steps):
                stream._replay(like, name, tensor, done)

    def _own_state(self) -> State:
        return {"streams": [stream._own_state() for stream in self._streams]}

    def _restore(self, state: State) -> None:
        for stream, kept in zip(self._streams, state["streams"], strict=True):
            stream._restore(kept)
