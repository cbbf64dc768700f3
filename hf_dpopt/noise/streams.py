"""Noise streams that serve several strategies, and their cost: step after step, for all tensors, in float32.

The noise of step t is row t of ``B Z``. The rows of Z are a pure function of (key, row, tensor, element), so a stream
does not depend on ranks, physical batches or devices; what it keeps besides is only there to save drawing again.
Everything here is secret: whoever has it can take the noise off again. A stream of one strategy is in its file.

t = step within the stream, 0-based.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.common.reduction import Layout
from hf_dpopt.randomness.source import NoiseSource

Rows = Callable[[int], np.ndarray]  # t -> row t of B, (t + 1,)
BACKENDS = ("auto", "history", "regenerate")


class NoiseStream(abc.ABC):
    """Noise of one run, step by step, under one key. Secret: whoever has it can take the noise off again."""

    draw_stddev: float  # stddev of a coordinate of the draws Z, scaled; absolute, in gradient units

    @abc.abstractmethod
    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Add the noise of `step` to every coordinate of the float32 `sums`; each step once, in order."""

    @abc.abstractmethod
    def continue_at(self, num_steps: int) -> None:
        """Go on after the first `num_steps` steps, whose noise was added by a stream under the same key."""

    def share_over(self, ranks: Ranks, layout: Layout | None = None) -> None:  # noqa: B027
        """Share the drawing over ranks that have the same sums; streams that keep noise draw all of it on each.

        Args:
            ranks: the processes of the run.
            layout: layout of sums of which each rank has its pieces alone; None where each has all of them.
        """

    def takes_pieces(self, device: torch.device) -> bool:
        """Whether each rank needs the sum of its pieces alone, on that device; all ranks ask together."""
        return False

    def bytes_kept(self) -> int:
        """Memory of the tensors it keeps between steps."""
        return sum(x.numel() * x.element_size() for x in _tensors(self))


class CorrelatedStream(NoiseStream):
    """Correlated noise of one uninterrupted run.

    Formal guarantee: after `add_` for steps 0 .. t, ``scale * (B Z)[0 .. t]`` was added, up to rounding in float32,
    with one row of Z per row of C and every row drawn under its own (key, row). Steps are neither repeated nor left
    out: either would break ``B C = I``, on which the privacy of the whole run rests.

    Args:
        source: standard normals under a key that no other stream uses.
        scale: stddev of a coordinate of ``scale * Z``, absolute, in gradient units.
        num_steps: steps it is made for.
        first_step: step under which the trainer asks for t = 0.

    Raises:
        DPConfigError: for a scale that is not a finite number > 0.
    """

    def __init__(
        self,
        source: NoiseSource,
        *,
        scale: float,
        num_steps: int,
        first_step: int = 0,
    ):
        if not (math.isfinite(scale) and scale > 0):
            raise DPConfigError(f"scale={scale} is not a finite number > 0: noise stddev times clipping norm.")
        self.scale = self.draw_stddev = scale
        self._source, self._first_step, self._num_steps = source, first_step, num_steps
        self.num_steps = 0  # whose noise was added
        self._to_replay = 0  # steps to draw again from the key before the next one
        self._shapes: dict[str, torch.Size] | None = None

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Add the noise of `step` in place, to every coordinate of every tensor.

        Args:
            sums: clipped sums over the whole logical batch, float32; the same names and shapes in every step.
            step: the one after that of the call before.

        Raises:
            DPConfigError: for a step left out or repeated, tensors other than before, or sums that are not float32.
            DPBudgetExceeded: after the steps it was made for.
        """
        t = step - self._first_step
        if t != self.num_steps:
            raise DPConfigError(
                f"The noise of step {step} was asked for after {self.num_steps} steps from {self._first_step} on. "
                "Correlated noise has every step once, in order: a step without a batch still takes its noise."
            )
        shapes = {name: total.shape for name, total in sums.items()}
        if t >= self._num_steps:
            raise DPBudgetExceeded(
                f"This noise was made for {self._num_steps} steps, and the next would have none. Make the stream for "
                "more steps at the start (max_steps)."
            )
        if self._shapes not in (None, shapes):
            raise DPConfigError(
                "The tensors to be noised changed during the run; its noise is for those it began with."
            )
        if any(total.dtype != torch.float32 for total in sums.values()):
            raise DPConfigError("Noise is added to float32 sums: what is rounded before it is noised is not covered.")
        for tensor, name in enumerate(sorted(sums)):
            if self._to_replay:
                self._replay(sums[name], name, tensor, self._to_replay)
            self._add_to(sums[name], name, tensor, t)
        self._shapes, self._to_replay, self.num_steps = shapes, 0, t + 1

    @abc.abstractmethod
    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        """Add ``scale`` times row t to one tensor."""

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        """Bring what is kept for one tensor to where it was after that many steps; costs the noise of all of them."""
        unused = torch.zeros_like(like)
        for t in range(num_steps):
            self._add_to(unused, name, tensor, t)

    def _normal(self, total: torch.Tensor, tensor: int, row: int) -> torch.Tensor:
        return self._source.normal(total.shape, step=row, tensor=tensor, device=total.device)

    def continue_at(self, num_steps: int) -> None:
        """Go on after that many steps of a run that was interrupted, bit for bit.

        What is kept between steps is drawn again from the key before the next one: that takes the time of all draws,
        a few percent of what the steps took, and leaves no noise on any disk.
        """
        assert self.num_steps == 0, "a stream that has begun cannot be moved"
        self.num_steps = self._to_replay = num_steps


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors that a stream keeps, in lists, dicts and streams of its own."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = vars(value) if isinstance(value, NoiseStream) else value
    items = values.values() if isinstance(values, dict) else values
    return [x for item in items for x in _tensors(item)] if isinstance(values, dict | list | tuple) else []


# --- from draws that are kept or drawn again -------------------------------------------------------------------------


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


class RegeneratedStream(CorrelatedStream):
    """Stream that keeps nothing: the draws that a step uses are made again from the key."""

    def __init__(self, rows: Rows, source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._rows = rows

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        noise = torch.zeros_like(total)
        for row, weight in enumerate(self._rows(t)):
            if weight:
                self._source.add_to({tensor: noise}, stddev=float(weight), step=row)
        total.add_(noise, alpha=self.scale)

    def _replay(self, like: torch.Tensor, name: str, tensor: int, num_steps: int) -> None:
        """Nothing is kept, so there is nothing to bring back."""


class RecurrentStream(CorrelatedStream):
    """Noise of a banded Toeplitz C, ``x_t = (z_t - sum_{i=1}^{p-1} c_i x_{t-i}) / c_0``.

    The last p - 1 outputs of every tensor are kept in a ring: they cannot be drawn again.

    Args:
        coefs: c_0 .. c_{p-1} of C; (p,).
        source: standard normals under a key that no other stream uses.
        options: those of `CorrelatedStream`.
    """

    def __init__(self, coefs: Sequence[float], source: NoiseSource, **options: Any):
        super().__init__(source, **options)
        self._coefs = tuple(coefs)
        self._outputs: dict[str, list[torch.Tensor]] = {}  # of step s at s % (p - 1)

    def _add_to(self, total: torch.Tensor, name: str, tensor: int, t: int) -> None:
        output = self._normal(total, tensor, t)
        ring, size = self._outputs.setdefault(name, []), len(self._coefs) - 1
        for i in range(1, min(size, t) + 1):
            output.sub_(ring[(t - i) % size], alpha=self._coefs[i])
        output.div_(self._coefs[0])
        total.add_(output, alpha=self.scale)
        if t < size:
            ring.append(output)
        elif size:
            ring[t % size] = output


# --- cost ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StreamCost:
    """Cost of noise per trained coordinate, on average over the steps of a run.

    Attributes:
        draws: standard normals per step.
        passes: multiply-adds over a tensor per step.
        kept: float32 numbers kept between steps.
    """

    draws: float
    passes: float
    kept: float
