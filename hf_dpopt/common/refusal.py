"""Refusals: what cannot be private is refused by name, with the way out, before anything is touched.

Each refusal is one line of a table: is it so, and what was found, why it matters and how to fix it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_dpopt.common.errors import DPConfigError

Refusal = tuple[bool, str]  # (does it apply, what is wrong and how to fix it)


def raise_first(refusals: Iterator[Refusal], error: type[DPConfigError] = DPConfigError) -> None:
    for applies, message in refusals:
        if applies:
            raise error(message)


def is_reentrant(checkpointing: Mapping[str, Any]) -> bool:
    """Whether these keywords checkpoint reentrantly: given others but not `use_reentrant`, torch does."""
    keywords = {k: v for k, v in checkpointing.items() if k not in ("every_n_layers", "offload")}
    return bool(keywords) and bool(keywords.get("use_reentrant", True))
