"""RMSProp and AdaGrad on released gradients: steps of ``g / sqrt(accumulated squares)``, without a first moment."""

from __future__ import annotations

import abc
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


class SquareRootOptimizer(NoiseAwareOptimizer):
    """Base of the two: ``w -= lr g_t / (sqrt(s_t) + eps)`` with ``s_t = decay s_{t-1} + share g_t^2``.

    ``g_t`` is the released gradient plus ``weight_decay w``; a filter replaces the released gradient in the numerator.
    With `unbiased` the root is that of ``max(s_t - n_t, floor)``, n_t the same accumulation of the noise's variance.
    """

    def _subtracts_noise(self, group: Group) -> bool:
        return group["unbiased"]

    @abc.abstractmethod
    def _decay(self, group: Group) -> tuple[float, float]:
        """Decay of the accumulation, and share of a step in it."""

    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        states, (decay, share) = [self.state[p] for p in params], self._decay(group)
        numerators = grads if filtered is None else filtered
        if group["weight_decay"] != 0:
            numerators = list(torch._foreach_add(numerators, params, alpha=group["weight_decay"]))
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        for state, g in zip(states, grads, strict=True):
            if "step" not in state:
                state.update(step=0, squares=torch.zeros_like(g), noise=0.0)
            state["step"] += 1
            state["noise"] = decay * state["noise"] + share * variance
        squares = [state["squares"] for state in states]
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, grads, grads, value=share)
        if group["unbiased"]:
            noise, floor = [state["noise"] for state in states], group["variance_floor"]
            floors = [s["noise"] * relative_error(decay, s["step"]) if floor is None else floor for s in states]
            roots = root_without_noise(squares, noise, floors)
        else:
            roots = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, numerators, roots, [-group["lr"]] * len(params))


class DPRMSProp(SquareRootOptimizer):
    r"""RMSProp; equal to `torch.optim.RMSprop` unless `unbiased` or a filter is set. No momentum, no centring.

    ``v_t = alpha v_{t-1} + (1 - alpha) g_t^2``, ``w -= lr g_t / (sqrt(v_t) + eps)``.

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

    def _decay(self, group: Group) -> tuple[float, float]:
        return group["alpha"], 1 - group["alpha"]


class DPAdaGrad(SquareRootOptimizer):
    r"""AdaGrad; equal to `torch.optim.Adagrad` unless `unbiased` or a filter is set.

    ``V_t = V_{t-1} + g_t^2``, ``w -= lr g_t / (sqrt(V_t) + eps)``; the learning rate decays by its schedule.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
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
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        unbiased: bool = False,
        variance_floor: float | None = None,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(lr=lr, eps=eps, weight_decay=weight_decay, unbiased=unbiased, variance_floor=variance_floor)
        super().__init__(params, defaults, noise=noise, filter=filter)

    def _decay(self, group: Group) -> tuple[float, float]:
        return 1.0, 1.0
