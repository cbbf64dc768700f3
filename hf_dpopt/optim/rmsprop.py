"""RMSProp on released gradients."""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.optim.base import (
    Group,
    NoiseAwareOptimizer,
    Tensors,
    check_range,
    relative_error,
    root_without_noise,
)
from hf_dpopt.postprocess import Filter, NoiseLevel


class DPRMSProp(NoiseAwareOptimizer):
    r"""RMSProp; equal to `torch.optim.RMSprop` unless `unbiased` or a filter is set.

    ``v_t = alpha v_{t-1} + (1 - alpha) g_t^2``, ``w -= lr g_t / (sqrt(v_t) + eps)``, with ``g_t`` the released
    gradient plus ``weight_decay w``. No momentum, no centring. A filter replaces the released gradient in the
    numerator.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        alpha: decay of v, in [0, 1).
        eps: added to the root; gradient units, >= 0.
        weight_decay: coupled (an L2 penalty), >= 0.
        unbiased: takes ``sqrt(max(v_t - u_t, floor))`` as the root, where u_t is the same average of the variance of
            the noise. Averages of bfloat16 weights are then float32.
        variance_floor: floor of v_t - u_t with `unbiased`; gradient units squared, >= 0. None takes one stddev
            of v_t where there is only noise, as `DPAdamBC`.
        noise: needed by `step` with `unbiased`.
        filter: see `NoiseAwareOptimizer`.

    Raises:
        DPConfigError: for a value outside the ranges above, or if `variance_floor` and `eps` are both 0.

    References:
        Li et al. (2022), arXiv:2212.00309 (DP-RMSProp, a baseline there).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        unbiased: bool = False,
        variance_floor: float | None = None,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(
            lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, unbiased=unbiased, variance_floor=variance_floor
        )
        super().__init__(params, defaults, noise=noise, filter=filter)

    def _check(self, group: Group) -> None:
        super()._check(group)
        check_range("alpha", group["alpha"], 0, 1)

    def _subtracts_noise(self, group: Group) -> bool:
        return group["unbiased"]

    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        alpha, floor = group["alpha"], group["variance_floor"]
        states = [self.state[p] for p in params]
        for state, g in zip(states, grads, strict=True):
            if not state:
                state["step"], state["square_avg"] = 0, torch.zeros_like(g)
            state["step"] += 1
        numerators = grads if filtered is None else filtered
        if group["weight_decay"] != 0:
            numerators = list(torch._foreach_add(numerators, params, alpha=group["weight_decay"]))
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        squares = [state["square_avg"] for state in states]
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - alpha)
        if group["unbiased"]:
            for state in states:
                state["noise_avg_sq"] = alpha * state.get("noise_avg_sq", 0.0) + (1 - alpha) * variance
            noise = [state["noise_avg_sq"] for state in states]
            floors = [
                n * relative_error(alpha, state["step"]) if floor is None else floor
                for n, state in zip(noise, states, strict=True)
            ]
            roots = root_without_noise(squares, noise, floors)
        else:
            roots = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, numerators, roots, value=-group["lr"])
