"""Values that a model computes once for a whole batch, from parameters alone: relative position biases.

Autograd would hand back their gradient already summed over the records. Here the value is handed out as one (expanded)
copy per record, and the gradient of each copy is taken through the model's own computation.

B = records, S = positions, H = heads, D = width.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError


class _PerRecord(torch.autograd.Function):
    """Expansion of (1, ..) to (B, ..); `compute` gives the value again, attached to the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, site: Site, compute: Any) -> torch.Tensor:
        ctx.site, ctx.compute = site, compute
        return value.expand(site.num_records, *value.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        (grad_B,) = grad_outputs
        site = ctx.site
        names = list(site.parameter_names)
        parameters = [site.module.get_parameter(name) for name in names]
        with torch.enable_grad():
            value = ctx.compute()
        if not value.requires_grad:
            raise UnsupportedModuleError(
                f"{site.name} computes its {site.method} without the parameters that are trained there "
                f"({', '.join(site.parameter_names.values())}). Freeze them, or leave that layer out of the adapter."
            )
        records = [  # a record at a time: the computation is small, and may not be one that vmap can run
            torch.autograd.grad(value, parameters, grad_B[b : b + 1].to(value.dtype), retain_graph=True)
            for b in range(grad_B.size(0))
        ]
        for name, grads in zip(names, zip(*records, strict=True), strict=True):
            site.add(name, Dense(torch.stack(grads)))
        return None, None, None, None


def _per_record(site: Site, compute: Any) -> torch.Tensor:
    with torch.no_grad():
        value = compute()
    anchor = site.module.get_parameter(next(iter(site.parameter_names)))  # something that wants a gradient
    return _PerRecord.apply(anchor, value, site, compute)


def t5_position_bias(site: Site, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`compute_bias` of T5's attention: (1, H, S, S) for the batch becomes (B, H, S, S)."""
    return _per_record(site, lambda: site.original(*args, **kwargs))


def mpnet_position_bias(site: Site, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`compute_position_bias` of MPNet's encoder, which repeats one bias for the batch: (B, H, S, S)."""
    return _per_record(site, lambda: site.original(*args, **kwargs)[:1])


def deberta_relative_embeddings(site: Site) -> torch.Tensor:
    """`get_rel_embedding` of DeBERTa's encoder: (2 S, D) for the batch becomes (B, 2 S, D)."""
    return _per_record(site, lambda: site.original().unsqueeze(0))


def deberta_attention_bias(
    site: Site,
    query_layer: torch.Tensor,
    key_layer: torch.Tensor,
    relative_pos: torch.Tensor | None,
    rel_embeddings: torch.Tensor,
    scale_factor: int,
) -> torch.Tensor:
    """`disentangled_attention_bias` with the projections of the relative embeddings kept apart by record.

    He et al. (2021), arXiv:2006.03654, Eq. 4. `query_layer` and `key_layer` are (B H, T, D / H).
    """
    attention: Any = site.module
    deberta: Any = sys.modules[type(attention).__module__]  # its own functions, without an import of transformers
    if rel_embeddings.dim() == 2 and not any(p.requires_grad for p in attention.parameters()):
        return site.original(query_layer, key_layer, relative_pos, rel_embeddings, scale_factor)
    num_heads, span = attention.num_attention_heads, attention.pos_ebd_size
    if rel_embeddings.dim() == 2:
        rel_embeddings = rel_embeddings.expand(site.num_records, -1, -1)
    rel_BSD = rel_embeddings[:, : 2 * span]
    if relative_pos is None:
        longest = attention.max_relative_positions
        relative_pos = deberta.build_relative_position(
            query_layer, key_layer, bucket_size=attention.position_buckets, max_position=longest
        )
    relative_pos = relative_pos.long().view(1, *relative_pos.shape[-2:])
    shared = attention.share_att_key
    bias: Any = 0
    if "c2p" in attention.pos_att_type:
        project = attention.key_proj if shared else attention.pos_key_proj
        position_keys = attention.transpose_for_scores(project(rel_BSD), num_heads)
        scores = torch.bmm(query_layer, position_keys.mT)
        index = (relative_pos + span).clamp(0, 2 * span - 1)
        scores = scores.gather(-1, index.expand(query_layer.size(0), query_layer.size(1), -1))
        bias = bias + scores / deberta.scaled_size_sqrt(position_keys, scale_factor).to(scores.dtype)
    if "p2c" in attention.pos_att_type:
        project = attention.query_proj if shared else attention.pos_query_proj
        position_queries = attention.transpose_for_scores(project(rel_BSD), num_heads)
        scores = torch.bmm(key_layer, position_queries.mT)
        inverse = deberta.build_rpos(
            query_layer, key_layer, relative_pos, attention.max_relative_positions, attention.position_buckets
        )
        index = (span - inverse).clamp(0, 2 * span - 1).view(1, *inverse.shape[-2:])
        scores = scores.gather(-1, index.expand(query_layer.size(0), key_layer.size(1), -1)).mT
        bias = bias + scores / deberta.scaled_size_sqrt(position_queries, scale_factor).to(scores.dtype)
    return bias
