"""Dropout masks and collator coins: secret, fresh in every step, and the same after a resume.

The Trainer seeds every generator with `args.seed`, which is public and the same on all ranks. Inside a private step
the generators are re-seeded from the run's secret key instead, and put back afterwards, so nothing a step drew is left
in a state that a checkpoint could save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_dpopt.mechanisms.randomness import derive_key


def reseed_from_the_system() -> None:
    """Fresh seeds of the operating system for Python's, numpy's and torch's generators, for good."""
    seed = os.urandom(32)
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, dtype=np.uint32))
    torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)


@contextlib.contextmanager
def secret_randomness(key: bytes, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Python's, numpy's and torch's generators as a function of (key, step, rank) inside, untouched outside.

    torch keeps 32 bits of a CPU seed: enough to make masks independent of the other records and unknown to a reader of
    the model, not a cryptographic stream. The noise and the sampling coins never come from here.
    """
    seed = derive_key(key, "step", str(step), "rank", str(rank))
    saved = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, dtype=np.uint32))
        torch.manual_seed(int.from_bytes(seed[:8], "little"))
        try:
            yield
        finally:
            random.setstate(saved[0])
            np.random.set_state(saved[1])


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of the generators that a model on a device may draw from."""

    python: tuple
    numpy: Any
    cpu: torch.Tensor
    device: torch.device
    accelerator: torch.Tensor | None


def snapshot(device: torch.device) -> Snapshot:
    """The generators as they are now."""
    on_cuda = device.type == "cuda"
    return Snapshot(
        python=random.getstate(),
        numpy=np.random.get_state(),
        cpu=torch.get_rng_state(),
        device=device,
        accelerator=torch.cuda.get_rng_state(device) if on_cuda else None,
    )


def restore(state: Snapshot) -> None:
    """Back to the snapshot: what is drawn next is what was drawn after it."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.accelerator is not None:
        torch.cuda.set_rng_state(state.accelerator, state.device)
