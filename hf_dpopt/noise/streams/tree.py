"""Tree noise, online: nodes are drawn when they are complete; estimates of open subtrees wait on a stack."""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.noise.streams.base import CorrelatedStream, State
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.randomness.cipher import NoiseSource


class TreeStream(CorrelatedStream):
    """Keeps, per tensor, the noise of the last prefix and of at most ``log2(steps) + 1`` complete subtrees."""

    def __init__(self, strategy: TreeAggregation, source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._strategy = strategy
        self._carried: dict[str, torch.Tensor] = {}  # noise of the finished trees
        self._last: dict[str, torch.Tensor] = {}  # noise of the last prefix
        self._open: dict[str, list[tuple[int, torch.Tensor]]] = {}  # (height, estimate) of complete subtrees

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        every = self._strategy.restart_every
        place = t if every is None else t % every
        if place == 0 and t > 0:
            self._close(total, name, tensor, t)
        self._grow(total, name, tensor, first=t - place, place=place)
        prefix = torch.stack([estimate for _, estimate in self._open[name]]).sum(dim=0)
        if name in self._carried:
            prefix += self._carried[name]
        total.add_(prefix, alpha=self.scale)
        if name in self._last:
            total.sub_(self._last[name], alpha=self.scale)
        self._last[name] = prefix

    def _grow(self, total: torch.Tensor, name: str, tensor: int, *, first: int, place: int) -> None:
        """Draws the leaf of a step and every node that it completes."""
        stack = self._open.setdefault(name, [])
        height, estimate = 0, self._normal(total, tensor, _row(0, place, first))
        while stack and stack[-1][0] == height:
            below = stack.pop()[1].add_(estimate)
            height += 1
            estimate = self._normal(total, tensor, _row(height, place, first))
            if self._strategy.variant == "honaker":
                variance = 2 ** (height - 1) / (2**height - 1)  # of an estimate one level below
                own = 2 * variance / (1 + 2 * variance)
                estimate.mul_(own).add_(below, alpha=1 - own)
        stack.append((height, estimate))

    def _close(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        """Carries a finished tree over: completed to its root, or as its last prefix."""
        every = self._strategy.restart_every
        assert every is not None
        if self._strategy.tree_completion:
            size = 1 << (every - 1).bit_length()
            for place in range(every, size):
                self._grow(total, name, tensor, first=t - every, place=place)
        done = torch.stack([estimate for _, estimate in self._open.pop(name)]).sum(dim=0)
        self._carried[name] = done if name not in self._carried else self._carried[name].add_(done)

    def _kept(self) -> State:
        return {"carried": self._carried, "last": self._last, "open": self._open}

    def _restore(self, state: State) -> None:
        self._carried, self._last, self._open = state["carried"], state["last"], state["open"]


HEIGHTS = 64


def _row(height: int, place: int, first: int) -> int:
    """Row of Z of the node of that height which step `place` of the tree from step `first` on completes.

    A tree of R steps is completed to fewer than 2 R: ``2 first + place`` tells its steps from those of the others.
    """
    return (2 * first + place) * HEIGHTS + height
