"""Restarts: a copy of a strategy for every so many steps; copies share no noise.

The matrix of the run is block-diagonal, and its sensitivity is that of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.linalg import block_diag

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, StreamCost
from hf_dpopt.noise.workloads import Workload
from hf_dpopt.randomness.source import NoiseSource


@dataclasses.dataclass(frozen=True)
class Restarted(NoiseStrategy):
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
            raise DPConfigError(f"{self.base.name!r} restarts by itself. Use its own restart_every={self.every}.")

    @property
    def anytime(self) -> bool:  # type: ignore[override]
        return self.base.anytime

    @property
    def num_bands(self) -> int | None:
        return self.base.num_bands

    def _lengths(self, n: int) -> list[int]:
        """Steps of each copy in a run of n."""
        return [min(self.every, n - first) for first in range(0, n, self.every)]

    def strategy_matrix(self, n: int) -> np.ndarray:
        return block_diag(*map(self.base.strategy_matrix, self._lengths(n)))

    def noising_matrix(self, n: int) -> np.ndarray:
        return block_diag(*map(self.base.noising_matrix, self._lengths(n)))

    def sensitivity(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies. Exact if no copy is longer than the separation."""
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for length in self._lengths(n):
            worst = [0.0] + [
                self.base.sensitivity(length, dataclasses.replace(participation, max_participations=k)) ** 2
                for k in range(1, participation.fits(length) + 1)
            ]
            best = np.array(
                [max(best[j - k] + worst[k] for k in range(min(j, len(worst) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        if workload is not None:
            return super().per_query_error(n, workload)
        errors: list[np.ndarray] = [np.zeros(1)]
        of_length = {length: self.base.per_query_error(length) for length in set(self._lengths(n))}
        for length in self._lengths(n):  # copies are independent, so that their variances add up
            errors.append(errors[-1][-1] + of_length[length])
        return np.concatenate(errors)[1:]

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return self.base.row_norm(t % self.every, None if num_steps is None else min(self.every, num_steps))

    def check_row_norms(self, num_steps: int) -> None:
        self.base.check_row_norms(min(self.every, num_steps))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        length = None if num_steps is None else min(num_steps, self.every)
        blocks = []
        for start in range(first - first % self.every, end, self.every):
            here = max(first, start) - start, min(end - start, self.every)
            blocks.append(self.base.noising_rows(*here, length))
        return block_diag(*blocks)

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "every": self.every}

    def cost(self, num_steps: int, *, backend: str = "auto") -> StreamCost:
        return self.base.cost(min(self.every, num_steps), backend=backend)

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        steps = min(self.every, common["num_steps"])

        def make(copy: int) -> CorrelatedStream:
            rows = _RowsOfCopy(source, copy, self.every)
            stream = self.base.stream(rows, scale=common["scale"], num_steps=steps, backend=backend)
            assert isinstance(stream, CorrelatedStream), "independent noise is refused at construction"
            return stream

        make(0)  # refuses what it cannot make
        return RestartedStream(self.every, make, source, **common)


def restart(strategy: NoiseStrategy, every: int) -> NoiseStrategy:
    """The strategy that starts anew after `every` steps, by itself or as copies.

    Raises:
        DPConfigError: for independent noise.
    """
    own = strategy.restarted(every)
    return Restarted(strategy, every) if own is None else own


class _RowsOfCopy(NoiseSource):
    """A source whose row r is the row of another one for the step in which a copy has its step r."""

    def __init__(self, source: NoiseSource, copy: int, every: int):
        self._source, self._copy, self._every = source, copy, every
        self.stream, self.description = source.stream, source.description  # type: ignore[misc]

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self._source.normal(shape, step=self._row(step), tensor=tensor, device=device)

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        self._source.add_to(totals, stddev=stddev, step=self._row(step))

    def _row(self, step: int) -> int:
        if not 0 <= step < self._every:
            raise DPConfigError(
                f"A copy of {self._every} steps asked for row {step} of the noise, which belongs to the next copy. "
                "A strategy that draws more than one row a step has to restart by itself (NoiseStrategy.restarted)."
            )
        return self._copy * self._every + step


class RestartedStream(CorrelatedStream):
    """Stream of copies; it keeps what the stream of the current copy keeps.

    Args:
        every: steps of a copy.
        make: makes the stream of one copy, whose steps count from 0.
        source: where the streams draw from.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, every: int, make: Callable[[int], CorrelatedStream], source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._every, self._make = every, make
        self._copies: dict[str, tuple[int, CorrelatedStream]] = {}  # of each tensor: one may be ahead of the others

    def _of(self, name: str, copy: int) -> CorrelatedStream:
        """The stream of a copy; it takes the place of the one before, which has ended."""
        if name not in self._copies or self._copies[name][0] != copy:
            self._copies[name] = copy, self._make(copy)
        return self._copies[name][1]

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        copy, clock = divmod(t, self._every)
        self._of(name, copy)._add_to(total, name, tensor, clock)

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        copy, done = divmod(num_steps, self._every)
        if done:
            self._of(name, copy)._replay(like, name, tensor, done)
