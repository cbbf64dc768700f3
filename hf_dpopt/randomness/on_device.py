"""Normals drawn on a CUDA device itself, where its kernel can be built and draws what the CPU draws."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch

from hf_dpopt.common.log import warn_once
from hf_dpopt.randomness.blocks import COUNTER, NORMALS, add_on_host
from hf_dpopt.randomness.spans import Part

SWITCH = "HF_DPOPT_KERNELS"  # that of `hf_dpopt.clipping.kernels`: 0 keeps to torch
CLOSE = 2.0**-22  # relative: two libraries of float64 functions, each rounded to float32


def serves(device: torch.device) -> bool:
    """Whether the noise of tensors on a device is drawn there."""
    return device.type == "cuda" and _works_on(device)


def _kernel() -> Any:
    return importlib.import_module("hf_dpopt.randomness.kernel")  # imports Triton, which CPUs do without


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether the kernel can be built for a device, and draws the normals of the CPU; builds and runs it."""
    if os.environ.get(SWITCH) == "0" or importlib.util.find_spec("triton") is None:
        why = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else "Triton is not installed"
    else:
        try:
            if _draws_alike(device):
                return True
            why = "its kernel draws other values there"
        except Exception as error:  # whatever a compiler or driver raises
            why = f"{type(error).__name__}: {error}"
    warn_once(
        f"noise on {device}",
        f"Noise for {device} is drawn on the CPU and copied, which takes longer: {why}. The noise is the same.",
    )
    return False


def _draws_alike(device: torch.device) -> bool:
    """Whether a few thousand normals are the CPU's; around a change of nonce, from within a block."""
    key, num, first = bytes(range(32)), 3000, COUNTER * NORMALS - 1003
    here, there = torch.zeros(num), torch.zeros(num, device=device)
    add_on_host(key, [Part(2**32 + 1, first, here)], 0.5)
    add_parts(key, [Part(2**32 + 1, first, there)], 0.5)
    return torch.allclose(there.cpu(), here, rtol=CLOSE, atol=1e-14)


def add_parts(key: bytes, parts: Sequence[Part], stddev: float) -> None:
    """Add ``stddev`` times their normals to parts that all lie on one device, in place.

    Args:
        key: key of the step; 32 bytes. It is on the device while the kernels run, and overwritten after them.
        parts: what is added to; none overlaps another.
        stddev: what a normal is multiplied by.
    """
    kernel, device = _kernel(), parts[0].total.device
    words = kernel.key_tensor(key, device)
    level = torch.tensor([stddev], dtype=torch.float64).to(device)
    for part in parts:
        kernel.add_normals_(part.total, words, level, tensor=part.tensor, first=part.first)
    words.zero_()
