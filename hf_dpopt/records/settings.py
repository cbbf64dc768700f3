"""All settings of a model, in whatever depth: a vision-language model has those of its text half in `text_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def settings(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of every setting of the model's config, of configs and dicts in it, and of its modules' own.

    The path names where the setting is, as seen from the config that holds it: ``text_config.`` or nothing.
    """
    seen: set[int] = set()
    configs = [getattr(model, "config", None), *(getattr(m, "config", None) for m in model.modules())]
    for config in configs:
        if _values(config) is not None:
            yield from _inside(config, "", seen)


def _values(value: Any) -> Mapping[str, Any] | None:
    """The settings in a dict or in a config of transformers, which this package does not import; None for others."""
    is_config = isinstance(getattr(value, "model_type", None), str) and hasattr(value, "to_dict")
    return value if isinstance(value, Mapping) else vars(value) if is_config else None


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    if id(value) in seen:
        return
    if (found := _values(value)) is not None:
        seen.add(id(value))
        for name, inner in found.items():
            if isinstance(inner, list | tuple) or _values(inner) is not None:
                yield from _inside(inner, f"{path}{str(name).lstrip('_')}.", seen)
            yield path, str(name), inner
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _inside(inner, f"{path}{i}.", seen)
