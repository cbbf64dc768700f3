"""Bytes of the tensors that are alive at once, counted as they are made: the same on every machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Alive(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def _forget(self, key: int) -> None:
        self.now -= self.bytes.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.bytes:
                    self.bytes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
                    weakref.finalize(storage, self._forget, key)
        self.peak = max(self.peak, self.now)
        return out


def peak_bytes(step: Callable[[], None]) -> int:
    """Most bytes that tensors made during `step` took at once; what a kernel uses inside is not seen."""
    with _Alive() as alive:
        step()
    return alive.peak
