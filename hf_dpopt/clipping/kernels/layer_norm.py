"""Per-record gradients of a layer norm's scale and shift in one pass over its input and output gradient.

Shape legend: B = records, T = tokens, D = width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_dpopt.clipping.kernels import on_device_of_first


@triton.jit
def _kernel(
    grad_ptr, x_ptr, mean_ptr, rstd_ptr, scale_ptr, shift_ptr, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK_D)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    scale, shift = tl.zeros((BLOCK_D,), dtype=tl.float32), tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(0, T, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        token = b * T + t
        inside = (t[:, None] < T) & (d[None, :] < D)
        place = token[:, None] * D + d[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + token, mask=t < T, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + token, mask=t < T, other=0.0).to(tl.float32)
        scale += tl.sum(grad * ((x - mean[:, None]) * rstd[:, None]), axis=0)
        shift += tl.sum(grad, axis=0)
    tl.store(scale_ptr + b * D + d, scale, mask=d < D)
    tl.store(shift_ptr + b * D + d, shift, mask=d < D)


@on_device_of_first
def parameter_gradients(
    grad_BTD: torch.Tensor, x_BTD: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scale and of the shift, float32, (B, D) each.

    Args:
        grad_BTD: gradient of the output, (B, T, D).
        x_BTD: input, (B, T, D).
        mean: means of the tokens, B * T values.
        rstd: 1 / standard deviation of the tokens, B * T values.
    """
    B, T, D = x_BTD.shape
    scale_BD, shift_BD = (x_BTD.new_empty(B, D, dtype=torch.float32) for _ in range(2))
    _kernel[(triton.cdiv(D, 128) * B,)](
        grad_BTD.contiguous(), x_BTD.contiguous(), mean.contiguous(), rstd.contiguous(), scale_BD, shift_BD, T, D,
        BLOCK_T=32, BLOCK_D=128, num_warps=4,
    )  # fmt: skip
    return scale_BD, shift_BD
