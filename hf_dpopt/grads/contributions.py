"""What one use of a parameter adds to each record's gradient, kept in the cheapest exact form.

The gradient of record b with respect to a parameter is the *sum* of its contributions. A parameter used once has one;
a tied or reused parameter has several, and its norm needs their inner products.

Shape legend: B = records, T = S = tokens, P / Q = rows / columns of a weight, V = rows of a table, D = width.
All products are computed in float32 (float64 for float64 models): a Gram matrix rounded to bfloat16 can make a squared
norm negative, and the record would go unclipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch

# A record whose tokens or uses cancel loses digits in the Gram form; below this share of the un-cancelled energy its
# norm is taken from the materialised gradient instead. At 0.05, float32 rounding stays near 1e-6 of the norm.
CANCELLATION = 0.05
# Tokens of one block of a Gram matrix: halves its cost and bounds its memory.
BLOCK = 64
MAX_COPIED = 2**24  # elements of a wide copy
MAX_SQUARED = 2**20  # elements of a gradient that are squared at once; they stay in a core's cache


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the accumulation dtype: float64 stays, everything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def _scale(x: torch.Tensor, factors_B: torch.Tensor) -> torch.Tensor:
    return wide(x) * factors_B.view(-1, *[1] * (x.dim() - 1)).to(wide(x).dtype)


def _gram_blocks(x_BTD: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of ``x x^T`` up to the diagonal block, (B, S, T') each: the matrix is symmetric, so the rest is spared."""
    for first in range(0, x_BTD.size(1), BLOCK):
        upto = first + BLOCK
        yield torch.bmm(x_BTD[:, first:upto], x_BTD[:, :upto].mT)


class GramCache:
    """The Gram blocks of the right-hand factor used last: query, key and value layers read the same input."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None  # held, so that its memory cannot become another tensor's
        self._blocks: list[torch.Tensor] = []

    def blocks(self, x_BTD: torch.Tensor) -> list[torch.Tensor]:
        if self._of is None or _place(self._of) != _place(x_BTD):
            self._of, self._blocks = x_BTD, list(_gram_blocks(wide(x_BTD)))
        return self._blocks


def _parts(x_BTD: torch.Tensor) -> list[slice]:
    """Records to take at once, so that the wide copy of a large narrow tensor (logits in bfloat16) stays small."""
    num_records = x_BTD.size(0)
    is_wide = x_BTD.dtype == wide(x_BTD[:0]).dtype
    at_once = max(1, num_records if is_wide else MAX_COPIED * num_records // max(1, x_BTD.numel()))
    return [slice(first, first + at_once) for first in range(0, num_records, at_once)]


def _flat(x_B: torch.Tensor) -> torch.Tensor:
    """(B, ..) as (B, values), a single number per record included."""
    return x_B.reshape(len(x_B), -1)


def _place(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


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

    def squared_norm(self, grams: GramCache | None = None) -> torch.Tensor:
        r"""``sum_{s,t} <l_s, l_t> <r_s, r_t>`` (Li et al. 2022, arXiv:2110.05679, Eq. 3), (B,)."""
        if self.left_BTP.size(1) == 1:
            return wide(self.left_BTP).square().sum(dim=(1, 2)) * wide(self.right_BTQ).square().sum(dim=(1, 2))
        right_blocks = (grams or GramCache()).blocks(self.right_BTQ)
        squares = [
            self._squares(wide(self.left_BTP[part]), [block[part] for block in right_blocks])
            for part in _parts(self.left_BTP)
        ]
        squares_B, energy_B = (torch.cat(x) for x in zip(*squares, strict=True))
        for b in (squares_B < CANCELLATION * energy_B).nonzero().flatten().tolist():
            squares_B[b] = self.of_record(b).square().sum()
        return squares_B

    @staticmethod
    def _squares(left_BTP: torch.Tensor, right_blocks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms of some records, and what they would be if their tokens were orthogonal; (B,) each."""
        squares_B = left_BTP.new_zeros(left_BTP.size(0))
        energy_B = torch.zeros_like(squares_B)
        blocks = zip(_gram_blocks(left_BTP), right_blocks, strict=True)
        for first, (left_BST, right_BST) in zip(range(0, left_BTP.size(1), BLOCK), blocks, strict=True):
            products_BST = left_BST.mul_(right_BST)
            below, diagonal = products_BST[..., :first], products_BST[..., first:]
            squares_B += 2 * below.sum(dim=(1, 2)) + diagonal.sum(dim=(1, 2))
            energy_B += diagonal.diagonal(dim1=1, dim2=2).sum(dim=1)
        return squares_B, energy_B

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        left_is_narrower = self.left_BTP.size(2) <= self.right_BTQ.size(2)
        for part in _parts(self.left_BTP if self.left_BTP.size(2) > self.right_BTQ.size(2) else self.right_BTQ):
            left_BTP, right_BTQ, factors = self.left_BTP[part], self.right_BTQ[part], factors_B[part]
            if left_is_narrower:  # scale the narrower operand
                left_BTP, right_BTQ = _scale(left_BTP, factors), wide(right_BTQ)
            else:
                left_BTP, right_BTQ = wide(left_BTP), _scale(right_BTQ, factors)
            left, right = left_BTP.flatten(0, 1).mT.to(total.dtype), right_BTQ.flatten(0, 1).to(total.dtype)
            total.addmm_(left, right, beta=beta)
            beta = 1

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

    def squared_norm(self, grams: GramCache | None = None) -> torch.Tensor:
        """Tokens of one record that share a row add up before the square; (B,), in O(B T D)."""
        num_records, grad_BTD = self.ids_BT.size(0), wide(self.grad_BTD)
        record_B1 = torch.arange(num_records, device=self.ids_BT.device).unsqueeze(1)
        keys_U, inverse = torch.unique(record_B1 * self.num_rows + self.ids_BT, return_inverse=True)
        rows_UD = grad_BTD.new_zeros(keys_U.numel(), grad_BTD.size(-1))
        rows_UD.index_add_(0, inverse.flatten(), grad_BTD.flatten(0, 1))
        squares_B = grad_BTD.new_zeros(num_records)
        return squares_B.index_add_(0, keys_U // self.num_rows, rows_UD.square().sum(dim=1))

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        grad_BTD = _scale(self.grad_BTD, factors_B).to(total.dtype)
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

    def squared_norm(self, grams: GramCache | None = None) -> torch.Tensor:
        # some records at a time: the squares of a wide gradient would take its memory once more
        at_once = max(1, MAX_SQUARED * self.num_records // max(1, self.grad_B.numel()))
        return torch.cat([_flat(wide(part)).square().sum(dim=1) for part in self.grad_B.split(at_once)])

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        total.view(-1).addmv_(_flat(self.grad_B).mT.to(total.dtype), factors_B.to(total.dtype), beta=beta)

    def of_record(self, b: int) -> torch.Tensor:
        return wide(self.grad_B[b])

    def select(self, keep_B: torch.Tensor) -> Dense:
        return Dense(self.grad_B[keep_B])


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A contribution to the transpose of the parameter: a low-rank embedding keeps its table as (D, V)."""

    of: Rows

    @property
    def num_records(self) -> int:
        return self.of.num_records

    def squared_norm(self, grams: GramCache | None = None) -> torch.Tensor:
        return self.of.squared_norm(grams)

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        self.of.add_weighted_sum_(total.mT, factors_B, beta=beta)

    def of_record(self, b: int) -> torch.Tensor:
        return self.of.of_record(b).mT

    def select(self, keep_B: torch.Tensor) -> Transposed:
        return Transposed(self.of.select(keep_B))


Contribution = Outer | Rows | Dense | Transposed


class ClippedSum:
    """A sum over records that takes memory for a parameter when its first contribution comes.

    A sum of all parameters that is there from the start would stand beside the activations of the whole forward, where
    ordinary training has no gradients yet.

    Args:
        parameters: name -> parameter; all of them are in the result, those without contributions as zeros.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = parameters
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, name: str, contribution: Contribution, factors_B: torch.Tensor) -> None:
        """Adds ``sum_b factors_b g_b`` of one contribution to the sum of parameter `name`."""
        if contribution.num_records == 0:
            return
        if name in self._totals:
            contribution.add_weighted_sum_(self._totals[name], factors_B)
        else:  # fresh memory, overwritten with beta=0: no pass of zeros
            total = self._new(name, torch.empty)
            contribution.add_weighted_sum_(total, factors_B, beta=0)
            self._totals[name] = total

    def _new(self, name: str, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        p = self._parameters[name]  # contiguous, whatever the parameter is
        return make(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)

    def result(self) -> dict[str, torch.Tensor]:
        """Name -> sum, in the parameter's shape, float32 (float64 for float64 parameters); the sum itself, no copy."""
        return {
            name: self._totals[name] if name in self._totals else self._new(name, torch.zeros)
            for name in self._parameters
        }


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


def squared_norm(contributions: list[Contribution], grams: GramCache | None = None) -> torch.Tensor:
    """``||sum_i c_i||^2`` per record, (B,): own squares and, for a parameter used more than once, the cross terms."""
    own_B = torch.stack([c.squared_norm(grams) for c in contributions]).sum(dim=0)
    squares_B = own_B.clone()
    for i, x in enumerate(contributions):
        for y in contributions[:i]:
            squares_B += 2 * inner(x, y)
    if len(contributions) > 1:  # uses that cancel each other lose digits, as tokens do
        for b in (squares_B < CANCELLATION * own_B).nonzero().flatten().tolist():
            squares_B[b] = torch.stack([c.of_record(b) for c in contributions]).sum(dim=0).square().sum()
    return squares_B
