"""Launch of kernels on the device of their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_device_of_first(launch: Callable[P, R]) -> Callable[P, R]:
    """Make Triton launch on the device of the first tensor, not on the current one."""

    @functools.wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **kwargs)

    return launched
