"""Refusals: what cannot be private is refused by name, with the way out, before anything is touched.

Each refusal is one line of a table: is it so, and what was found, why it matters and how to fix it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

from hf_dpopt.common.errors import DPConfigError

P = ParamSpec("P")
Refusal = tuple[bool, str]  # (does it apply, what is wrong and how to fix it)


def refuses(table: Callable[P, Iterator[Refusal]], *, error: type[DPConfigError] = DPConfigError) -> Callable[P, None]:
    """Make a table of refusals the check that raises the first of them which applies."""

    @functools.wraps(table)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        for applies, message in table(*args, **kwargs):
            if applies:
                raise error(message)

    return check


def is_reentrant(checkpointing: Mapping[str, Any]) -> bool:
    """Whether these keywords checkpoint reentrantly: given others but not `use_reentrant`, torch does."""
    keywords = {k: v for k, v in checkpointing.items() if k not in ("every_n_layers", "offload")}
    return bool(keywords) and bool(keywords.get("use_reentrant", True))
