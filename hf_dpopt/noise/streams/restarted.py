"""The noise of a strategy that starts anew: one stream after the other, each with rows of Z of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_dpopt.noise.streams.base import CorrelatedStream, State
from hf_dpopt.randomness.cipher import NoiseSource


class _Later:
    """A source whose row r is row ``first + r`` of another one."""

    def __init__(self, source: NoiseSource, first: int):
        self._source, self._first = source, first
        self.name, self.description = source.name, source.description

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self._source.normal(shape, step=self._first + step, tensor=tensor, device=device)


class RestartedStream(CorrelatedStream):
    """Keeps what the stream of the current copy keeps.

    Args:
        every: steps of a copy.
        make: from a source to the stream of one copy, whose steps count from 0.
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
        self._copies[name] = self._make(_Later(self._source, t - t % self._every))

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        if num_steps % self._every:  # else the next step begins a copy
            self._begin(name, num_steps)
            self._copies[name]._replay(like, name, tensor, num_steps % self._every)

    def _kept(self) -> State:
        return {"copies": {name: stream._kept() for name, stream in self._copies.items()}}

    def _restore(self, state: State) -> None:
        for name, kept in state["copies"].items():
            self._begin(name, self._num_done - 1)
            self._copies[name]._restore(kept)
