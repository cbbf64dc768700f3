"""Secret random numbers of models and collators: fresh in every step, and the same after a resume.

The Trainer seeds every generator with `args.seed`, which is public and the same on all ranks. Inside a private step
the generators are re-seeded from the run's secret key instead, and put back afterwards, so nothing a step drew is left
in a state that a checkpoint could save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_dpopt.randomness.cipher import KEY_BYTES, derive_key, random_words

NUM_WORDS = 624  # of the state of the Mersenne Twister, 32 bits each


@functools.cache
def _words_in_cpu_state() -> tuple[int, int]:
    """Place of the Mersenne Twister's words in torch's CPU state: (first byte, bytes of a word).

    torch documents no layout, so they are searched: numpy's twister under the same seed has the same words.
    """
    state = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
    words: Any = np.random.RandomState(0).get_state(legacy=True)[1]  # type: ignore[index]
    for dtype in ("<u8", "<u4"):
        first = state.find(words.astype(dtype).tobytes())
        if first >= 0:
            return first, np.dtype(dtype).itemsize
    raise RuntimeError(
        f"torch {torch.__version__} keeps the state of its CPU generator in an unknown layout, so it cannot be filled "
        "from the secret key. Use a version of torch that hf_dpopt was tested with, and report this one."
    )


def seed_torch(key: bytes) -> None:
    """Seed torch's generators with `key`: the whole state on the CPU (624 words), 64 bits on accelerators.

    `torch.manual_seed` keeps 32 bits on the CPU, few enough to try them all.

    Args:
        key: 32 secret bytes.
    """
    assert len(key) == KEY_BYTES, len(key)
    torch.manual_seed(int.from_bytes(key[:8], "little"))  # accelerators, and what else there is in the CPU's state
    first, size = _words_in_cpu_state()
    words = random_words(key, step=0, num=NUM_WORDS // 2).view("<u4").astype(f"<u{size}")
    state = torch.get_rng_state()
    state[first : first + NUM_WORDS * size] = torch.from_numpy(words.view(np.uint8))
    torch.set_rng_state(state)


def reseed_from_the_system() -> None:
    """Seed Python's, numpy's and torch's generators from the operating system, for good."""
    seed = os.urandom(KEY_BYTES)
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, dtype=np.uint32))
    seed_torch(seed)


@contextlib.contextmanager
def secret_randomness(key: bytes, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators with (key, step, rank) inside the context; restore them after it.

    Their initial state is secret (all of it on the CPU, 64 bits on a GPU); the generators themselves are statistical,
    not ciphers. Noise and sampling never use them.
    """
    seed = derive_key(key, "step", str(step), "rank", str(rank))
    saved = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, dtype=np.uint32))
        seed_torch(seed)
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
    """The present state of the generators."""
    on_cuda = device.type == "cuda"
    return Snapshot(
        python=random.getstate(),
        numpy=np.random.get_state(),
        cpu=torch.get_rng_state(),
        device=device,
        accelerator=torch.cuda.get_rng_state(device) if on_cuda else None,
    )


def restore(state: Snapshot) -> None:
    """Set the generators back to a snapshot: the next draws are those that followed it."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.accelerator is not None:
        torch.cuda.set_rng_state(state.accelerator, state.device)
