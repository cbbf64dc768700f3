"""Fused kernels for CUDA devices (Triton).

Each computes what a few lines of torch compute elsewhere, with less memory traffic; those lines stay the reference and
serve every other device. `HF_DPOPT_KERNELS=0` in the environment keeps to torch.

The files of this folder are its attributes (`kernels.outer`), imported at their first use and not before: they import
Triton, which installations for CPUs do not have.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

SWITCH = "HF_DPOPT_KERNELS"
FILES = ("cross_entropy", "layer_norm", "outer")


def __getattr__(name: str) -> Any:
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache
def _work_on(device: torch.device) -> bool:
    """Whether the kernels can be built for a device: builds and runs one."""
    if os.environ.get(SWITCH) == "0" or importlib.util.find_spec("triton") is None:
        return False
    try:
        losses = __getattr__("cross_entropy").losses
        losses(torch.zeros(1, 1, 8, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
    except Exception as error:  # whatever a compiler or driver raises
        warnings.warn(
            f"The fused kernels cannot be built for {device} ({type(error).__name__}: {error}), so clipping is "
            f"slower. Triton needs a C compiler. To go without it on purpose, set {SWITCH}=0.",
            stacklevel=2,
        )
        return False
    return True


def takes(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> bool:
    """Whether the kernels run on tensors like these: all on one CUDA device, each of one of the dtypes, none empty."""
    first = tensors[0]
    return (
        first.is_cuda
        and all(x.device == first.device and x.dtype in dtypes and x.numel() > 0 for x in tensors)
        and _work_on(first.device)
    )


def on_device_of_first(launch: Callable[P, R]) -> Callable[P, R]:
    """Make Triton launch on the device of the first tensor, not on the current one."""

    @functools.wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **kwargs)

    return launched
