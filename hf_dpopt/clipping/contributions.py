"""Contributions: what one use of a parameter adds to each record's gradient, kept in the cheapest exact form.

The gradient of record b with respect to a parameter is the *sum* of its contributions. A parameter used once has one;
a tied or reused parameter has several, and its norm needs their inner products.

Shape legend: B = records, T = S = tokens, P / Q = rows / columns of a weight, V = rows of a table, D = width.
`squares` of a contribution are its squared norms and what they would be if nothing in it cancelled, (B,) each.
"""

from __future__ import annotations

import dataclasses

import torch

from hf_dpopt.clipping import products
from hf_dpopt.clipping.products import GramCache, scaled, wide

# Tokens that cancel in the norm leave the rounding of their sum behind, which a small divisor of a preconditioner
# magnifies. A squared norm holds the square of so many ulps of what the tokens are together, cancelled or not.
ULPS = 128
MAX_SQUARED = 2**20  # elements of a gradient that are squared at once; they stay in a core's cache


def _rounding(energy: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Square of what rounding may leave of tokens whose squared norms add up to `energy`."""
    return energy * (num_tokens * (ULPS * torch.finfo(energy.dtype).eps) ** 2)


def flat_by_record(x_B: torch.Tensor) -> torch.Tensor:
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
        squares_B = self.sum_by_row()[0].square().sum(dim=(1, 2))
        energy_B = wide(self.grad_BTD).square().sum(dim=(1, 2))
        return squares_B + _rounding(energy_B, self.grad_BTD.size(1)), squares_B

    def rounding_of(self, b: int) -> torch.Tensor:
        return _rounding(wide(self.grad_BTD[b]).square().sum(), self.grad_BTD.size(1))

    def sum_by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up the tokens of a record that share a row: sums, (B, T, D) with zeros at the end, and rows, (B, T)."""
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
            flat_BN = flat_by_record(self.grad_B)
            squares_B = torch.linalg.vector_norm(flat_BN, dim=1, dtype=wide(flat_BN[:0]).dtype).square()
            return squares_B, squares_B
        # some records at a time: the squares of a wide gradient would take its memory once more
        at_once = max(1, MAX_SQUARED * self.num_records // max(1, self.grad_B.numel()))
        squares_B = torch.cat([flat_by_record(wide(part)).square().sum(dim=1) for part in self.grad_B.split(at_once)])
        return squares_B, squares_B

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        total.view(-1).addmv_(flat_by_record(self.grad_B).mT.to(total.dtype), factors_B.to(total.dtype), beta=beta)

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
