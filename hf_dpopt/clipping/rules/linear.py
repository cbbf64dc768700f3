"""Linear layers. B = records, T = tokens, I / O = input / output features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_dpopt.clipping.contributions import Contribution, Dense, Outer
from hf_dpopt.clipping.site import Site

ALIGNED = 8  # elements of bfloat16 in 16 bytes
MANY = 1024  # outputs from which a padded copy of the weight pays


def tokens(x: torch.Tensor) -> torch.Tensor:
    """(B, features) or (B, ..., features) as (B, T, features)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def matmul_contribution(left_BTP: torch.Tensor, right_BTQ: torch.Tensor) -> Contribution:
    """``left^T right`` per record, materialised if that takes no more memory than keeping both factors.

    The product has to be formed once in any case; forming it before the factors are known replaces the weight-gradient
    matmul and saves the Gram matrices, so it is also the faster choice wherever it fits.
    """
    if left_BTP.size(1) >= materialised_from(left_BTP.size(2), right_BTQ.size(2)):
        return Dense(torch.bmm(left_BTP.mT, right_BTQ))
    return Outer(left_BTP, right_BTQ)


def materialised_from(rows: int, columns: int) -> int:
    """Tokens from which a gradient, rows x columns, is no larger than its factors, tokens x (rows + columns)."""
    return -(-rows * columns // (rows + columns))


def autocast_to(x: torch.Tensor) -> torch.dtype:
    """The dtype a matmul on `x` runs in: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and x.is_floating_point() else x.dtype


def _aligned(x: torch.Tensor, weight: torch.Tensor, site: Site) -> torch.Tensor:
    """The weight in the dtype of x, with rows of zeros below if a GPU's fast products need a multiple of 8 outputs.

    GPT-2's head has 50,257 rows. Its logits, packed without gaps, send this product and the one of the backward to
    kernels that are several times slower.
    """
    if not wants_alignment(x, weight.size(0)):
        return site.cast(weight, x.dtype)

    def padded() -> torch.Tensor:
        copy = x.new_zeros(weight.size(0) + -weight.size(0) % ALIGNED, weight.size(1))
        copy[: weight.size(0)] = weight
        return copy

    return site.sink.copy_of(weight, "aligned", padded)


def wants_alignment(x: torch.Tensor, num_features: int) -> bool:
    """Whether the rows of ``x W^T`` would start where a GPU's fast bfloat16 products do not take them."""
    return x.is_cuda and x.dtype == torch.bfloat16 and num_features >= MANY and num_features % ALIGNED != 0


def _first_columns(out: torch.Tensor, num_features: int) -> torch.Tensor:
    """The first columns as a tensor of its own on the same memory: autograd refuses in-place changes of views."""
    size, strides = (*out.shape[:-1], num_features), out.stride()
    return out.new_empty(0).set_(out.untyped_storage(), out.storage_offset(), size, strides)  # type: ignore[call-overload]


def _with_padding(grad: torch.Tensor, weight: torch.Tensor, place: int) -> torch.Tensor:
    """The gradient with the padding of the output: that output's own memory if possible, else a copy beside zeros."""
    num_missing = weight.size(0) - grad.size(-1)
    if num_missing == 0:
        return grad
    if grad.data_ptr() == place and grad.stride(-2) == weight.size(0):
        return grad.as_strided((*grad.shape[:-1], weight.size(0)), grad.stride())
    return F.pad(grad, (0, num_missing))


class _Linear(torch.autograd.Function):
    """Linear layer whose backward returns the input gradient only; the engine forms the weight gradient later."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: Site, attribute: str
    ) -> torch.Tensor:
        x = x.to(autocast_to(x))
        num_features, weight = weight.size(0), _aligned(x, weight, site)
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.attribute = site, attribute
        bias = None if bias is None else bias.to(x.dtype)
        if bias is not None and weight.size(0) > num_features:
            bias = F.pad(bias, (0, weight.size(0) - num_features))
        out = F.linear(x, weight, bias)
        ctx.place = out.data_ptr()
        return _first_columns(out, num_features)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        grad_BTO, site = tokens(grad_output), ctx.site
        if site.trains(ctx.attribute):
            site.add(ctx.attribute, matmul_contribution(grad_BTO, tokens(x)))
        if site.trains("bias"):
            site.add("bias", Dense(grad_BTO.sum(dim=1, dtype=torch.promote_types(grad_BTO.dtype, torch.float32))))
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = _with_padding(grad_output, weight, ctx.place) @ weight.to(grad_output.dtype)
        return grad_input, None, None, None, None


def matmul(site: Site, x: torch.Tensor, attribute: str) -> torch.Tensor:
    """``x W^T`` for the parameter `attribute` of the site's module, (O, I)."""
    return _Linear.apply(x, site.module.get_parameter(attribute), None, site, attribute)


def forward(site: Site, input: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(input, site.module.weight, site.module.bias, site, "weight")
