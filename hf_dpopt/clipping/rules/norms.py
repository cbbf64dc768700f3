"""Normalisation layers: per-record gradients are only (B, D), so they are formed.

B = records, T = tokens, D = width.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.clipping import kernels
from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.site import Site


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: Site
    ) -> torch.Tensor:
        module: Any = site.module
        if torch.is_autocast_enabled(x.device.type):  # it runs layer norms in float32, a bfloat16 scale included
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        out, mean, rstd = torch.native_layer_norm(x, module.normalized_shape, weight, bias, module.eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.site = site
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight, bias, mean, rstd = ctx.saved_tensors
        site, shape = ctx.site, site_shape(ctx.site)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input, _, _ = torch.ops.aten.native_layer_norm_backward(
                grad_output, x, shape, mean, rstd, weight, bias, [True, False, False]
            )
        for attribute, grad_B in _parameter_gradients(grad_output, x, shape, mean, rstd, weight, bias).items():
            if site.trains(attribute):
                site.add(attribute, Dense(grad_B))
        return grad_input, None, None, None


def _parameter_gradients(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Per-record gradients of scale and shift, (B, D) each."""
    if x.device.type == "cpu" and x.dtype == grad_output.dtype == weight.dtype != torch.bfloat16:
        # torch's kernel makes no temporaries: an order of magnitude faster, record by record
        grads = [
            torch.ops.aten.native_layer_norm_backward(
                grad_output[b], x[b], shape, mean[b], rstd[b], weight, bias, [False, True, bias is not None]
            )[1:]
            for b in range(x.size(0))
        ]
        by_name = dict(zip(("weight", "bias"), zip(*grads, strict=True), strict=True))
        return {name: torch.stack(per_record) for name, per_record in by_name.items() if per_record[0] is not None}
    if len(shape) == 1 and x.dim() > 2 and kernels.takes(grad_output, x, mean, rstd):
        grad_BTD, x_BTD = (tensor.flatten(1, -2) for tensor in (grad_output, x))
        return dict(
            zip(("weight", "bias"), kernels.layer_norm.parameter_gradients(grad_BTD, x_BTD, mean, rstd), strict=True)
        )
    dims = tuple(range(1, x.dim() - len(shape)))  # the token dimensions between record and features
    grad = wide(grad_output)
    scaled = grad * ((wide(x) - wide(mean)) * wide(rstd))
    return {name: g.sum(dim=dims) if dims else g for name, g in (("weight", scaled), ("bias", grad))}


def site_shape(site: Site) -> list[int]:
    return list(site.module.normalized_shape)  # type: ignore[arg-type]


def layer_norm(site: Site, input: torch.Tensor) -> torch.Tensor:
    return _LayerNorm.apply(input, site.module.weight, site.module.bias, site)
