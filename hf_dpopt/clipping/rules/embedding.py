"""Embedding tables. B = records, T = tokens, D = width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_dpopt.clipping.contributions import Rows, Transposed
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, site: Site, attribute: str, padding: Any, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.site, ctx.attribute, ctx.padding, ctx.transposed = site, attribute, padding, transposed
        ctx.num_rows = weight.size(0)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, ...]:
        (grad_output,) = grad_outputs
        (ids,) = ctx.saved_tensors
        ids_BT, grad_BTD = ids.flatten(1), grad_output.reshape(ids.size(0), -1, grad_output.size(-1))
        if ctx.padding is not None:  # torch gives the padding row no gradient
            grad_BTD = grad_BTD.masked_fill((ids_BT == ctx.padding).unsqueeze(-1), 0)
        rows = Rows(ids_BT, grad_BTD, ctx.num_rows)
        ctx.site.add(ctx.attribute, Transposed(rows) if ctx.transposed else rows)
        return None, None, None, None, None, None


def look_up(
    site: Site, attribute: str, ids: torch.Tensor, padding: int | None = None, *, transposed: bool = False
) -> Any:
    """Rows of the parameter `attribute` of the site's module under capture; (D, V) tables are stored transposed."""
    # Position ids come as (1, T) and are broadcast afterwards; autograd would hand back their gradient already summed
    # over the records. One row of ids per record keeps it apart and leaves the model's arithmetic as it is.
    if ids.dim() == 1 and type(site.module).__name__.endswith("LearnedPositionalEmbedding"):
        ids = ids.unsqueeze(0)  # Blenderbot looks its positions up as (T,)
    if ids.dim() < 2:
        raise UnsupportedModuleError(
            f"{site.name} looks up ids of shape {tuple(ids.shape)}, without a dimension for the records, so a "
            "record's gradient cannot be told. Freeze it: model.get_submodule(name).requires_grad_(False)."
        )
    if ids.size(0) == 1 and site.num_records != 1:
        ids = ids.expand(site.num_records, *ids.shape[1:])
    table = site.module.get_parameter(attribute)
    return _Embedding.apply(ids, table.mT if transposed else table, site, attribute, padding, transposed)


def forward(site: Site, input: torch.Tensor) -> torch.Tensor:
    module: Any = site.module
    return look_up(site, "weight", input, module.padding_idx)


class _LookUps(TorchFunctionMode):
    """Mode that sends look-ups in the site's own table to the capture; everything else runs as it is."""

    def __init__(self, site: Site):
        super().__init__()
        self.site = site

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module: Any = self.site.module
        if function is F.embedding and args[1] is module.weight:
            return look_up(self.site, "weight", args[0], module.padding_idx)
        return function(*args, **(kwargs or {}))


def subclass(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Embeddings with a forward of their own: offset positions (OPT, BART), scaled words (Gemma, BART)."""
    with _LookUps(site):
        return site.original(*args, **kwargs)
