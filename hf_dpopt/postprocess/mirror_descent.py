"""PDA-DPMD to first order: the private gradient, and more and more of a public one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess.maps import Postprocess
from hf_dpopt.public.public_gradients import PublicGradients

# share of the private gradient after the fraction x of the schedule
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: math.cos(math.pi / 2 * min(x, 1.0)),
    "linear": lambda x: 1.0 - min(x, 1.0),
}


class PublicMirrorDescent(Postprocess):
    r"""``a_t g~_t + (1 - a_t) grad of the public loss``, at the current weights.

    The first-order form of mirror descent with the public loss as mirror map (the exact one minimises the public loss
    in every step). ``a_t = schedule(t / K)``, t from 0: "cosine" is ``cos(pi t / 2 K)`` (the paper's), "linear"
    ``1 - t / K``; 0 from step K on, where only public gradients are left.

    Args:
        public: gradients of public records; one batch a step.
        schedule: "cosine" or "linear".
        num_steps: K, steps until it reaches 0; >= 1. The length of the run, or more.

    Raises:
        DPConfigError: for an unknown schedule, or values out of range.

    References:
        Amid et al. (2022), arXiv:2112.00193, Sec. 5 (first-order form, cosine).
    """

    name = "public_mirror_descent"

    def __init__(self, public: PublicGradients, *, num_steps: int, schedule: str = "cosine"):
        check_choice("schedule", schedule, SCHEDULES)
        check_count("num_steps", num_steps)
        self.public, self.num_steps, self.schedule = public, int(num_steps), schedule
        self._step = 0
        self._gain = 1.0

    @property
    def gain(self) -> float:
        """Factor of the noise in the latest step."""
        return self._gain

    def share(self, step: int) -> float:
        """a_t, share of the private gradient in step t (from 0)."""
        return SCHEDULES[self.schedule](step / self.num_steps)

    @torch.no_grad()
    def __call__(self, released: Released, /) -> Released:
        share, public = self.share(self._step), self.public.mean()
        self._step, self._gain = self._step + 1, share
        mixed = {name: share * g + (1 - share) * public[name].to(g.dtype) for name, g in released.items()}
        return Released(mixed)

    def parameters(self) -> dict[str, Any]:
        """Public options, for a report."""
        own = {"name": self.name, "schedule": self.schedule, "num_steps": self.num_steps}
        return own | {"public": self.public.parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "public": self.public.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self.public.load_state_dict(state["public"])
