"""AdamW on released gradients, and AdamW without the noise in its second moment."""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.common.checks import check_range
from hf_dpopt.optim.noise_aware import (
    Group,
    NoiseAwareOptimizer,
    Tensors,
    relative_error,
    root_without_noise,
)
from hf_dpopt.postprocess import Filter, NoiseLevel


class DPAdamW(NoiseAwareOptimizer):
    r"""AdamW; equal to `torch.optim.AdamW(foreach=True)` to the last bit unless a filter is set.

    ``w -= lr weight_decay w``, then ``w -= lr m^_t / (sqrt(v^_t) + eps)`` with the bias-corrected averages m^ of g and
    v^ of g^2. A filter replaces m^; v^ stays that of the unfiltered gradients. In bfloat16 weights, as in torch, the
    averages are bfloat16 too.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        betas: decay of m and of v, each in [0, 1).
        eps: added to the root; gradient units, >= 0.
        weight_decay: decoupled, >= 0.
        noise: not used: the noise stays in v^.
        filter: see `NoiseAwareOptimizer`.

    Raises:
        DPConfigError: for a value outside the ranges above.

    References:
        Loshchilov and Hutter (2019), arXiv:1711.05101, Alg. 2.
        Zhang et al. (2024), arXiv:2408.13460 (the filter in place of the first moment).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults, noise=noise, filter=filter)

    def _check(self, group: Group) -> None:
        super()._check(group)
        for i in (0, 1):
            check_range(f"betas[{i}]", group["betas"][i], 0, 1)

    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        states = [self.state[p] for p in params]
        for state, g in zip(states, grads, strict=True):
            if "step" not in state:
                state["step"] = 0
                if filtered is None:
                    state["exp_avg"] = torch.zeros_like(g)
                state["exp_avg_sq"] = torch.zeros_like(g)
            state["step"] += 1
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        if filtered is None:
            numerators = [state["exp_avg"] for state in states]
            torch._foreach_lerp_(numerators, grads, 1 - beta1)
            step_sizes = [-lr / (1 - beta1 ** state["step"]) for state in states]
        else:
            numerators, step_sizes = filtered, [-lr] * len(params)
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        self._move(group, params, numerators, self._denominators(group, states, variance), step_sizes)

    def _denominators(self, group: Group, states: list[dict[str, Any]], variance: float) -> Tensors:
        roots = self._roots(group, states, variance)
        torch._foreach_div_(roots, [(1 - group["betas"][1] ** state["step"]) ** 0.5 for state in states])
        torch._foreach_add_(roots, group["eps"])
        return roots

    def _roots(self, group: Group, states: list[dict[str, Any]], variance: float) -> Tensors:
        """Root of v before its bias correction, new tensors."""
        return list(torch._foreach_sqrt([state["exp_avg_sq"] for state in states]))

    def _move(
        self, group: Group, params: Tensors, numerators: Tensors, denominators: Tensors, step_sizes: list[float]
    ) -> None:
        torch._foreach_addcdiv_(params, numerators, denominators, step_sizes)


class DPAdamBC(DPAdamW):
    r"""AdamW without the noise in its second moment (DP-AdamBC, with decoupled weight decay).

    ``w -= lr m^_t / (sqrt(max(v^_t - Phi_t, gamma_t)) + eps)``. Phi_t is the average, weighted and bias-corrected as
    v^_t, of the variance of the noise in each step, so also right for correlated noise, whose variance differs from
    step to step. Without noise and with ``variance_floor=None`` this is `DPAdamW` to the last bit.

    Departures from the paper: the additive ``eps`` is that of AdamW (``eps=0`` is the paper's form), and the floor
    has a default. In bfloat16 weights the averages are float32, where v^ - Phi still means something. DOPPLER's form,
    which divides by ``max(sqrt(v^ - Phi), e)``, is ``variance_floor=e**2`` with ``eps=0``.

    Args:
        variance_floor: gamma, gradient units squared, >= 0; to be tuned, says the paper (the authors' scripts have
            7e-9 for BERT on QNLI, 1e-9 for CIFAR-10). None takes
            ``gamma_t = Phi_t sqrt(2 (1 - beta2) / (1 + beta2) (1 + beta2^t) / (1 - beta2^t))``: one standard deviation
            of v^_t where there is nothing but (constant, independent) noise, below which v^_t - Phi_t tells nothing.
            It falls from 1.4 Phi in the first step to 0.03 Phi (beta2=0.999), and noise alone then moves a weight by
            about lr per step.
        noise: needed by `step`.
        params, lr, betas, eps, weight_decay, filter: the arguments of `DPAdamW`.

    Raises:
        DPConfigError: for a value outside the ranges above, or if `variance_floor` and `eps` are both 0.

    References:
        Tang et al. (2023), arXiv:2312.14334, Alg. 1.
        Zhang et al. (2024), arXiv:2408.13460 (the filter, and its form of the root).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        variance_floor: float | None = None,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, variance_floor=variance_floor)
        NoiseAwareOptimizer.__init__(self, params, defaults, noise=noise, filter=filter)

    def _subtracts_noise(self, group: Group) -> bool:
        return True

    def _roots(self, group: Group, states: list[dict[str, Any]], variance: float) -> Tensors:
        if not self._subtracts_noise(group):
            return super()._roots(group, states, variance)
        beta2, floor = group["betas"][1], group["variance_floor"]
        for state in states:
            state["noise_avg_sq"] = beta2 * state.get("noise_avg_sq", 0.0) + (1 - beta2) * variance
        # v and Phi before their bias correction, which comes last: without noise these are AdamW's operations
        noise = [state["noise_avg_sq"] for state in states]
        if floor is None:
            floors = [n * relative_error(beta2, state["step"]) for n, state in zip(noise, states, strict=True)]
        else:
            floors = [floor * (1 - beta2 ** state["step"]) for state in states]
        return root_without_noise([state["exp_avg_sq"] for state in states], noise, floors)
