"""AdaGrad on released gradients."""

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


class DPAdaGrad(NoiseAwareOptimizer):
    r"""AdaGrad; equal to `torch.optim.Adagrad` unless `unbiased` or a filter is set.

    ``V_t = V_{t-1} + g_t^2``, ``w -= lr / (1 + (t - 1) lr_decay) g_t / (sqrt(V_t) + eps)``, with ``g_t`` the released
    gradient plus ``weight_decay w``. A filter replaces the released gradient in the numerator.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        lr_decay: >= 0.
        initial_accumulator_value: V_0, gradient units squared, >= 0.
        eps: added to the root; gradient units, >= 0.
        weight_decay: coupled (an L2 penalty), >= 0.
        unbiased: takes ``sqrt(max(V_t - U_t, floor))`` as the root, where U_t is the sum of the noise's variances.
            Sums of bfloat16 weights are then float32.
        variance_floor: floor of the sum V_t - U_t with `unbiased`; gradient units squared, >= 0. None takes
            ``U_t sqrt(2 / t)``, one standard deviation of V_t where there is only noise.
        noise: needed by `step` with `unbiased`.
        filter: see `NoiseAwareOptimizer`.

    Raises:
        DPConfigError: for a value outside the ranges above, or if `variance_floor` and `eps` are both 0.

    References:
        Li et al. (2022), arXiv:2212.00309 (DP-AdaGrad, a baseline there).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        unbiased: bool = False,
        variance_floor: float | None = None,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(
            lr=lr,
            lr_decay=lr_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            weight_decay=weight_decay,
            unbiased=unbiased,
            variance_floor=variance_floor,
        )
        super().__init__(params, defaults, noise=noise, filter=filter)

    def _check(self, group: Group) -> None:
        super()._check(group)
        for name in ("lr_decay", "initial_accumulator_value"):
            check_range(name, group[name], 0, float("inf"))

    def _subtracts_noise(self, group: Group) -> bool:
        return group["unbiased"]

    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        floor = group["variance_floor"]
        states = [self.state[p] for p in params]
        for state, g in zip(states, grads, strict=True):
            if not state:
                state["step"], state["sum"] = 0, torch.full_like(g, group["initial_accumulator_value"])
            state["step"] += 1
        numerators = grads if filtered is None else filtered
        if group["weight_decay"] != 0:
            numerators = list(torch._foreach_add(numerators, params, alpha=group["weight_decay"]))
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        sums = [state["sum"] for state in states]
        torch._foreach_addcmul_(sums, grads, grads, value=1)
        if group["unbiased"]:
            for state in states:
                state["noise_sum"] = state.get("noise_sum", 0.0) + variance
            noise = [state["noise_sum"] for state in states]
            floors = [
                n * relative_error(1, state["step"]) if floor is None else floor
                for n, state in zip(noise, states, strict=True)
            ]
            roots = root_without_noise(sums, noise, floors)
        else:
            roots = list(torch._foreach_sqrt(sums))
        torch._foreach_add_(roots, group["eps"])
        step_sizes = [-group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"]) for state in states]
        torch._foreach_addcdiv_(params, numerators, roots, step_sizes)
