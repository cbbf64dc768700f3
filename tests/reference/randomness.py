"""Slow randomness: one AES block and one pair of normals at a time, with the textbook formulas."""

from __future__ import annotations

import hashlib
import math

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def subkey(root: bytes, *labels: str) -> bytes:
    """BLAKE2b keyed with ``root`` over the number of labels and each label behind its length."""
    hasher = hashlib.blake2b(key=root, digest_size=32, person=b"hf_dpopt subkey")
    hasher.update(len(labels).to_bytes(8, "little"))
    for label in labels:
        hasher.update(len(label.encode()).to_bytes(8, "little"))
        hasher.update(label.encode())
    return hasher.digest()


def words(key: bytes, counter: int, num: int) -> list[int]:
    """Counter mode by hand: encrypt counter, counter + 1, ... and read little-endian 64-bit words."""
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    stream = b""
    while len(stream) < 8 * num:
        stream += encryptor.update(counter.to_bytes(16, "big"))
        counter += 1
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(num)]


def box_muller(word_u: int, word_v: int) -> tuple[float, float]:
    """One pair of normals from the top 53 bits of two words."""
    u, v = (word_u >> 11) / 2**53, (word_v >> 11) / 2**53
    radius = math.sqrt(-2 * math.log(1 - u))
    return radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)
