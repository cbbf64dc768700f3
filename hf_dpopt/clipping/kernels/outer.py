"""Norms and weighted sums of the outer products ``left_b^T right_b`` from bfloat16 factors, without wide copies.

Products of bfloat16 numbers are exact in float32, where both kernels add them up, so these results are as good as from
factors that were converted to float32 first. Scaled factors in bfloat16 would not be: a clip factor times a gradient
rounds, and where tokens cancel the rounding is all that is left of a record.

Shape legend: B = records, T = tokens, P / Q = columns of the left / right factor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_dpopt.clipping.kernels import on_device_of_first

TOKENS = 64  # of a tile of a Gram matrix
BLOCK_P = BLOCK_Q = 128
# Tiles of small weights do not fill a device: the records are then split until there are about this many programs, two
# for each multiprocessor of the largest devices.
PROGRAMS = 264


@triton.jit
def _squares_kernel(
    left_ptr, right_ptr, found_ptr,
    T, P, Q, num_tiles, one,
    left_b, left_t, left_p, right_b, right_t, right_q,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (i, j), j <= i, of both Gram matrices of one record, multiplied and added up; never written to memory."""
    tile, b = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # the square root may round across a whole number
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    rows, columns = i * BLOCK_T + tl.arange(0, BLOCK_T), j * BLOCK_T + tl.arange(0, BLOCK_T)
    of_left = _gram_tile(
        left_ptr + b.to(tl.int64) * left_b, left_t, left_p, rows, columns, T, P, one, BLOCK_T, BLOCK_K
    )
    of_right = _gram_tile(
        right_ptr + b.to(tl.int64) * right_b, right_t, right_q, rows, columns, T, Q, one, BLOCK_T, BLOCK_K
    )
    products = of_left * of_right
    total = tl.sum(tl.sum(products, axis=1), axis=0)
    on_diagonal = tl.where(rows[:, None] == columns[None, :], products, 0.0)
    found_ptr += tl.program_id(0)
    tl.store(found_ptr, tl.where(i == j, total, 2 * total))
    tl.store(found_ptr + tl.num_programs(0), tl.sum(tl.sum(on_diagonal, axis=1), axis=0))


@triton.jit
def _gram_tile(
    x_ptr, stride_t, stride_k, rows, columns, T, K, one, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    gram = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_t + k[None, :] * stride_k
    column_ptrs = x_ptr + columns.to(tl.int64)[None, :] * stride_t + k[:, None] * stride_k
    for first in range(0, K, BLOCK_K):
        inside = first + k < K
        x = tl.load(row_ptrs, mask=(rows[:, None] < T) & inside[None, :], other=0.0)
        y = tl.load(column_ptrs, mask=(columns[None, :] < T) & inside[:, None], other=0.0)
        # Added up outside of the tensor cores, which truncate: over a vocabulary, norms would come out too small. The
        # compiler would move a plain addition into them; it cannot know that the factor is 1.
        gram += one * tl.dot(x, y, input_precision="ieee")
        row_ptrs += BLOCK_K * stride_k
        column_ptrs += BLOCK_K * stride_k
    return gram


@on_device_of_first
def squares(left_BTP: torch.Tensor, right_BTQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of ``left_b^T right_b``, and their values for orthogonal tokens; float32, (B,) each.

    Args:
        left_BTP: bfloat16, (B, T, P).
        right_BTQ: bfloat16, (B, T, Q).

    References:
        Li et al. (2022), arXiv:2110.05679, Eq. 3.
    """
    B, T, P = left_BTP.shape
    rows = triton.cdiv(T, TOKENS)
    num_tiles = rows * (rows + 1) // 2
    found_2BN = left_BTP.new_empty(2, B, num_tiles, dtype=torch.float32)
    _squares_kernel[(num_tiles * B,)](
        left_BTP, right_BTQ, found_2BN, T, P, right_BTQ.size(2), num_tiles, 1.0,
        *left_BTP.stride(), *right_BTQ.stride(), BLOCK_T=TOKENS,
        BLOCK_K=128 if T <= 256 else 64, num_warps=4, num_stages=3 if T <= 256 else 4,
    )  # fmt: skip
    squares_B, energy_B = found_2BN.sum(dim=2)
    return squares_B, energy_B


@triton.jit
def _weighted_sum_kernel(
    left_ptr, right_ptr, factors_ptr, out_ptr,
    B, T, P, Q, records_each,
    left_b, left_t, left_p, right_b, right_t, right_q,
    ACCUMULATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Tile (p, q) of the sum over some records; the factor multiplies the float32 product of a block of tokens."""
    tiles_q = tl.cdiv(Q, BLOCK_Q)
    tile, part = tl.program_id(0), tl.program_id(1)
    p = ((tile // tiles_q) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    q = ((tile % tiles_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    blocks_of_record = tl.cdiv(T, BLOCK_T)
    first = part * records_each
    records = tl.minimum(records_each, B - first)
    total = tl.zeros((BLOCK_P, BLOCK_Q), dtype=tl.float32)
    for step in range(records * blocks_of_record):
        b, token = first + step // blocks_of_record, (step % blocks_of_record) * BLOCK_T + t
        rows = b.to(tl.int64) * left_b + token.to(tl.int64) * left_t
        left = tl.load(
            left_ptr + rows[:, None] + p[None, :] * left_p, mask=(token[:, None] < T) & (p[None, :] < P), other=0.0
        )
        rows = b.to(tl.int64) * right_b + token.to(tl.int64) * right_t
        right = tl.load(
            right_ptr + rows[:, None] + q[None, :] * right_q, mask=(token[:, None] < T) & (q[None, :] < Q), other=0.0
        )
        total += tl.load(factors_ptr + b) * tl.dot(tl.trans(left), right, input_precision="ieee")
    place = part.to(tl.int64) * P * Q + p[:, None] * Q + q[None, :]
    inside = (p[:, None] < P) & (q[None, :] < Q)
    if ACCUMULATE:
        total += tl.load(out_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, total, mask=inside)


@on_device_of_first
def add_weighted_sum_(
    total_PQ: torch.Tensor, left_BTP: torch.Tensor, right_BTQ: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1
) -> None:
    """``total = beta total + sum_b factors_b left_b^T right_b``; the same bits in every run.

    Args:
        total_PQ: float32, (P, Q), contiguous.
        left_BTP: bfloat16, (B, T, P).
        right_BTQ: bfloat16, (B, T, Q).
        factors_B: weights of the records, (B,).
        beta: weight of the old `total`: 1, or 0 to overwrite it.
    """
    B, T, P = left_BTP.shape
    Q = right_BTQ.size(2)
    tiles = triton.cdiv(P, BLOCK_P) * triton.cdiv(Q, BLOCK_Q)
    records_each = triton.cdiv(B, max(1, min(B, PROGRAMS // tiles)))
    num_parts = triton.cdiv(B, records_each)
    out = total_PQ if num_parts == 1 else total_PQ.new_empty(num_parts, P, Q)
    _weighted_sum_kernel[(tiles, num_parts)](
        left_BTP, right_BTQ, factors_B.float().contiguous(), out, B, T, P, Q, records_each,
        *left_BTP.stride(), *right_BTQ.stride(), ACCUMULATE=num_parts == 1 and beta == 1,
        BLOCK_P=BLOCK_P, BLOCK_Q=BLOCK_Q, BLOCK_T=128, num_warps=8, num_stages=3,
    )  # fmt: skip
    if num_parts > 1 and beta:
        total_PQ += out.sum(dim=0)
    elif num_parts > 1:
        torch.sum(out, dim=0, out=total_PQ)
