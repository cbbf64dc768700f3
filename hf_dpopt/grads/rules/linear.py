"""Linear layers. B = records, T = tokens, I / O = input / output features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hf_dpopt.grads.contributions import Contribution, Dense, Outer

if TYPE_CHECKING:
    from hf_dpopt.grads.capture import Site


def tokens(x: torch.Tensor) -> torch.Tensor:
    """(B, features) or (B, ..., features) as (B, T, features)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def matmul_contribution(left_BTP: torch.Tensor, right_BTQ: torch.Tensor) -> Contribution:
    """``left^T right`` per record, materialised when that takes no more memory than keeping both factors.

    The product has to be formed once in any case; forming it before the factors are known replaces the weight-gradient
    matmul and saves the Gram matrices, so it is also the faster choice wherever it fits.
    """
    if left_BTP.size(1) >= materialised_from(left_BTP.size(2), right_BTQ.size(2)):
        return Dense(torch.bmm(left_BTP.mT, right_BTQ))
    return Outer(left_BTP, right_BTQ)


def materialised_from(rows: int, columns: int) -> int:
    """Tokens from which a gradient of rows x columns is no larger than its factors, tokens x (rows + columns)."""
    return -(-rows * columns // (rows + columns))


def autocast_to(x: torch.Tensor) -> torch.dtype:
    """The dtype a matmul on `x` runs in: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and x.is_floating_point() else x.dtype


class _Linear(torch.autograd.Function):
    """Returns the input gradient only; the weight gradient is formed by the engine once the clip factors are known."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: Site, attribute: str
    ) -> torch.Tensor:
        dtype = autocast_to(x)
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.attribute = site, attribute
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        grad_BTO, site = tokens(grad_output), ctx.site
        if site.trains(ctx.attribute):
            site.add(ctx.attribute, matmul_contribution(grad_BTO, tokens(x)))
        if site.trains("bias"):
            site.add("bias", Dense(grad_BTO.sum(dim=1, dtype=torch.promote_types(grad_BTO.dtype, torch.float32))))
        needs_input = ctx.needs_input_grad[0]
        return (grad_output @ weight.to(grad_output.dtype) if needs_input else None), None, None, None, None


def matmul(site: Site, x: torch.Tensor, attribute: str) -> torch.Tensor:
    """``x W^T`` for the parameter `attribute` of the site's module, (O, I)."""
    return _Linear.apply(x, site.module.get_parameter(attribute), None, site, attribute)


def forward(site: Site, input: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(input, site.module.weight, site.module.bias, site, "weight")
