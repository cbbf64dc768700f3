"""Norms and weighted sums of outer products ``left_b^T right_b`` that are never materialised.

Two ways, with the same result: blocked products in torch, or the fused kernels of `hf_dpopt.clipping.kernels` for
bfloat16 on a CUDA device. All sums are in float32 (float64 for float64 models): a Gram matrix rounded to bfloat16 can
make a squared norm negative, and the record would go unclipped.

Shape legend: B = records, T = S = tokens, P / Q = columns of the left / right factor, D = width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_dpopt.clipping import kernels

# Tokens of one block of a Gram matrix: halves its cost and bounds its memory.
BLOCK = 64
MAX_COPIED = 2**24  # elements of a wide copy


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the accumulation dtype: float64 stays, everything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def scaled(x: torch.Tensor, factors_B: torch.Tensor) -> torch.Tensor:
    """Multiply every record: ``factors_b x_b`` in the accumulation dtype."""
    return wide(x) * factors_B.view(-1, *[1] * (x.dim() - 1)).to(wide(x).dtype)


class GramCache:
    """The Gram blocks of the right-hand factor used last: query, key and value layers read the same input."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None  # held, so that its memory cannot become another tensor's
        self._blocks: list[torch.Tensor] = []

    def blocks(self, x_BTD: torch.Tensor) -> list[torch.Tensor]:
        if self._of is None or place(self._of) != place(x_BTD):
            self._of, self._blocks = x_BTD, list(_gram_blocks(wide(x_BTD)))
        return self._blocks


def squares(
    left_BTP: torch.Tensor, right_BTQ: torch.Tensor, grams: GramCache | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""``sum_{s,t} <l_s, l_t> <r_s, r_t>``, and its value for orthogonal tokens; (B,) each.

    References:
        Li et al. (2022), arXiv:2110.05679, Eq. 3.
    """
    if left_BTP.size(1) == 1:
        of_left, of_right = (wide(x).square().sum(dim=(1, 2)) for x in (left_BTP, right_BTQ))
        return of_left * of_right, of_left * of_right
    if kernels.takes(left_BTP, right_BTQ, dtypes=(torch.bfloat16,)):
        return kernels.outer.squares(left_BTP, right_BTQ)
    right_blocks = (grams or GramCache()).blocks(right_BTQ)
    found = [
        _squares(wide(left_BTP[part]), [block[part] for block in right_blocks]) for part in _parts(left_BTP)
    ]  # fmt: skip
    squares_B, energy_B = (torch.cat(x) for x in zip(*found, strict=True))
    return squares_B, energy_B


def add_weighted_sum_(
    total_PQ: torch.Tensor, left_BTP: torch.Tensor, right_BTQ: torch.Tensor, factors_B: torch.Tensor, *, beta: int
) -> None:
    """``total = beta total + sum_b factors_b left_b^T right_b``; beta is 1, or 0 to overwrite `total`."""
    if kernels.takes(left_BTP, right_BTQ, dtypes=(torch.bfloat16,)) and total_PQ.is_contiguous():
        return kernels.outer.add_weighted_sum_(total_PQ, left_BTP, right_BTQ, factors_B, beta=beta)
    left_is_narrower = left_BTP.size(2) <= right_BTQ.size(2)
    for part in _parts(right_BTQ if left_is_narrower else left_BTP):
        left, right, factors = left_BTP[part], right_BTQ[part], factors_B[part]
        if left_is_narrower:  # scale the narrower operand
            left, right = scaled(left, factors), wide(right)
        else:
            left, right = wide(left), scaled(right, factors)
        total_PQ.addmm_(left.flatten(0, 1).mT.to(total_PQ.dtype), right.flatten(0, 1).to(total_PQ.dtype), beta=beta)
        beta = 1
    return None


def _gram_blocks(x_BTD: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of ``x x^T`` up to the diagonal block, (B, S, T') each; the rest follows by symmetry."""
    for first in range(0, x_BTD.size(1), BLOCK):
        upto = first + BLOCK
        yield torch.bmm(x_BTD[:, first:upto], x_BTD[:, :upto].mT)


def _squares(left_BTP: torch.Tensor, right_blocks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    squares_B = left_BTP.new_zeros(left_BTP.size(0))
    energy_B = torch.zeros_like(squares_B)
    blocks = zip(_gram_blocks(left_BTP), right_blocks, strict=True)
    for first, (left_BST, right_BST) in zip(range(0, left_BTP.size(1), BLOCK), blocks, strict=True):
        products_BST = left_BST.mul_(right_BST)
        below, diagonal = products_BST[..., :first], products_BST[..., first:]
        squares_B += 2 * below.sum(dim=(1, 2)) + diagonal.sum(dim=(1, 2))
        energy_B += diagonal.diagonal(dim1=1, dim2=2).sum(dim=1)
    return squares_B, energy_B


def _parts(x_BTD: torch.Tensor) -> list[slice]:
    """Slices of records that keep the wide copy of a large narrow tensor (logits in bfloat16) small."""
    num_records = x_BTD.size(0)
    is_wide = x_BTD.dtype == wide(x_BTD[:0]).dtype
    at_once = max(1, num_records if is_wide else MAX_COPIED * num_records // max(1, x_BTD.numel()))
    return [slice(first, first + at_once) for first in range(0, num_records, at_once)]


def place(x: torch.Tensor) -> tuple:
    """Key that is equal for two tensors on the same memory, read the same way; hold both while comparing."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype
