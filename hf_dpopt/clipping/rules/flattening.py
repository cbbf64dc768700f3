"""Layers that are called with the tokens of all records, or with all choices, in one dimension, in order: (B T, D).

They are listed by class: whether rows are still in order cannot be told from a shape (experts reorder them).
B = records, C = choices of a record, T = tokens.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
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


Tell = Callable[[int, int], None]
_told: contextvars.ContextVar[Tell] = contextvars.ContextVar("told", default=lambda num_records, num_choices: None)


def num_choices(batch: Mapping[str, Any]) -> int | None:
    """C of a collated batch whose records have several rows of tokens each, (B, C, T); None for one row each."""
    ids = batch.get("input_ids")
    return ids.size(1) if isinstance(ids, torch.Tensor) and ids.dim() == 3 else None


@contextlib.contextmanager
def choices(model: nn.Module, tell: Tell) -> Iterator[None]:
    """Call ``tell(B, C)``, inside the context, before a forward on (B, C, T) makes B C rows of it.

    The rows of a record come one after the other: models that score choices flatten the first two dimensions, and so
    does `flattened`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if given is not None:
            tell(given.size(0), given.size(1))

    token = _told.set(tell)
    try:
        with (
            _before_forward(model, look)
            if type(base).__name__.endswith("ForMultipleChoice")
            else contextlib.nullcontext()
        ):
            yield
    finally:
        _told.reset(token)


@contextlib.contextmanager
def flattened(model: nn.Module) -> Iterator[None]:
    """Make B C rows of inputs (B, C, T), inside the context, for a model that takes rows of tokens."""

    def flatten(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        shape = kwargs["input_ids"].shape[:2]
        _told.get()(*shape)
        return args, {
            name: value.flatten(0, 1) if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value
            for name, value in kwargs.items()
        }

    with _before_forward(model, flatten):
        yield


@contextlib.contextmanager
def _before_forward(model: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
