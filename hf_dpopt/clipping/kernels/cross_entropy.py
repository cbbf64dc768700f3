"""Cross entropy of tokens in one pass over the logits, and its gradient in their place in a second.

Shape legend: B = records, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_dpopt.clipping.kernels import on_device_of_first


@triton.jit
def _forward_kernel(
    logits_ptr, labels_ptr, losses_ptr, largest_ptr, log_sum_ptr, T, V, stride_b, stride_t, BLOCK_V: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += (row // T) * stride_b + (row % T) * stride_t
    v = tl.arange(0, BLOCK_V)
    # one running maximum and sum per lane; they meet at the end
    largest = tl.full((BLOCK_V,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        x = tl.load(logits_ptr + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)
        larger = tl.where(x > largest, x, largest)
        base = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf has no value
        total = total * tl.exp(largest - base) + tl.exp(x - base)  # a NaN logit stays in the sum
        largest = larger
    top = tl.max(largest, axis=0)
    total = tl.sum(total * tl.exp(largest - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    log_sum = tl.log(total)
    label = tl.load(labels_ptr + row)
    at_label = tl.load(logits_ptr + tl.where(label < 0, 0, label)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(label < 0, 0.0, log_sum - (at_label - top)))
    tl.store(largest_ptr + row, top)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _gradient_kernel(
    logits_ptr, labels_ptr, share_ptr, largest_ptr, log_sum_ptr, T, V, stride_b, stride_t, BLOCK_V: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += (row // T) * stride_b + (row % T) * stride_t
    label = tl.load(labels_ptr + row)
    share = tl.load(share_ptr + row // T)
    largest, log_sum = tl.load(largest_ptr + row), tl.load(log_sum_ptr + row)
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + v, mask=v < V, other=0.0).to(tl.float32)
        gradient = tl.exp(x - largest - log_sum) - tl.where(v == label, 1.0, 0.0)
        gradient = tl.where(label < 0, 0.0, gradient * share)
        tl.store(logits_ptr + v, gradient.to(logits_ptr.dtype.element_ty), mask=v < V)


@on_device_of_first
def losses(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Cross entropy of every token, float32, (B, T), 0 where the label is negative; and `gradient_`'s normalisers.

    Args:
        logits_BTV: float32 or bfloat16, (B, T, V), contiguous along V.
        labels_BT: integers below V, (B, T).
    """
    losses_BT, largest_BT, log_sum_BT = (logits_BTV.new_empty(labels_BT.shape, dtype=torch.float32) for _ in range(3))
    _forward_kernel[(labels_BT.numel(),)](
        logits_BTV, labels_BT.contiguous(), losses_BT, largest_BT, log_sum_BT,
        labels_BT.size(1), logits_BTV.size(2), *logits_BTV.stride()[:2], **_blocks(logits_BTV.size(2)),
    )  # fmt: skip
    return losses_BT, (largest_BT, log_sum_BT)


@on_device_of_first
def gradient_(
    logits_BTV: torch.Tensor,
    labels_BT: torch.Tensor,
    shares_B: torch.Tensor,
    normalisers: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Overwrite the logits with ``shares_b`` times the gradient of a token's loss; 0 where the label is negative."""
    largest_BT, log_sum_BT = normalisers
    _gradient_kernel[(labels_BT.numel(),)](
        logits_BTV, labels_BT.contiguous(), shares_B.float(), largest_BT, log_sum_BT,
        labels_BT.size(1), logits_BTV.size(2), *logits_BTV.stride()[:2], **_blocks(logits_BTV.size(2)),
    )  # fmt: skip


def _blocks(vocabulary: int) -> dict[str, int]:
    block = min(4096, triton.next_power_of_2(vocabulary))
    return {"BLOCK_V": block, "num_warps": max(1, min(8, block // 512))}
