"""Base class of the maps of released gradients."""

from __future__ import annotations

import abc
from typing import Any

from hf_dpopt.common.types import Gradients, Released
from hf_dpopt.postprocess.noise_level import NoiseLevel


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
