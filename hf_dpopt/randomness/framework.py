"""Secret random numbers of models and collators: fresh in every step, and the same after a resume.

The Trainer seeds every generator with `args.seed`, which is public and the same on all ranks. Inside a private step
the generators are re-seeded from the run's secret key instead, and put back afterwards, so nothing a step drew is left
in a state that a checkpoint could save.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hf_dpopt.randomness.cipher import random_words
from hf_dpopt.randomness.source import KEY_BYTES, derive_key

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


def manual_seed(seed: int) -> None:
    """`torch.manual_seed`, which takes milliseconds where there is no accelerator: it keeps each call for one."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_torch(key: bytes) -> None:
    """Seed torch's generators with `key`: the whole state on the CPU (624 words), 64 bits on accelerators.

    `torch.manual_seed` keeps 32 bits on the CPU, few enough to try them all.

    Args:
        key: 32 secret bytes.
    """
    assert len(key) == KEY_BYTES, len(key)
    manual_seed(int.from_bytes(key[:8], "little"))  # accelerators, and what else there is in the CPU's state
    first, size = _words_in_cpu_state()
    words = random_words(key, step=0, num=NUM_WORDS // 2).view("<u4").astype(f"<u{size}")
    state = torch.get_rng_state()
    state[first : first + NUM_WORDS * size] = torch.from_numpy(words.view(np.uint8))
    torch.set_rng_state(state)


def _seed_all(seed: bytes) -> None:
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, dtype=np.uint32))
    seed_torch(seed)


def reseed_from_the_system() -> None:
    """Seed Python's, numpy's and torch's generators from the operating system, for good."""
    _seed_all(os.urandom(KEY_BYTES))


def snapshot(device: torch.device) -> Callable[[], None]:
    """Take the state of the generators that a model on a device may draw from; return what sets them back to it."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            torch.cuda.set_rng_state(accelerator, device)

    return restore


@contextlib.contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch after the context."""
    restore = snapshot(device)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def secret_randomness(key: bytes, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators with (key, step, rank) inside the context; restore them after it.

    Their initial state is secret (all of it on the CPU, 64 bits on a GPU); the generators themselves are statistical,
    not ciphers. Noise and sampling never use them.
    """
    with keep_generators(device):
        _seed_all(derive_key(key, "step", str(step), "rank", str(rank)))
        yield
