"""Base of the optimizers: gradients in, noise variance in, filter, checkpoints."""

from __future__ import annotations

import abc
import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_dpopt.common.checks import check_range
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import is_sharded
from hf_dpopt.postprocess import Filter, NoiseLevel

Tensors = list[torch.Tensor]
Group = dict[str, Any]


class NoiseAwareOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer that may ask for the level of the noise in its gradients, and may filter them.

    The state is made of released gradients and public numbers only, so checkpoints of it may be published. The noise
    level is not part of it, for it may hold the key of the run: set `noise` again after unpickling or copying.

    Attributes:
        noise: level of the noise in `p.grad` as the private step left it, asked once per step; may be set at any time
            before `step`. Nothing may rescale or filter `p.grad` in between.
        filter: what replaces the gradient in the numerator; its state is in `state_dict`. It sees the tensors under
            their position in the parameter groups ("0", "1" ...), and the same ones in every step.
    """

    noise: NoiseLevel | None
    filter: Filter | None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        noise: NoiseLevel | None,
        filter: Filter | None,
    ):
        self.noise, self.filter = noise, filter
        super().__init__(params, defaults)

    def set_noise(self, level: NoiseLevel) -> None:
        """Take the level of the noise in `p.grad`, for the filter too."""
        self.noise = level
        if self.filter is not None:
            self.filter.set_noise(level)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._check(self.param_groups[-1])

    def _check(self, group: Group) -> None:
        """Refuse options out of range."""
        if isinstance(group["lr"], torch.Tensor):
            raise DPConfigError("`lr` is a tensor. Use a float: no step of this optimizer is captured in a graph.")
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, group[name], 0, math.inf)
        floor = group.get("variance_floor")
        if floor is not None:
            check_range("variance_floor", floor, 0, math.inf)
        if floor == 0 and group["eps"] == 0:
            raise DPConfigError(
                "variance_floor=0 and eps=0 divide by zero wherever the noise is all there is. Give one of them a "
                "value > 0, or leave variance_floor out."
            )

    @property
    def subtracts_noise(self) -> bool:
        """Whether it needs to know the level of the noise."""
        return any(self._subtracts_noise(group) for group in self.param_groups)

    def _subtracts_noise(self, group: Group) -> bool:
        """Whether an update of this group needs the variance of the noise."""
        return False

    def _gradient(self, group: Group, p: torch.Tensor) -> torch.Tensor:
        """The gradient for the moments. bf16 cannot hold a difference of nearly equal squares, so that takes fp32."""
        assert p.grad is not None
        return p.grad.to(torch.promote_types(p.dtype, torch.float32)) if self._subtracts_noise(group) else p.grad

    @abc.abstractmethod
    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        """Update tensors of one group, device and dtype.

        Args:
            grads: what `_gradient` returned.
            filtered: what the filter made of them; None without a filter.
            variance: variance of the noise in a coordinate of `grads`; 0.0 where `_subtracts_noise` is False.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update from `p.grad`; parameters without a gradient are left alone.

        Args:
            closure: recomputes the loss, as in torch; its value is returned.

        Raises:
            DPConfigError: if the noise is to be subtracted and `noise` is None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        variance = self._variance()
        owned = [(group, p) for group in self.param_groups for p in group["params"]]
        names = {p: str(i) for i, (_, p) in enumerate(owned)}
        grads = {names[p]: self._gradient(group, p) for group, p in owned if p.grad is not None}
        filtered = None if self.filter is None else self.filter.update(grads)
        for group in self.param_groups:
            alike: dict[Any, Tensors] = collections.defaultdict(list)  # torch's fast path wants one device and dtype
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.device, p.dtype, is_sharded(grads[names[p]])].append(p)
            for params in alike.values():
                self._update(
                    group,
                    params,
                    [grads[names[p]] for p in params],
                    None if filtered is None else [filtered[names[p]] for p in params],
                    variance,
                )
        return loss

    def _variance(self) -> float:
        if not self.subtracts_noise:
            return 0.0
        if self.noise is None:
            raise DPConfigError(
                f"{type(self).__name__} subtracts the variance of the noise and was not told it. Pass "
                "noise=run.noise_level(), or set optimizer.noise; without noise, IndependentNoise(0.0)."
            )
        variance = self.noise.variance()
        check_range("noise.variance()", variance, 0, math.inf)
        return variance

    def state_dict(self) -> dict[str, Any]:
        """The state that torch keeps, with the name of the optimizer and the state of its filter."""
        state = super().state_dict()
        state["optimizer"] = type(self).__name__
        if self.filter is not None:
            state["filter"] = self.filter.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit for bit.

        Raises:
            DPConfigError: for the state of another optimizer, or of one with a filter where this has none (or the
                other way round).
        """
        saved = state_dict.get("optimizer")
        if saved != type(self).__name__:
            raise DPConfigError(
                f"This state was written by {saved or 'another optimizer'}, and cannot be continued by "
                f"{type(self).__name__}. Resume with the optimizer that wrote it."
            )
        if ("filter" in state_dict) != (self.filter is not None):
            began, now = ("without", "with") if self.filter is not None else ("with", "without")
            raise DPConfigError(
                f"This state was written {began} a filter, and the optimizer was made {now} one. Resume with the "
                "options it began with."
            )
        super().load_state_dict(state_dict)
        # torch has cast floating-point state to the dtype of the parameter: fp32 moments of bf16 weights would be lost
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[p][key] = value.to(p.device)
        if self.filter is not None:
            self.filter.load_state_dict(state_dict["filter"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "filter": self.filter, "noise": None}


def relative_error(beta: float, steps: int) -> float:
    r"""Stddev / mean of an average of squared noise: ``sqrt(2 sum_i w_i^2)`` with ``w_i ~ beta^{steps - i}``, sum 1.

    For Gaussian noise that is constant and independent over the steps. ``beta=1`` is the plain mean.
    """
    if beta == 1:
        return math.sqrt(2 / steps)
    return math.sqrt(2 * (1 - beta) / (1 + beta) * (1 + beta**steps) / (1 - beta**steps))


def root_without_noise(squares: Tensors, noise: Sequence[float], floors: Sequence[float]) -> Tensors:
    """``sqrt(max(square - noise, floor))``, new tensors."""
    roots = torch._foreach_sub(squares, noise)
    torch._foreach_clamp_min_(roots, floors)
    torch._foreach_sqrt_(roots)
    return list(roots)
