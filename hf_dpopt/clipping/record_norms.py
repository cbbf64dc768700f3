"""Norms of the records' gradients from their contributions, cross terms of a parameter's uses included.

Shape legend: B = records, T = S = tokens, P / Q = rows / columns of a weight, D = width, N = parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_dpopt.clipping.contributions import Contribution, Dense, Outer, Rows, Transposed, flat_by_record
from hf_dpopt.clipping.products import GramCache, wide
from hf_dpopt.clipping.scaling import Scale

# A record whose tokens or uses cancel loses digits in the Gram form; below this share of the un-cancelled energy its
# norm is taken from the materialised gradient instead. At 0.05, float32 rounding stays within 4e-6 of the norm.
CANCELLATION = 0.05


def _inner_outer_outer(x: Outer, y: Outer) -> torch.Tensor:
    left_BST = wide(x.left_BTP) @ wide(y.left_BTP).mT
    return (left_BST * (wide(x.right_BTQ) @ wide(y.right_BTQ).mT)).sum(dim=(1, 2))


def _inner_rows_rows(x: Rows, y: Rows) -> torch.Tensor:
    same_BST = x.ids_BT.unsqueeze(2) == y.ids_BT.unsqueeze(1)
    return (same_BST * (wide(x.grad_BTD) @ wide(y.grad_BTD).mT)).sum(dim=(1, 2))


def _inner_dense_dense(x: Dense, y: Dense) -> torch.Tensor:
    return flat_by_record(wide(x.grad_B) * wide(y.grad_B)).sum(dim=1)


def _inner_outer_rows(x: Outer, y: Rows) -> torch.Tensor:
    # sum_{s,t} left[s, id_t] <right_s, g_t>: gathers T columns, never a (V, D) table per record
    num_positions = x.left_BTP.size(1)
    columns_BST = x.left_BTP.gather(2, y.ids_BT.unsqueeze(1).expand(-1, num_positions, -1))
    return (wide(columns_BST) * (wide(x.right_BTQ) @ wide(y.grad_BTD).mT)).sum(dim=(1, 2))


def _inner_outer_dense(x: Outer, y: Dense) -> torch.Tensor:
    return (torch.bmm(wide(x.left_BTP), wide(y.grad_B)) * wide(x.right_BTQ)).sum(dim=(1, 2))


def _inner_rows_dense(x: Rows, y: Dense) -> torch.Tensor:
    index_BTD = x.ids_BT.unsqueeze(2).expand(-1, -1, x.grad_BTD.size(-1))
    return (wide(y.grad_B).gather(1, index_BTD) * wide(x.grad_BTD)).sum(dim=(1, 2))


def _inner_transposed(x: Transposed, y: Transposed) -> torch.Tensor:
    return _inner_rows_rows(x.of, y.of)


_INNER = {
    (Transposed, Transposed): _inner_transposed,
    (Outer, Outer): _inner_outer_outer,
    (Rows, Rows): _inner_rows_rows,
    (Dense, Dense): _inner_dense_dense,
    (Outer, Rows): _inner_outer_rows,
    (Outer, Dense): _inner_outer_dense,
    (Rows, Dense): _inner_rows_dense,
}


def inner(x: Contribution, y: Contribution) -> torch.Tensor:
    """Per-record inner products of two contributions to the same parameter, (B,)."""
    if (type(x), type(y)) not in _INNER:
        x, y = y, x
    return _INNER[type(x), type(y)](x, y)  # type: ignore[operator]


def has_cancelled(squares: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """Records in which so much cancelled that a norm from products has lost its digits, (B,) bool."""
    return squares < CANCELLATION * energy


def _squares(contributions: list[Contribution], grams: GramCache | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``||sum_i c_i||^2``, own squares and cross terms, and what it would be if nothing cancelled; (B,) each."""
    own = [c.squares(grams) for c in contributions]
    squares_B, energy_B = (torch.stack(x).sum(dim=0) for x in zip(*own, strict=True)) if len(own) > 1 else own[0]
    for i, x in enumerate(contributions):
        for y in contributions[:i]:
            squares_B += 2 * inner(x, y)
    return squares_B, energy_B


def squared_norms(
    contributions: Mapping[str, list[Contribution]], grams: GramCache | None = None, scale: Scale | None = None
) -> dict[str, torch.Tensor]:
    """Name -> squared norms of the records' gradients, (B,), divided by D of `scale`, given every use of a parameter.

    A record whose tokens or uses cancel is taken again from its materialised gradient. Which ones do is asked once for
    all parameters: on a GPU, every question is a wait for the device.
    """
    if not contributions:
        return {}
    if scale is not None:
        contributions = {name: scale.of(name, uses) for name, uses in contributions.items()}
    found = [_squares(uses, grams) for uses in contributions.values()]
    squares_NB, energy_NB = (torch.stack(x) for x in zip(*found, strict=True))
    names = list(contributions)
    for n, b in has_cancelled(squares_NB, energy_NB).nonzero().tolist():
        uses = contributions[names[n]]
        record = torch.stack([use.of_record(b) for use in uses]).sum(dim=0)
        squares_NB[n, b] = record.square().sum() + torch.stack([use.rounding_of(b) for use in uses]).sum()
    return dict(zip(names, squares_NB, strict=True))
