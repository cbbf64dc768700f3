"""Filters that keep buffers of the size of the parameters: their shapes, their copies in checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Gradients
from hf_dpopt.postprocess.maps import Filter


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
                f"The tensors of a filter are fixed at its first step, and {len(changed)} are now missing, new or of "
                f"another shape: {', '.join(changed[:5])}. Give it the gradients of the same parameters in every "
                "step, or start a new filter."
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
