"""Averages of the released weights over the steps of the optimizer, free of cost."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from hf_dpopt.common.checks import check_choice, check_count, check_range
from hf_dpopt.common.errors import DPConfigError

Weights = dict[str, torch.Tensor]


WINDOW = 0.1  # of a run, that its exponential average is over: longer ones hold weights of a much higher loss


def decay_over(num_steps: int) -> float:
    """Decay of an exponential average that is over the last tenth of a run; 0 for runs of ten steps or less.

    A fixed decay suits one length: 0.999 makes of a run of 200 steps nearly its uniform average. Private runs have
    from 30 to some thousand steps.

    Args:
        num_steps: steps of the whole run, >= 1.
    """
    return max(0.0, 1 - 1 / (WINDOW * num_steps))


class IterateAverage:
    r"""Average of the released weights, one copy of the trainable parameters in float32 or wider.

    ``uniform`` is the mean of the weights after the steps that came after `start` (start = 0: all of them; later: a
    tail average). ``exponential`` weighs step s by ``decay^(t - s)``, normalised, so that early averages are not drawn
    to zero or to the initial weights.

    Args:
        model: the trained model.
        kind: "uniform" or "exponential".
        start: steps that are left out at the beginning; >= 0.
        decay: decay of the exponential average, in [0, 1).

    Raises:
        DPConfigError: for values out of range.

    References:
        Polyak and Juditsky (1992), doi:10.1137/0330046; the average iterate of arXiv:2008.06570, Thm. 3.1.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: Literal["uniform", "exponential"] = "uniform",
        *,
        start: int = 0,
        decay: float = 0.999,
    ):
        check_choice("kind", kind, ("uniform", "exponential"))
        if start != 0:
            check_count("start", start, "a number of steps >= 0 to leave out; half of the run gives a tail average")
        check_range("decay", decay, 0, 1)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kind, self.start, self.decay = kind, int(start), float(decay)
        self._num_steps = 0
        self._average: Weights = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Hook it to the optimizer's steps; the handle's `remove` undoes it.

        Raises:
            DPConfigError: if the optimizer does not hold the model's trainable parameters.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in self._parameters.items() if id(p) not in held]
        if missing:
            raise DPConfigError(
                f"The optimizer does not train {', '.join(missing[:5])}. Attach to the optimizer of this model, "
                "after it was made (accelerate wraps it: use optimizer.optimizer)."
            )
        return optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step into the average: what the hook calls."""
        self._num_steps += 1
        num = self._num_steps - self.start
        if num < 1:
            return
        now = self._snapshot()
        if num == 1:
            self._average = now
            return
        # weight of the newest: 1 / num, or (1 - decay) / (1 - decay^num)
        share = 1 / num if self.kind == "uniform" else (1 - self.decay) / (1 - self.decay**num)
        torch._foreach_lerp_(list(self._average.values()), list(now.values()), share)

    def average(self) -> Weights:
        """The average so far, name -> tensor; the weights as they are before the first step that counts."""
        return {name: w.clone() for name, w in self._average.items()} or self._snapshot()

    @torch.no_grad()
    def finish(self) -> None:
        """Give the model the average; called after the last step."""
        weights = self.average()
        for name, p in self._parameters.items():
            p.copy_(weights[name])

    def parameters(self) -> dict[str, Any]:
        """Public options, for a report."""
        own = {"name": "iterate_average", "kind": self.kind, "start": self.start}
        return own | ({"decay": self.decay} if self.kind == "exponential" else {})

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; made of released weights."""
        return {"num_steps": self._num_steps, "average": {n: w.clone() for n, w in self._average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        self._num_steps = state["num_steps"]
        self._average = {
            n: w.to(self._parameters[n].device, copy=True)  # a checkpoint may have been read to the host
            for n, w in state["average"].items()
        }

    def _snapshot(self) -> Weights:
        wide = torch.float32
        return {n: p.detach().to(torch.promote_types(p.dtype, wide), copy=True) for n, p in self._parameters.items()}
