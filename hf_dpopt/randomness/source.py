"""Base class of the sources of noise: standard normals as a pure function of (key, step, tensor, element)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from hf_dpopt.randomness.spans import Part


class NoiseSource(abc.ABC):
    """Standard normals as a pure function of (key, step, tensor, element).

    A subclass writes `normal`; the rest is made of it.
    """

    name: ClassVar[str] = "unnamed"  #: kind, as the option noise_rng spells it
    #: Name and version of the stream, which ledgers write: a resumed run draws from the same one.
    stream: ClassVar[str] = "unnamed"
    description: ClassVar[str] = ""  #: its description in a privacy statement

    @abc.abstractmethod
    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Standard normals, float32, of ``shape`` on ``device``; ``tensor`` numbers the tensor within the step."""

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        """Add ``stddev`` times the normals of a step to tensors, in place.

        Args:
            totals: number of the tensor within the step -> float32 tensor, of any shape.
            stddev: what a normal is multiplied by; in the units of the tensors.
            step: the step.
        """
        for tensor, total in totals.items():
            total.add_(self.normal(total.shape, step=step, tensor=tensor, device=total.device), alpha=stddev)


class AddressedSource(NoiseSource):
    """A source that draws any part of a tensor without the rest of it."""

    @abc.abstractmethod
    def add_parts(self, parts: Sequence[Part], *, stddev: float, step: int) -> None:
        """Add ``stddev`` times the normals of parts of tensors to them, in place; the bits are those of `add_to`."""

    @abc.abstractmethod
    def is_drawn_at(self, device: torch.device) -> bool:
        """Whether a device draws the noise of its tensors itself, so fast that a rank need not share the work."""
