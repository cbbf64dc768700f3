"""Marker of a kept noise state: a few bytes by which a copy of it is recognised, read without reading the state."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

MARKER_NUMBERS = 16  # elements that make a marker; 8 of 4 bytes are found by chance with probability 2**-256


def noise_marker(path: Path) -> list[bytes]:
    """The first elements of the first tensor of a noise state that tells it from others; none for half a file.

    One marker per file, whatever the number of tensors: who copies the state copies its beginning. The file is mapped,
    so that this takes no longer for a model of billions of parameters.

    Args:
        path: file that `PrivateState.save_noise` wrote; need not be there.
    """
    if not path.is_file():
        return []
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError):
        return []
    tensors = (tensor.detach().flatten()[:MARKER_NUMBERS] for tensor in _tensors(state))
    telling = (first for first in tensors if len(first) >= MARKER_NUMBERS // 2 and first.unique().numel() > 1)
    marker = next(telling, None)
    return [] if marker is None else [marker.contiguous().view(torch.uint8).numpy().tobytes()]


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested state, in its order."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _tensors(item)
