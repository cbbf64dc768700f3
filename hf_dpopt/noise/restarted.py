"""Strategies that start anew: no noise is shared across a restart."""

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
from hf_dpopt.noise.streams.base import UNUSED_ROW
from hf_dpopt.noise.workloads import Workload
from hf_dpopt.randomness.cipher import NoiseSource


class _Blocks(NoiseStrategy):
    """A block-diagonal matrix of copies of one strategy."""

    base: NoiseStrategy

    @abc.abstractmethod
    def _lengths(self, n: int) -> list[int]:
        """Steps of every copy in a run of n steps."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.strategy_matrix(length) for length in self._lengths(n)])

    def noising_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.noising_matrix(length) for length in self._lengths(n)])

    def sensitivity(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies; exact if a copy is no longer than the separation."""
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for length in self._lengths(n):
            worst = self._squares(length, participation)
            best = np.array(
                [max(best[j - k] + worst[k] for k in range(min(j, len(worst) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        if workload is not None:
            return super().per_query_error(n, workload)
        done, parts, known = 0.0, [], dict[int, np.ndarray]()
        for length in self._lengths(n):
            if length not in known:
                known[length] = self.base.per_query_error(length)
            parts.append(done + known[length])  # what a copy left is taken back by none after it
            done += float(known[length][-1])
        return np.concatenate(parts)

    def _squares(self, length: int, participation: Participation) -> list[float]:
        """Squared sensitivity of a copy to 0, 1, .. participations."""
        several = range(1, participation.fits(length) + 1)
        return [0.0] + [
            self.base.sensitivity(length, dataclasses.replace(participation, max_participations=k)) ** 2
            for k in several
        ]


@dataclasses.dataclass(frozen=True)
class Stamped(_Blocks):
    """`repeats` copies of a strategy, one after the other: no noise is shared across the restarts.

    Args:
        base: any strategy.
        repeats: number of copies; a copy lasts ``ceil(n / repeats)`` steps.
    """

    base: NoiseStrategy
    repeats: int
    name: ClassVar[str] = "stamped"
    anytime: ClassVar[bool] = False
    default_backend: ClassVar[str] = "regenerate"

    def __post_init__(self) -> None:
        check_count("repeats", self.repeats)
        object.__setattr__(self, "repeats", int(self.repeats))

    def _lengths(self, n: int) -> list[int]:
        length = -(-n // self.repeats)
        return [min(length, n - first) for first in range(0, n, length)]

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "repeats": self.repeats}


@dataclasses.dataclass(frozen=True)
class Restarted(_Blocks):
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

    def __post_init__(self) -> None:
        check_count("every", self.every)
        object.__setattr__(self, "every", int(self.every))
        if self.base.restarted(self.every) is not None:
            raise DPConfigError("A tree restarts by itself: use TreeAggregation(restart_every=..).")

    @property
    def anytime(self) -> bool:  # type: ignore[override]
        return self.base.anytime

    @property
    def num_bands(self) -> int | None:
        return self.base.num_bands

    def _lengths(self, n: int) -> list[int]:
        return [min(self.every, n - first) for first in range(0, n, self.every)]

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return self.base.row_norm(t % self.every, None if num_steps is None else min(num_steps, self.every))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        length = None if num_steps is None else min(num_steps, self.every)
        blocks = []
        for start in range(first - first % self.every, end, self.every):
            here = max(first, start) - start, min(end - start, self.every)
            blocks.append(self.base.noising_rows(*here, length))
        return block_diag(*blocks)

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "every": self.every}

    def check_row_norms(self, num_steps: int) -> None:
        self.base.check_row_norms(min(self.every, num_steps))

    def cost(self, num_steps: int, *, backend: str = "auto", block: int = 1) -> StreamCost:
        return self.base.cost(min(self.every, num_steps), backend=backend, block=block)

    def _make_stream(self, source: NoiseSource, backend: str, block: int, common: dict[str, Any]) -> NoiseStream:
        steps = min(self.every, common["num_steps"])

        def copy(later: NoiseSource) -> CorrelatedStream:
            stream = self.base.stream(later, scale=common["scale"], num_steps=steps, backend=backend, block=block)
            assert isinstance(stream, CorrelatedStream), "independent noise is refused at construction"
            return stream

        copy(source)  # refuses what it cannot make
        return RestartedStream(self.every, copy, source, **common)


def restart(strategy: NoiseStrategy, every: int) -> NoiseStrategy:
    """The strategy that starts anew after `every` steps, by itself or as copies.

    Raises:
        DPConfigError: for independent noise.
    """
    own = strategy.restarted(every)
    return Restarted(strategy, every) if own is None else own


class _Later(NoiseSource):
    """A source whose row r is row ``first + r`` of another one, for the rows of one copy and no more."""

    def __init__(self, source: NoiseSource, first: int, num_rows: int):
        self._source, self._first, self._num_rows = source, first, num_rows
        self.name, self.stream, self.description = source.name, source.stream, source.description  # type: ignore[misc]

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self._source.normal(shape, step=self._row(step), tensor=tensor, device=device)

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        self._source.add_to(totals, stddev=stddev, step=self._row(step))

    def _row(self, step: int) -> int:
        if step != UNUSED_ROW and not 0 <= step < self._num_rows:
            raise DPConfigError(
                f"A copy of {self._num_rows} steps asked for row {step} of the noise, which belongs to the next copy. "
                "A strategy that draws more than one row a step has to restart by itself (NoiseStrategy.restarted)."
            )
        return self._first + step


class RestartedStream(CorrelatedStream):
    """Stream of a restarted strategy; it keeps what the stream of the current copy keeps.

    Args:
        every: steps of a copy.
        make: makes the stream of one copy, whose steps count from 0, from a source.
    """

    def __init__(
        self, every: int, make: Callable[[NoiseSource], CorrelatedStream], source: NoiseSource, **options: Any
    ):
        super().__init__(source, **options)
        self._every, self._make = every, make
        self._copies: dict[str, CorrelatedStream] = {}  # of every tensor, the one in progress

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        if t % self._every == 0:
            self._begin(name, t)
        self._copies[name]._add_to(total, name, tensor, t % self._every)

    def _begin(self, name: str, t: int) -> None:
        self._copies[name] = self._make(_Later(self._source, t - t % self._every, self._every))

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        if num_steps % self._every:  # else the next step begins a copy
            self._begin(name, num_steps)
            self._copies[name]._replay(like, name, tensor, num_steps % self._every)

    def _own_state(self) -> State:
        return {"copies": {name: stream._own_state() for name, stream in self._copies.items()}}

    def _restore(self, state: State) -> None:
        for name, kept in state["copies"].items():
            self._begin(name, self._num_done - 1)
            self._copies[name]._restore(kept)
