"""What one use of a parameter adds to each record's gradient, kept in the cheapest exact form.

The gradient of record b with respect to a parameter is the *sum* of its contributions. A parameter used once has one;
a tied or reused parameter has several, and its norm needs their inner products.

Shape legend: B = records, T = S = tokens, P / Q = rows / columns of a weight, V = rows of a table, D = width.
`squares` of a contribution are its squared norms and what they would be if nothing in it cancelled, (B,) each.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from hf_dpopt.clipping import products
from hf_dpopt.clipping.products import GramCache, scaled, wide
from hf_dpopt.common.types import ClippedSums

if TYPE_CHECKING:
    from hf_dpopt.clipping.scaling import Scale

# A record whose tokens or uses cancel loses digits in the Gram form; below this share of the un-cancelled energy its
# norm is taken from the materialised gradient instead. At 0.05, float32 rounding stays within 4e-6 of the norm.
CANCELLATION = 0.05
# Tokens that cancel in the norm leave the rounding of their sum behind, which a small divisor of a preconditioner
# magnifies. A squared norm holds the square of so many ulps of what the tokens are together, cancelled or not.
ULPS = 128
COUNT = "units within the clip"  # a coordinate of the sum that is no parameter
MAX_PACKED = 2**15  # elements of a parameter that goes into a pack
MAX_SQUARED = 2**20  # elements of a gradient that are squared at once; they stay in a core's cache


def _rounding(energy: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Square of what rounding may leave of tokens whose squared norms add up to `energy`."""
    return energy * (num_tokens * (ULPS * torch.finfo(energy.dtype).eps) ** 2)


def _flat(x_B: torch.Tensor) -> torch.Tensor:
    """(B, ..) as (B, values), a single number per record included."""
    return x_B.reshape(len(x_B), -1)


@dataclasses.dataclass(frozen=True)
class Outer:
    """``left_b^T right_b``: a matmul layer whose per-record gradients are larger than its inputs.

    Shapes: (B, T, P) and (B, T, Q).
    """

    left_BTP: torch.Tensor
    right_BTQ: torch.Tensor

    @property
    def num_records(self) -> int:
        return self.left_BTP.size(0)

    def squares(self, grams: GramCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        squares_B, energy_B = products.squares(self.left_BTP, self.right_BTQ, grams)
        return squares_B + _rounding(energy_B, self.left_BTP.size(1)), energy_B

    def rounding_of(self, b: int) -> torch.Tensor:
        energy = (wide(self.left_BTP[b]).square().sum(dim=1) * wide(self.right_BTQ[b]).square().sum(dim=1)).sum()
        return _rounding(energy, self.left_BTP.size(1))

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        products.add_weighted_sum_(total, self.left_BTP, self.right_BTQ, factors_B, beta=beta)

    def of_record(self, b: int) -> torch.Tensor:
        return wide(self.left_BTP[b]).mT @ wide(self.right_BTQ[b])

    def select(self, keep_B: torch.Tensor) -> Outer:
        return Outer(self.left_BTP[keep_B], self.right_BTQ[keep_B])


@dataclasses.dataclass(frozen=True)
class Rows:
    """``sum_t e_{id_t} g_t^T``: an embedding lookup. ids (B, T), gradients (B, T, D), table of V rows."""

    ids_BT: torch.Tensor
    grad_BTD: torch.Tensor
    num_rows: int

    @property
    def num_records(self) -> int:
        return self.ids_BT.size(0)

    def squares(self, grams: GramCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        squares_B = self.combined()[0].square().sum(dim=(1, 2))
        energy_B = wide(self.grad_BTD).square().sum(dim=(1, 2))
        return squares_B + _rounding(energy_B, self.grad_BTD.size(1)), squares_B

    def rounding_of(self, b: int) -> torch.Tensor:
        return _rounding(wide(self.grad_BTD[b]).square().sum(), self.grad_BTD.size(1))

    def combined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of one record that share a row added up, (B, T, D) with zeros at the end, and their rows, (B, T)."""
        # In O(B T D). Sorted ids give the shares their place; to count the distinct ones would make the host wait for
        # a GPU.
        num_records, num_tokens = self.ids_BT.shape
        sorted_BT, order_BT = self.ids_BT.sort(dim=1)
        is_new_BT = torch.ones_like(sorted_BT)
        is_new_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
        row_BT = torch.empty_like(order_BT).scatter_(1, order_BT, is_new_BT.cumsum(dim=1) - 1)
        ids_BT = torch.zeros_like(self.ids_BT).scatter_(1, row_BT, self.ids_BT)
        row_BT += num_tokens * torch.arange(num_records, device=row_BT.device).unsqueeze(1)
        grad_ND = wide(self.grad_BTD).flatten(0, 1)
        rows_ND = torch.zeros_like(grad_ND).index_add_(0, row_BT.flatten(), grad_ND)
        return rows_ND.view(num_records, num_tokens, -1), ids_BT

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        grad_BTD = scaled(self.grad_BTD, factors_B).to(total.dtype)
        if not beta:
            total.zero_()
        total.index_add_(0, self.ids_BT.flatten(), grad_BTD.flatten(0, 1))

    def of_record(self, b: int) -> torch.Tensor:
        grad_TD = wide(self.grad_BTD[b])
        return grad_TD.new_zeros(self.num_rows, grad_TD.size(-1)).index_add_(0, self.ids_BT[b], grad_TD)

    def select(self, keep_B: torch.Tensor) -> Rows:
        return Rows(self.ids_BT[keep_B], self.grad_BTD[keep_B], self.num_rows)


@dataclasses.dataclass(frozen=True)
class Dense:
    """The per-record gradients themselves, (B, *parameter shape): only where they are small."""

    grad_B: torch.Tensor

    @property
    def num_records(self) -> int:
        return self.grad_B.size(0)

    def squares(self, grams: GramCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.grad_B.is_cuda:
            flat_BN = _flat(self.grad_B)
            squares_B = torch.linalg.vector_norm(flat_BN, dim=1, dtype=wide(flat_BN[:0]).dtype).square()
            return squares_B, squares_B
        # some records at a time: the squares of a wide gradient would take its memory once more
        at_once = max(1, MAX_SQUARED * self.num_records // max(1, self.grad_B.numel()))
        squares_B = torch.cat([_flat(wide(part)).square().sum(dim=1) for part in self.grad_B.split(at_once)])
        return squares_B, squares_B

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        total.view(-1).addmv_(_flat(self.grad_B).mT.to(total.dtype), factors_B.to(total.dtype), beta=beta)

    def of_record(self, b: int) -> torch.Tensor:
        return wide(self.grad_B[b])

    def rounding_of(self, b: int) -> torch.Tensor:
        return wide(self.grad_B[:0]).sum()  # 0: what was formed is what is summed

    def select(self, keep_B: torch.Tensor) -> Dense:
        return Dense(self.grad_B[keep_B])


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A contribution to the transpose of the parameter: a low-rank embedding keeps its table as (D, V)."""

    of: Rows

    @property
    def num_records(self) -> int:
        return self.of.num_records

    def squares(self, grams: GramCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.of.squares(grams)

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        self.of.add_weighted_sum_(total.mT, factors_B, beta=beta)

    def of_record(self, b: int) -> torch.Tensor:
        return self.of.of_record(b).mT

    def rounding_of(self, b: int) -> torch.Tensor:
        return self.of.rounding_of(b)

    def select(self, keep_B: torch.Tensor) -> Transposed:
        return Transposed(self.of.select(keep_B))


Contribution = Outer | Rows | Dense | Transposed


class Pack:
    """Small materialised gradients of many parameters side by side: one operation for all instead of some for each.

    Biases, norms and low-rank factors are most of the parameters of a model by number and few of them by size; a GPU
    computes faster than Python can ask it one by one.

    Args:
        gradients: name -> per-record gradients of the one use of that parameter, on one device.
    """

    def __init__(self, gradients: Mapping[str, Dense]):
        flat = [_flat(dense.grad_B) for dense in gradients.values()]
        self._names, self._sizes = list(gradients), [x_BN.size(1) for x_BN in flat]
        self._shapes = [dense.grad_B.shape[1:] for dense in gradients.values()]
        self._grad_BN = wide(torch.cat(flat, dim=1))

    @staticmethod
    def takes(uses: list[Contribution]) -> bool:
        """Whether these contributions of a parameter can go into a pack."""
        first = uses[0]
        return len(uses) == 1 and isinstance(first, Dense) and first.grad_B[:1].numel() <= MAX_PACKED

    def squared_norms(self, scale: Scale | None = None) -> torch.Tensor:
        """Of the parameters together, (B,), divided by the scale's D."""
        if scale is None or not scale.parts.keys() & set(self._names):
            return Dense(self._grad_BN).squares()[0]
        like = zip(self._names, self._shapes, strict=True)
        weights = [scale.weights(name, self._grad_BN.new_empty(1).expand(shape)) for name, shape in like]
        return Dense(self._grad_BN * torch.cat(weights)).squares()[0]

    def select(self, keep_B: torch.Tensor) -> Pack:
        kept = copy.copy(self)
        kept._grad_BN = self._grad_BN[keep_B]
        return kept

    def weighted_sums(self, factors_B: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> ``sum_b factors_b g_b``, flat."""
        total_N = factors_B.to(self._grad_BN.dtype) @ self._grad_BN
        return dict(zip(self._names, total_N.split(self._sizes), strict=True))


class ClippedSum:
    """A sum over records that takes memory for a parameter when its first contribution comes.

    A sum of all parameters that is there from the start would stand beside the activations of the whole forward, where
    ordinary training has no gradients yet.

    Args:
        parameters: name -> parameter; all of them are in the result, those without contributions as zeros.
        scale: what the records are multiplied by before the clip; None for nothing.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], scale: Scale | None = None):
        self._parameters = parameters
        self._totals: dict[str, torch.Tensor] = {}
        self.scale, self._is_scaled = scale, False
        self._count = 0.0  # of units, +1/2 for one within the clip and -1/2 for one that was clipped

    def count(self, is_clipped_U: torch.Tensor) -> None:
        """Counts units that were not dropped."""
        if self.scale is not None and self.scale.count_weight:
            self._count += float((0.5 - is_clipped_U.double()).sum())

    def add(self, name: str, contribution: Contribution, factors_B: torch.Tensor) -> None:
        """Adds ``sum_b factors_b g_b`` of one contribution to the sum of parameter `name`."""
        assert not self._is_scaled, "the sum was taken"
        if contribution.num_records == 0:
            return
        if name in self._totals:
            contribution.add_weighted_sum_(self._totals[name], factors_B)
        else:  # fresh memory, overwritten with beta=0: no pass of zeros
            total = self._new(name, torch.empty)
            contribution.add_weighted_sum_(total, factors_B, beta=0)
            self._totals[name] = total

    def add_pack(self, pack: Pack, factors_B: torch.Tensor) -> None:
        """Adds ``sum_b factors_b g_b`` of every gradient of the pack."""
        parts = pack.weighted_sums(factors_B)
        known = [name for name in parts if name in self._totals]
        new = {name: self._new(name, torch.empty) for name in parts if name not in self._totals}
        if known:
            totals = [self._totals[name] for name in known]
            torch._foreach_add_(totals, [parts[n].view_as(t) for n, t in zip(known, totals, strict=True)])
        if new:  # copied: a view of the pack would keep all of it
            torch._foreach_copy_(list(new.values()), [parts[name].view_as(total) for name, total in new.items()])
        self._totals |= new

    @staticmethod
    def _dtype(parameter: torch.Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, torch.float32)

    def _new(self, name: str, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        p = self._parameters[name]  # contiguous, whatever the parameter is
        return make(p.shape, dtype=self._dtype(p), device=p.device)

    def result(self) -> ClippedSums:
        """Name -> sum, in the parameter's shape, float32 (float64 for float64 parameters); the sum itself, no copy.

        What is added afterwards would not be scaled, so nothing can be.
        """
        if self.scale is not None and not self._is_scaled:
            self._is_scaled = True
            for name, total in self._totals.items():
                self.scale.apply_(name, total)
        sums = {
            name: self._totals[name] if name in self._totals else self._new(name, torch.zeros)
            for name in self._parameters
        }
        if self.scale is not None and self.scale.count_weight:
            first = next(iter(sums.values()))
            sums[COUNT] = first.new_tensor([self.scale.count_weight * self._count])
        return ClippedSums(sums)


def _inner_outer_outer(x: Outer, y: Outer) -> torch.Tensor:
    left_BST = wide(x.left_BTP) @ wide(y.left_BTP).mT
    return (left_BST * (wide(x.right_BTQ) @ wide(y.right_BTQ).mT)).sum(dim=(1, 2))


def _inner_rows_rows(x: Rows, y: Rows) -> torch.Tensor:
    same_BST = x.ids_BT.unsqueeze(2) == y.ids_BT.unsqueeze(1)
    return (same_BST * (wide(x.grad_BTD) @ wide(y.grad_BTD).mT)).sum(dim=(1, 2))


def _inner_dense_dense(x: Dense, y: Dense) -> torch.Tensor:
    return _flat(wide(x.grad_B) * wide(y.grad_B)).sum(dim=1)


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
    """Where so much cancelled that a norm from products has lost its digits."""
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


def squared_norm(contributions: list[Contribution], grams: GramCache | None = None) -> torch.Tensor:
    """``||sum_i c_i||^2`` per record, (B,), for one parameter."""
    return squared_norms({"": contributions}, grams)[""]
