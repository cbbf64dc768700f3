"""ChaCha20 normals on a CUDA device (Triton): drawn in registers and added, with no tensor of them.

One lane computes one block of the cipher, 8 normals. Key and level of the noise come in tensors: what a kernel is
compiled for, and what is left of it in caches on the disk, depends on neither.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

BLOCKS = 128  # of the cipher, per program


@triton.jit
def _rotated(x, turn: tl.constexpr):
    return (x << turn) | (x >> (32 - turn))


@triton.jit
def _quarter_round(a, b, c, d):
    """RFC 8439, Sec. 2.1."""
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _words(key_ptr, block, tensor):
    """The 16 words of 32 bits of every block: RFC 8439, Sec. 2.3."""
    counter, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = counter * 0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1 = zero + tl.load(key_ptr).to(tl.uint32), zero + tl.load(key_ptr + 1).to(tl.uint32)
    k2, k3 = zero + tl.load(key_ptr + 2).to(tl.uint32), zero + tl.load(key_ptr + 3).to(tl.uint32)
    k4, k5 = zero + tl.load(key_ptr + 4).to(tl.uint32), zero + tl.load(key_ptr + 5).to(tl.uint32)
    k6, k7 = zero + tl.load(key_ptr + 6).to(tl.uint32), zero + tl.load(key_ptr + 7).to(tl.uint32)
    n1, n2 = zero + tensor.to(tl.uint32), zero + (tensor >> 32).to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, counter, high, n1, n2
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + counter, x13 + high, x14 + n1, x15 + n2,
    )  # fmt: skip


@triton.jit
def _uniform(low, high):
    """The top 53 bits of a word of 64 bits, in [0, 1)."""
    return ((high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pair(u_low, u_high, v_low, v_high):
    """Box-Muller in float64, rounded once: see `hf_dpopt.randomness.chacha.NormalsOfBlocks.transform`."""
    radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(u_low, u_high)))
    angle = _uniform(v_low, v_high) * 6.283185307179586
    return (radius * tl.cos(angle)).to(tl.float32), (radius * tl.sin(angle)).to(tl.float32)


@triton.jit(do_not_specialize=["tensor", "first", "num"])
def _add_kernel(key_ptr, stddev_ptr, total_ptr, tensor, first, num, BLOCKS: tl.constexpr):
    first, program = first.to(tl.int64), tl.program_id(0).to(tl.int64)
    block = first // 8 + program * BLOCKS + tl.arange(0, BLOCKS)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _words(key_ptr, block, tensor.to(tl.int64))
    z0, z1 = _pair(x0, x1, x2, x3)
    z2, z3 = _pair(x4, x5, x6, x7)
    z4, z5 = _pair(x8, x9, x10, x11)
    z6, z7 = _pair(x12, x13, x14, x15)
    even = tl.interleave(tl.interleave(z0, z4), tl.interleave(z2, z6))
    odd = tl.interleave(tl.interleave(z1, z5), tl.interleave(z3, z7))
    normals = tl.interleave(even, odd).to(tl.float64)  # z0 .. z7 of a block, then those of the next
    place = (first // 8 + program * BLOCKS) * 8 - first + tl.arange(0, BLOCKS * 8)
    inside = (place >= 0) & (place < num)
    total = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float64)
    tl.store(total_ptr + place, (total + tl.load(stddev_ptr) * normals).to(tl.float32), mask=inside)


def add_normals_(total: torch.Tensor, key: torch.Tensor, stddev: torch.Tensor, *, tensor: int, first: int) -> None:
    """Add ``stddev`` times the normals of consecutive elements to `total`, in place.

    Args:
        total: the elements, float32, contiguous, (num,).
        key: key of the step, see `key_tensor`; on the same device.
        stddev: what a normal is multiplied by; float64, (1,), on the same device.
        tensor: number of the tensor within the step.
        first: number of the first element in the flattened, unsharded tensor.
    """
    num = total.numel()
    if num == 0:
        return
    num_blocks = (first + num - 1) // 8 - first // 8 + 1
    with torch.cuda.device_of(total):
        _add_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
            key, stddev, total, tensor, first, num, BLOCKS=BLOCKS, num_warps=4
        )


def key_tensor(key: bytes, device: torch.device) -> torch.Tensor:
    """The 8 words of a key on a device, int32, (8,); secret, to be overwritten after its use."""
    return torch.tensor(struct.unpack("<8i", key), dtype=torch.int32).to(device)
