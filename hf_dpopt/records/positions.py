"""Tables in which a model looks up positions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sized
from typing import Any

from torch import nn

from hf_dpopt.common.sharding import class_of

WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)")  # what adapters put around a layer
POSITION_TABLE = re.compile(r"(^|\.)(position_embeddings|wpe|embed_positions|positions_embed)$")


@dataclasses.dataclass(frozen=True)
class Positions:
    """A table in which positions are looked up.

    Args:
        most: largest number of tokens of a record that have a position.
        padding: token that takes no position (RoBERTa); None if every token takes one.
    """

    most: int
    padding: int | None


def positions(model: nn.Module, column: str) -> Positions | None:
    """The smallest table that reads the tokens of `column` (input_ids, or labels of a decoder); None if computed."""
    config = getattr(model, "config", None)
    has_encoder = getattr(config, "is_encoder_decoder", False)
    found = []
    for path, module in model.named_modules():
        name = WRAPPED.sub("", path)
        of_decoder = re.search(r"(^|\.)decoder\.", name) is not None
        if not POSITION_TABLE.search(name) or (has_encoder and of_decoder != (column == "labels")):
            continue
        # subclasses may grow or clamp; learned tables that start at an offset are looked up as they are
        if class_of(module) is not nn.Embedding and not class_of(module).__name__.endswith(
            "LearnedPositionalEmbedding"
        ):
            continue
        first = getattr(module, "offset", None)
        padding = module.padding_idx if first is None else None  # type: ignore[union-attr]
        rows = module.num_embeddings - (first or 0 if padding is None else padding + 1)  # type: ignore[operator]
        declared = getattr(config, "max_position_embeddings", None) or rows
        found.append(Positions(min(rows, declared) - _num_virtual_tokens(model), padding))
    return min(found, key=lambda table: table.most, default=None)


def _num_virtual_tokens(model: nn.Module) -> int:
    """Number of positions that prompts and prefixes of adapters take."""
    configs = getattr(model, "peft_config", None)
    return sum(
        getattr(c, "num_virtual_tokens", 0) or 0 for c in (configs.values() if isinstance(configs, dict) else ())
    )


def num_entries(row: Any) -> int:
    """Length of a row; 0 of what has none, such as a number, also where it is a tensor."""
    try:
        return len(row) if isinstance(row, Sized) else 0
    except TypeError:
        return 0
