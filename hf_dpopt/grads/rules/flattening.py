"""Layers that are called with the tokens of all records in one dimension, in order: (B T, D).

They are listed by class: whether rows are still in order cannot be told from a shape (experts reorder them).
B = records, T = tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from hf_dpopt.grads.capture import Site

# class -> the children it calls this way
FLATTENING = {"transformers.models.opt.modeling_opt.OPTDecoderLayer": ("fc1", "fc2", "final_layer_norm")}


def children(module: nn.Module) -> tuple[str, ...]:
    """Names of the children that `module` calls with flattened tokens."""
    return FLATTENING.get(f"{type(module).__module__}.{type(module).__qualname__}", ())


def by_record(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` on (B, T, D), for a layer that is called with (B T, D)."""

    @functools.wraps(rule)
    def forward(site: Site, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != 2:
            return rule(site, x, *args, **kwargs)
        out = rule(site, x.unflatten(0, (site.num_records, -1)), *args, **kwargs)
        return out.flatten(0, 1)

    return forward
