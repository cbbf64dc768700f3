"""Noise by the rows of B as they stand: for every strategy, from draws that are kept or drawn again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.noise.streams.base import CorrelatedStream, State
from hf_dpopt.randomness.cipher import NoiseSource

Rows = Callable[[int], np.ndarray]  # t -> row t of B, (t + 1,)


class HistoryStream(CorrelatedStream):
    """Stream that keeps every draw that a later step uses; each step reads them all.

    Args:
        rows: rows of B.
        source: standard normals under a key that no other stream uses.
        window: last draws, that of the step included, beyond which no row has an entry other than 0; None for all.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, rows: Rows, source: NoiseSource, *, window: int | None = None, **options: Any):
        super().__init__(source, **options)
        self._rows, self._window = rows, window
        self._draws: dict[str, list[torch.Tensor]] = {}  # the last ones

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        draws = self._draws.setdefault(name, [])
        draws.append(self._normal(total, tensor, t))
        weights = self._rows(t)
        assert not weights[: -len(draws)].any(), "a draw that was dropped is needed"
        for weight, draw in zip(weights[-len(draws) :], draws, strict=True):
            if weight:
                total.add_(draw, alpha=self.scale * float(weight))
        if self._window is not None and len(draws) >= self._window:
            del draws[0]

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        first = 0 if self._window is None else max(0, num_steps - self._window + 1)
        self._draws[name] = [self._normal(like, tensor, row) for row in range(first, num_steps)]

    def _own_state(self) -> State:
        return {"draws": self._draws}


class RegeneratedStream(CorrelatedStream):
    """Stream that keeps nothing but what it has worked ahead: earlier draws are made again from the key.

    With `block` K, one pass over all earlier draws serves K steps, whose unfinished outputs are kept: K tensors, and
    1/K of the draws. With K = 1 nothing is kept between steps.
    """

    def __init__(self, rows: Rows, source: NoiseSource, *, block: int = 1, **options: Any):
        super().__init__(source, **options)
        self._rows, self._block = rows, block
        self._ahead: dict[str, list[torch.Tensor]] = {}  # outputs of the block from the current step on, unfinished

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        if t % self._block == 0:
            self._replay(total, name, tensor, t)
        ahead = self._ahead[name]
        self._add_row(ahead, [float(self._rows(t + i)[t]) for i in range(len(ahead))], tensor, t)
        total.add_(ahead.pop(0), alpha=self.scale)

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        self._ahead[name] = self._from_before(like, tensor, num_steps)

    def _from_before(self, total: torch.Tensor, tensor: int, t: int) -> list[torch.Tensor]:
        """Share of the draws before step t in the outputs of the rest of its block."""
        end = min(t - t % self._block + self._block, self._num_steps)
        rows = [self._rows(i) for i in range(t, end)]
        outputs = [torch.zeros_like(total) for _ in rows]
        for s in range(t):
            self._add_row(outputs, [float(row[s]) for row in rows], tensor, s)
        return outputs

    def _add_row(self, outputs: Sequence[torch.Tensor], weights: Sequence[float], tensor: int, row: int) -> None:
        """Add a row of Z, times a weight each, to the outputs of a block; the row is drawn once.

        A block of one has no tensor of the row at all, where the source can add it. It is the size of the block that
        decides, not what is left of it: both ways round differently, and a resumed stream goes on bit for bit.
        """
        used = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight]
        if not used:
            return
        if self._block == 1:
            self._source.add_to({tensor: used[0][0]}, stddev=used[0][1], step=row)
            return
        draw = self._normal(used[0][0], tensor, row)
        for output, weight in used:
            output.add_(draw, alpha=weight)

    def _own_state(self) -> State:
        return {"ahead": self._ahead}
