"""Buffers of filters: their dtype, their shapes, their copies in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Gradients

Shapes = dict[str, list[int]]

STORAGE: dict[str | None, torch.dtype | None] = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def arithmetic(g: torch.Tensor) -> torch.dtype:
    """Type in which a gradient is filtered: float32 at least."""
    return torch.promote_types(g.dtype, torch.float32)


def storage_name(dtype: torch.dtype | None) -> str | None:
    """Name of a type, which JSON can hold: its key in `STORAGE`."""
    return next(name for name, value in STORAGE.items() if value == dtype)


def check_storage(dtype: torch.dtype | None) -> None:
    """Refuse what cannot hold buffers."""
    if dtype not in STORAGE.values():
        raise DPConfigError(
            f"dtype={dtype} cannot hold a filter's buffers. Use None, torch.float32 or torch.bfloat16."
        )


def check_shapes(before: Shapes | None, grads: Gradients) -> Shapes:
    """Name -> shape; refuses those that differ from the ones before."""
    shapes = {name: list(g.shape) for name, g in grads.items()}
    if before is None or shapes == before:
        return before or shapes
    changed = [name for name in {**before, **shapes} if before.get(name) != shapes.get(name)]
    raise DPConfigError(
        f"The tensors of a filter are fixed at its first step, and {len(changed)} are now missing, new or of another "
        f"shape: {', '.join(changed[:5])}. Give it the gradients of the same parameters in every step, or start a new "
        "filter."
    )


def check_same_filter(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse the state of another filter."""
    if theirs != mine:
        other, this = (", ".join(f"{name}={value}" for name, value in x.items()) for x in (theirs, mine))
        raise DPConfigError(
            f"This state belongs to another filter ({other}); this one is ({this}). Continue with the filter the run "
            "was started with, or start the filter anew, without the state."
        )


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return x.detach().to("cpu", copy=True)
