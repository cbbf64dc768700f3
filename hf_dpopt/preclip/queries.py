"""Several clipped sums of one step as one vector: the noise, its sensitivity and the collectives see just that.

The sums of q queries lie side by side, so a record that moves each by at most C moves the vector by ``sqrt(q) C``.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_dpopt.common.types import ClippedSums, Released

_QUERY = " (query "


def _name(name: str, query: int) -> str:
    return name if query == 0 else f"{name}{_QUERY}{query + 1})"


def parameter_of(name: str) -> str:
    """Name of the parameter that a tensor of the joined sums belongs to."""
    return name.partition(_QUERY)[0]


def join(sums: Sequence[ClippedSums]) -> ClippedSums:
    """One dict of float32 tensors; the names of a single query are kept."""
    return ClippedSums(
        {_name(name, q): total.float() for q, of_query in enumerate(sums) for name, total in of_query.items()}
    )


def split(released: Released, num_queries: int) -> list[Released]:
    """The releases of the queries, whose sums `join` put together."""
    names = list(released)[: len(released) // num_queries]
    return [Released({name: released[_name(name, q)] for name in names}) for q in range(num_queries)]
