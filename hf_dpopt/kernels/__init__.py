"""Fused kernels for CUDA devices (Triton). Each computes what a few lines of torch compute elsewhere, in less memory
traffic; those lines stay the reference and serve every other device. Nothing here imports Triton before it is used:
installations for CPUs do not have it.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> bool:
    """Whether the kernels run on tensors like these: all on one CUDA device, each of one of the dtypes, none empty."""
    first = tensors[0]
    return (
        first.is_cuda
        and _has_triton()
        and all(x.device == first.device and x.dtype in dtypes and x.numel() > 0 for x in tensors)
    )
