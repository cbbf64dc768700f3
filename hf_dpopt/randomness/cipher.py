"""Secret random numbers for the sampling: words of a keystream.

Nothing here has a state. Every draw is a function of (key, step, ...), so it depends on no thread, rank or point of
resumption; no step may run twice under one key, which `run.keys` and the ledger ensure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from hf_dpopt.randomness.source import derive_key

WORD_BLOCK = 2**20  # words that are held at once where many are drawn; changes nothing but memory


def _fill_keystream(out: np.ndarray, zeros: memoryview, key: bytes, initial_counter: bytes) -> None:
    """Overwrite ``out`` with the AES-256-CTR keystream (NIST SP 800-38A, 6.5) that starts at ``initial_counter``."""
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(initial_counter)).encryptor()
    encryptor.update_into(zeros[: out.nbytes], out.reshape(-1).view(np.uint8).data)


def random_words(key: bytes, step: int, num: int, *, first: int = 0) -> np.ndarray:
    """Uniform 64-bit words of one step: an AES-256-CTR keystream under a subkey of (key, step).

    Formal guarantee: a pure function of its arguments, the same on every platform; a longer draw extends a shorter
    one. No noise is made of it.

    Args:
        key: 32 bytes, secret.
        step: optimizer step, >= 0.
        num: number of words, >= 0.
        first: place in the stream of the first of them.

    Returns:
        uint64, (num,).
    """
    assert step >= 0 and num >= 0 and first >= 0, (step, num, first)
    out = np.empty(num + first % 2, dtype="<u8")  # little-endian on every platform; a block of the cipher is two words
    if num:
        zeros = memoryview(bytes(out.nbytes))
        counter = (first // 2).to_bytes(16, "big")
        _fill_keystream(out, zeros, derive_key(key, "words", "step", str(step)), initial_counter=counter)
    return out[first % 2 :].astype(np.uint64, copy=False)


def word_blocks(key: bytes, step: int, num: int) -> Iterator[tuple[int, np.ndarray]]:
    """The words of `random_words`, some at a time, bit for bit, for draws from very many records.

    Args:
        key: 32 bytes, secret.
        step: optimizer step, >= 0.
        num: number of words, >= 0.

    Yields:
        The place of the first word, and at most `WORD_BLOCK` words, uint64, which are overwritten by the next ones.
    """
    assert step >= 0 and num >= 0, (step, num)
    encryptor = Cipher(
        algorithms.AES256(derive_key(key, "words", "step", str(step))), modes.CTR(bytes(16))
    ).encryptor()
    out = np.empty(min(num, WORD_BLOCK), dtype="<u8")
    zeros = memoryview(bytes(out.nbytes))
    for first in range(0, num, WORD_BLOCK):
        words = out[: num - first]
        encryptor.update_into(zeros[: words.nbytes], words.view(np.uint8).data)
        yield first, words.astype(np.uint64, copy=False)
