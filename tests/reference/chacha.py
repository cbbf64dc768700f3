"""Slow ChaCha20: one block at a time with Python's integers, as RFC 8439 writes it; and the normals made of it."""

from __future__ import annotations

import struct

from tests.reference.randomness import box_muller, subkey


def _quarter_round(x: list[int], a: int, b: int, c: int, d: int) -> None:
    """RFC 8439, Sec. 2.1."""
    for to, by, other, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[to] = (x[to] + x[by]) % 2**32
        x[other] ^= x[to]
        x[other] = (x[other] << turn | x[other] >> (32 - turn)) % 2**32


def block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """The 64 bytes of one block: RFC 8439, Sec. 2.3."""
    start = [
        *struct.unpack("<4I", b"expand 32-byte k"),
        *struct.unpack("<8I", key),
        counter,
        *struct.unpack("<3I", nonce),
    ]
    x = list(start)
    for _ in range(10):
        for column in range(4):
            _quarter_round(x, column, column + 4, column + 8, column + 12)
        for diagonal in range(4):
            a, b, c, d = (4 * row + (diagonal + row) % 4 for row in range(4))
            _quarter_round(x, a, b, c, d)
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(x, start, strict=True)))


def normal(key: bytes, step: int, tensor: int, element: int) -> float:
    """Element ``element`` of the flattened tensor, as `ChaCha20Gaussian` defines it."""
    step_key = subkey(subkey(key, "chacha20 gaussian"), "step", str(step))
    high, counter = divmod(element // 8, 2**32)
    words = struct.unpack("<8Q", block(step_key, counter, struct.pack("<IQ", high, tensor)))
    pair = element % 8 // 2
    return box_muller(*words[2 * pair : 2 * pair + 2])[element % 2]
