"""Embedding tables. B = records, T = tokens, D = width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hf_dpopt.grads.contributions import Rows

if TYPE_CHECKING:
    from hf_dpopt.grads.capture import Site


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, site: Site) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.site = site
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None]:
        (grad_output,) = grad_outputs
        (ids,) = ctx.saved_tensors
        ids_BT, grad_BTD = ids.flatten(1), grad_output.reshape(ids.size(0), -1, grad_output.size(-1))
        padding = ctx.site.module.padding_idx
        if padding is not None:  # torch gives the padding row no gradient
            grad_BTD = grad_BTD.masked_fill((ids_BT == padding).unsqueeze(-1), 0)
        ctx.site.add("weight", Rows(ids_BT, grad_BTD, ctx.site.module.num_embeddings))
        return None, None, None


def forward(site: Site, input: torch.Tensor) -> torch.Tensor:
    # Position ids come as (1, T) and are broadcast afterwards; autograd would hand back their gradient already summed
    # over the records. One row of ids per record keeps it apart and leaves the model's arithmetic as it is.
    if input.size(0) == 1 and site.num_records != 1:
        input = input.expand(site.num_records, *input.shape[1:])
    return _Embedding.apply(input, site.module.weight, site)
