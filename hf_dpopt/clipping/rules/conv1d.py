"""GPT-2's `Conv1D`: a linear layer whose weight is stored transposed, (I, O). Legend as in `linear`."""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.rules.linear import autocast_to, matmul_contribution, tokens
from hf_dpopt.clipping.site import Site


class _Conv1D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, site: Site) -> torch.Tensor:
        dtype = autocast_to(x)
        x, weight = x.to(dtype), site.cast(weight, dtype)
        ctx.save_for_backward(x, weight)
        ctx.site = site
        return torch.addmm(bias.to(dtype), x.flatten(0, -2), weight).view(*x.shape[:-1], weight.size(1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        grad_BTO, site = tokens(grad_output), ctx.site
        if site.trains("weight"):
            site.add("weight", matmul_contribution(tokens(x), grad_BTO))
        if site.trains("bias"):
            site.add("bias", Dense(grad_BTO.sum(dim=1, dtype=torch.promote_types(grad_BTO.dtype, torch.float32))))
        needs_input = ctx.needs_input_grad[0]
        return (grad_output @ weight.mT.to(grad_output.dtype) if needs_input else None), None, None, None


def forward(site: Site, x: torch.Tensor) -> torch.Tensor:
    return _Conv1D.apply(x, site.module.weight, site.module.bias, site)
