"""Several clipped sums of one step as one vector: the noise, its sensitivity and the collectives see just that.

The sums of q queries lie side by side, so a record that moves each by at most C moves the vector by ``sqrt(q) C``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Sums = dict[str, torch.Tensor]


def _name(name: str, query: int) -> str:
    return name if query == 0 else f"{name} (query {query + 1})"


def joined(sums: Sequence[Sums]) -> Sums:
    """One dict of float32 tensors; the names of a single query are kept."""
    return {_name(name, q): total.float() for q, of_query in enumerate(sums) for name, total in of_query.items()}


def split(vector: Sums, num_queries: int) -> list[Sums]:
    """What `joined` put together."""
    names = list(vector)[: len(vector) // num_queries]
    return [{name: vector[_name(name, q)] for name in names} for q in range(num_queries)]
