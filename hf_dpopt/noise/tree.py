"""Tree aggregation: noise on the nodes of a binary tree over the steps, and two ways to read prefix sums off it.

A node is a complete aligned block of ``2^h`` steps; C has a row of ones over the steps of every node.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch

from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, StreamCost
from hf_dpopt.randomness.source import NoiseSource

Variant = Literal["vanilla", "honaker"]


@dataclasses.dataclass(frozen=True)
class TreeAggregation(NoiseStrategy):
    """Binary tree aggregation.

    Args:
        variant: "vanilla" adds up the nodes of a prefix; "honaker" first improves every node by those below it.
        restart_every: steps after which a new tree starts; None for one tree.
        tree_completion: complete the tree at a restart by steps without gradient, so that what is carried over is one
            root and not the nodes of a prefix.

    References:
        Kairouz et al. (2021), arXiv:2103.00039 (DP-FTRL; Appendix D for the completion); Honaker (2015).
    """

    variant: Variant = "honaker"
    restart_every: int | None = None
    tree_completion: bool = True
    name: ClassVar[str] = "tree"
    anytime: ClassVar[bool] = True
    is_square: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, get_args(Variant))
        if self.restart_every is not None:
            check_count("restart_every", self.restart_every)
            object.__setattr__(self, "restart_every", int(self.restart_every))

    def restarted(self, every: int) -> NoiseStrategy | None:
        return dataclasses.replace(self, restart_every=every)

    def _blocks(self, n: int) -> list[tuple[int, int, int]]:
        """First step, end, and steps of the tree of every block."""
        every = self.restart_every or n
        size = _power_at_least(every) if self.restart_every and self.tree_completion else every
        return [
            (first, min(first + every, n), size if first + every <= n else min(every, n - first))
            for first in range(0, n, every)
        ]

    def strategy_matrix(self, n: int) -> np.ndarray:
        rows = []
        for first, end, size in self._blocks(n):
            of_block = _tree(size).nodes[:, : end - first]
            rows.append(np.zeros((len(of_block), n)))
            rows[-1][:, first:end] = of_block
        return np.concatenate(rows)

    def noising_matrix(self, n: int) -> np.ndarray:
        blocks = self._blocks(n)
        num_nodes = [len(_tree(size).nodes) for _, _, size in blocks]
        prefixes, carried, column = np.zeros((n, sum(num_nodes))), np.zeros(sum(num_nodes)), 0
        for (first, end, size), count in zip(blocks, num_nodes, strict=True):
            of_prefixes = _tree(size).prefix_decoder(self.variant)
            prefixes[first:end] = carried
            prefixes[first:end, column : column + count] = of_prefixes[: end - first]
            carried[column : column + count] = of_prefixes[-1]
            column += count
        return np.diff(prefixes, axis=0, prepend=0.0)

    def sensitivity(self, n: int, participation: Participation) -> float:
        if participation.kind == "fixed_epoch":  # that of all samplers that a tree has a proof with
            return self._epoch_sensitivity(n, participation)
        return super().sensitivity(n, participation)

    def _epoch_sensitivity(self, n: int, participation: Participation) -> float:
        """Exact, for steps ``o, o + b, ..``: the nodes count how many of them they hold, without any matrix."""
        worst = 0
        for offset in range(min(participation.min_sep, n)):
            steps = np.arange(offset, n, participation.min_sep)[: participation.max_participations]
            total = 0
            for first, end, size in self._blocks(n):
                inside = steps[(steps >= first) & (steps < end)] - first
                for height in range(size.bit_length()):
                    hits = np.bincount(inside >> height)[: size >> height]  # nodes that are completed
                    total += int(hits @ hits)
            worst = max(worst, total)
        return float(np.sqrt(worst))

    def check_row_norms(self, num_steps: int) -> None:
        """Nothing to refuse: a step adds up at most log2(n) nodes, and takes as many back."""

    def cost(self, num_steps: int, *, backend: str = "auto") -> StreamCost:
        levels = min(self.restart_every or num_steps, num_steps).bit_length()
        return StreamCost(2, 2 + levels / 2, 1 + levels / 2)

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        if backend != "auto":
            raise DPConfigError("A tree draws its nodes as they are completed: leave backend='auto'.")
        return TreeStream(self, source, **common)


def _power_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Tree:
    """The complete nodes over n steps, (nodes, n) of ones and zeros, by level."""

    def __init__(self, n: int):
        self.n = n
        self.index: dict[tuple[int, int], int] = {}  # (height, first step) -> row
        for height in range(n.bit_length()):
            for first in range(0, n - (1 << height) + 1, 1 << height):
                self.index[height, first] = len(self.index)
        self.nodes = np.zeros((len(self.index), n))
        for (height, first), row in self.index.items():
            self.nodes[row, first : first + (1 << height)] = 1

    def prefix_decoder(self, variant: Variant) -> np.ndarray:
        """Row t: how the sum of the first t + 1 steps is read off the nodes, (n, nodes)."""
        estimates = self._estimates() if variant == "honaker" else np.eye(len(self.nodes))
        decoder = np.zeros((self.n, len(self.nodes)))
        for t in range(1, self.n + 1):
            first = 0
            for height in range(t.bit_length() - 1, -1, -1):  # the blocks of the binary digits of t
                if t >> height & 1:
                    decoder[t - 1] += estimates[self.index[height, first]]
                    first += 1 << height
        return decoder

    def _estimates(self) -> np.ndarray:
        """Row of a node: its own draw and those below it, weighted by their precision, (nodes, nodes)."""
        estimates, variance = np.zeros((len(self.nodes), len(self.nodes))), 1.0
        for (height, first), row in self.index.items():  # from the leaves up
            if height == 0:
                estimates[row, row] = 1.0
                continue
            variance = 2 ** (height - 1) / (2**height - 1)  # of an estimate one level below
            own = 2 * variance / (1 + 2 * variance)
            half = 1 << (height - 1)
            below = (
                estimates[self.index[height - 1, first]] + estimates[self.index[height - 1, first + half]]
            )  # fmt: skip
            estimates[row] = (1 - own) * below
            estimates[row, row] = own
        return estimates


@functools.lru_cache(maxsize=8)
def _tree(n: int) -> _Tree:
    return _Tree(n)


# --- stream ----------------------------------------------------------------------------------------------------------


class TreeStream(CorrelatedStream):
    """Stream with the noise, per tensor, of the last prefix and of at most ``log2(steps) + 1`` complete subtrees."""

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
        """Draw the leaf of a step and every node that it completes."""
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
        """Carry a finished tree over: completed to its root, or as its last prefix."""
        every = self._strategy.restart_every
        assert every is not None
        if self._strategy.tree_completion:
            size = 1 << (every - 1).bit_length()
            for place in range(every, size):
                self._grow(total, name, tensor, first=t - every, place=place)
        done = torch.stack([estimate for _, estimate in self._open.pop(name)]).sum(dim=0)
        self._carried[name] = done if name not in self._carried else self._carried[name].add_(done)


HEIGHTS = 64


def _row(height: int, place: int, first: int) -> int:
    """Row of Z of the node of that height which step `place` of the tree from step `first` on completes.

    A tree of R steps is completed to fewer than 2 R: ``2 first + place`` tells its steps from those of the others.
    """
    return (2 * first + place) * HEIGHTS + height


# --- mechanisms ------------------------------------------------------------------------------------------------------

MAX_MATRIX_STEPS = 4096  # the error of a tree needs its matrices


@register(
    "tree",
    sampler="fixed_order",
    summary="binary tree aggregation",
    compared_with=("fixed_order",),
    max_compared_steps=MAX_MATRIX_STEPS,
)
def tune_tree(setting: Setting) -> NoiseStrategy:
    """Nothing to tune."""
    return TreeAggregation("vanilla")


@register(
    "honaker",
    sampler="fixed_order",
    summary="binary tree with Honaker's estimates",
    compared_with=("fixed_order",),
    max_compared_steps=MAX_MATRIX_STEPS,
)
def tune_honaker(setting: Setting) -> NoiseStrategy:
    """Nothing to tune."""
    return TreeAggregation("honaker")
