"""Layers that are called with the tokens of all records, or with all choices, in one dimension, in order: (B T, D).

They are listed by class: whether rows are still in order cannot be told from a shape (experts reorder them).
B = records, C = choices of a record, T = tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.site import Site
from hf_dpopt.common.sharding import class_of

# class -> the children it calls this way
FLATTENING = {"transformers.models.opt.modeling_opt.OPTDecoderLayer": ("fc1", "fc2", "final_layer_norm")}


def children(module: nn.Module) -> tuple[str, ...]:
    """Names of the children that `module` calls with flattened tokens."""
    return FLATTENING.get(f"{class_of(module).__module__}.{class_of(module).__qualname__}", ())


def by_record(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule for (B, T, D), for a layer that is called with (B T, D)."""

    @functools.wraps(rule)
    def forward(site: Site, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != 2:
            return rule(site, x, *args, **kwargs)
        out = rule(site, x.unflatten(0, (site.num_records, -1)), *args, **kwargs)
        return out.flatten(0, 1)

    return forward


def chooses(model: nn.Module) -> bool:
    """Whether the model scores several choices of a record, each as a row of its own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return type(base).__name__.endswith("ForMultipleChoice")


@contextlib.contextmanager
def choices(model: nn.Module, tell: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``tell(B, C)``, inside the context, before a forward on (B, C, T) makes B C rows of it.

    The rows of a record come one after the other: transformers flattens the first two dimensions.
    """
    if not chooses(model):
        yield
        return

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if given is not None:
            tell(given.size(0), given.size(1))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
