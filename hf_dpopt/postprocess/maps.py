"""Base classes of the maps of released gradients, and the level of the noise that some of them correct for."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Gradients, Released


class NoiseLevel(Protocol):
    """The noise of the latest release, per coordinate of the mean gradient; public. Never typed in by the user."""

    def variance(self) -> float:
        """Variance of a coordinate of the latest released mean gradient, gradient units squared; 0 without noise."""

    def variance_of_draw(self) -> float:
        """Variance, in a coordinate of the mean, of a draw that the noise of all steps is made of; as it was added."""

    def covariance(self, lag: int) -> float:
        """Covariance of that coordinate's noise with its noise `lag` >= 1 releases before; 0 if it is independent."""

    def variance_of_mean(self, num_steps: int) -> float:
        """Variance of the mean of that coordinate over the latest `num_steps` releases."""


@dataclasses.dataclass(frozen=True)
class IndependentNoise:
    """Noise of one stddev in every step, independent over the steps.

    Args:
        stddev: stddev of a coordinate of the released mean gradient, gradient units; >= 0.
    """

    stddev: float = 0.0

    def variance(self) -> float:
        return self.stddev**2

    def variance_of_draw(self) -> float:
        return self.stddev**2

    def covariance(self, lag: int) -> float:
        return 0.0

    def variance_of_mean(self, num_steps: int) -> float:
        return self.variance() / num_steps


class Postprocess(abc.ABC):
    """A map of the released mean gradient, called once per optimizer step; it may keep state."""

    @abc.abstractmethod
    def __call__(self, released: Released, /) -> Released:
        """Parameter name -> float32 tensor of the parameter's shape, to the same."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors, numbers, texts, and lists and dicts of them; {} if there is none."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, bit for bit."""

    @property
    def gain(self) -> float | None:
        """Factor of the latest release; None if that is not one number, which is all that is safe to say.

        Optimizers and filters that correct for the noise multiply its level by it, and refuse None.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """Public options, as JSON can hold them."""
        return {}

    def set_noise(self, level: NoiseLevel) -> None:
        """Take the level of the noise in what it will be given. Only maps that correct for noise use it."""
        return None


class Filter(Postprocess):
    """A map that makes a direction of this step's gradients and earlier ones, for instance a low-pass filter.

    In the chain it maps what was released; in an optimizer it takes the place of the first moment.
    """

    @property
    def needs_noise_level(self) -> bool:
        """Whether it corrects for the noise, whose level then has to be known."""
        return False

    @abc.abstractmethod
    def update(self, grads: Gradients) -> Gradients:
        """Name -> gradient, to name -> bias-corrected filtered gradient; changes no tensor it is given."""

    def __call__(self, released: Released, /) -> Released:
        return Released(self.update(released))


def arithmetic(g: torch.Tensor) -> torch.dtype:
    """Type in which a gradient is filtered: float32 at least."""
    return torch.promote_types(g.dtype, torch.float32)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return x.detach().to("cpu", copy=True)


class BufferedFilter(Filter):
    """A filter of the same parameters in every step, with buffers of their size.

    Its state is made of released values, so it may be stored and published.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._shapes: dict[str, list[int]] | None = None
        self._buffers: list[list[torch.Tensor]] = []  # buffer, tensor

    @torch.no_grad()
    def update(self, grads: Gradients) -> Gradients:
        """One step.

        Args:
            grads: name -> released gradient; the same names and shapes in every step. Left as they are.

        Returns:
            Name -> filtered gradient, of the same dtype, in memory of the caller's own; a filter that changes nothing
            gives back what it got.

        Raises:
            DPConfigError: if names or shapes changed.
        """
        names = list(self._check_shapes(grads))
        self.num_steps += 1
        filtered = dict(zip(names, self._filtered([grads[name].detach() for name in names]), strict=True))
        return {name: filtered[name].to(g.dtype) for name, g in grads.items()}

    @abc.abstractmethod
    def _filtered(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of step `num_steps`, one for each gradient."""

    def _check_shapes(self, grads: Gradients) -> dict[str, list[int]]:
        shapes = {name: list(g.shape) for name, g in grads.items()}
        before = self._shapes = self._shapes or shapes
        if shapes != before:
            changed = [name for name in {**before, **shapes} if before.get(name) != shapes.get(name)]
            raise DPConfigError(
                f"The tensors of a filter are fixed, and {len(changed)} are now missing, new or of another shape: "
                f"{', '.join(changed[:5])}. Give it the gradients of the same parameters, or start a new filter."
            )
        return before

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, in the host's memory."""
        buffers = [[on_host(x) for x in row] for row in self._buffers]
        return {
            "parameters": self.parameters(),
            "num_steps": self.num_steps,
            "shapes": None if self._shapes is None else dict(self._shapes),
            "buffers": {name: [row[j] for row in buffers] for j, name in enumerate(self._shapes or {})},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, bit for bit, on the device of the next gradients.

        Raises:
            DPConfigError: for the state of another filter.
        """
        theirs, mine = state.get("parameters", {}), self.parameters()
        if theirs != mine:
            other, this = (", ".join(f"{name}={value}" for name, value in x.items()) for x in (theirs, mine))
            raise DPConfigError(
                f"This state belongs to another filter ({other}); this one is ({this}). Continue with the filter the "
                "run was started with, or start the filter anew, without the state."
            )
        self.num_steps = state["num_steps"]
        self._shapes = None if state["shapes"] is None else dict(state["shapes"])
        kept = [state["buffers"][name] for name in self._shapes or {}]
        self._buffers = [[x.clone() for x in row] for row in zip(*kept, strict=True)]
