"""Normals by blocks of ChaCha20, on the CPU: words, their transform, and parts of tensors that noise is added to.

Shape legend: B = blocks of the cipher, P = pairs of normals.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hf_dpopt.randomness.cores import run_in_pieces, usable_cores
from hf_dpopt.randomness.spans import Part

BLOCK_BYTES = 64
NORMALS = 8  # of a block: 64 bits each
CHUNK = 2**14  # normals that one thread draws at a time: its words and buffers (0.4 MB) stay in the cache
LEAST = 4 * CHUNK  # normals of one thread: one with less to do costs more than it saves
SLICE = 2**11  # elements up to which torch computes a function on the calling thread alone
SEGMENT = 2**24  # elements that are copied to another device at a time: 64 MB
VECTOR = 64  # elements; no processor computes so many at once
COUNTER = 2**32  # blocks under one nonce: the counter of RFC 8439 has 32 bits

_ZEROS = memoryview(bytes(CHUNK // NORMALS * BLOCK_BYTES))


def nonce_of(tensor: int, block: int) -> bytes:
    """Nonce of a block of a tensor: the high part of the block's number (32 bits), then the tensor's (64 bits)."""
    return struct.pack("<IQ", block // COUNTER, tensor)


def fill_keystream(out: np.ndarray, key: bytes, tensor: int, block: int) -> None:
    """Overwrite `out` with the ChaCha20 keystream (RFC 8439, Sec. 2.4) of consecutive blocks of a tensor.

    Args:
        out: contiguous, whole blocks, `CHUNK` normals at most.
        key: 32 bytes.
        tensor: number of the tensor, below 2^64.
        block: first block; all of them have the same high part, for the counter would wrap around in silence.
    """
    counter, num = block % COUNTER, out.nbytes // BLOCK_BYTES
    assert counter + num <= COUNTER, f"{num} blocks from {block} on do not fit under one nonce"
    start = struct.pack("<I", counter) + nonce_of(tensor, block)
    encryptor = Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor()
    encryptor.update_into(_ZEROS[: out.nbytes], out.reshape(-1).view(np.uint8).data)


class NormalsOfBlocks:
    """One thread's generator; owns its buffers, so it is not shared between threads."""

    def __init__(self) -> None:
        num_pairs = CHUNK // 2
        self._words_P2 = np.empty((num_pairs, 2), dtype="<u8")
        self._radius, self._cos, self._angle = (np.ones(num_pairs) for _ in range(3))
        self._normals_P2 = np.empty((num_pairs, 2), dtype=np.float32)
        in_torch = [torch.from_numpy(x) for x in (self._radius, self._cos, self._angle)]
        self._slices = {
            size: list(zip(*(x.split(size) for x in in_torch), strict=True)) for size in (SLICE, num_pairs)
        }

    def draw(self, key: bytes, tensor: int, block: int, num_blocks: int) -> np.ndarray:
        """Normals of consecutive blocks, float32, (8 B,), in a buffer that the next call overwrites."""
        words_P2 = self._words_P2[: num_blocks * NORMALS // 2]
        fill_keystream(words_P2, key, tensor, block)
        return self.transform(words_P2)

    def transform(self, words_P2: np.ndarray) -> np.ndarray:
        """Box-Muller of pairs of words, in float64, rounded once; float32, (2 P,). Overwrites the words.

        With u and v the top 53 bits of a pair of words, in [0, 1): ``r = sqrt(-2 log(1 - u))``, and the normals are
        ``r cos 2 pi v`` and ``r sin 2 pi v``. 1 - u is exact and never 0: ``r <= sqrt(106 log 2) = 8.57``.
        """
        num_pairs = len(words_P2)
        r, cos, angle = self._radius[:num_pairs], self._cos[:num_pairs], self._angle[:num_pairs]
        np.right_shift(words_P2, 11, out=words_P2)
        integers_P2 = words_P2.view(np.int64)  # of 53 bits: signed ones become float64 faster
        np.multiply(integers_P2[:, 0], -(2.0**-53), out=r)
        np.multiply(integers_P2[:, 1], 2.0 * math.pi * 2.0**-53, out=angle)
        np.add(r, 1.0, out=r)
        size = CHUNK // 2 if torch.get_num_threads() == 1 else SLICE  # few calls where torch would share no call out
        whole, rest = divmod(num_pairs, size)
        slices = self._slices[size][:whole]
        if rest:  # whole vectors: their last elements are computed like the others, whatever the library
            num = -(-rest // VECTOR) * VECTOR
            slices.append(tuple(of_slice[:num] for of_slice in self._slices[size][whole]))
        for r_slice, cos_slice, angle_slice in slices:
            torch.log(r_slice, out=r_slice)
            torch.cos(angle_slice, out=cos_slice)
            torch.sin(angle_slice, out=angle_slice)
        np.multiply(r, -2.0, out=r)
        np.sqrt(r, out=r)
        normals_P2 = self._normals_P2[:num_pairs]
        np.multiply(r, cos, out=normals_P2[:, 0], casting="same_kind")
        np.multiply(r, angle, out=normals_P2[:, 1], casting="same_kind")
        return normals_P2.reshape(-1)

    def draw_range(self, key: bytes, tensor: int, first: int, num: int) -> np.ndarray:
        """Normals of elements ``first .. first + num - 1`` of one chunk, float32, (num,), in the same buffer."""
        block = first // NORMALS
        end = -(-(first + num) // NORMALS)
        skipped = first - block * NORMALS
        return self.draw(key, tensor, block, end - block)[skipped : skipped + num]


class Range(NamedTuple):
    """Some elements of a part, all within one chunk."""

    part: int  #: number of the part
    first: int  #: element of the flattened, unsharded tensor
    num: int
    place: int  #: of the first one within the part


def ranges_of(part: int, first: int, num: int) -> list[Range]:
    """Elements ``first .. first + num - 1`` of a tensor, cut where a chunk ends: no range crosses a nonce."""
    end, cut = first + num, []
    while first < end:
        stop = min(end, first - first % CHUNK + CHUNK)
        cut.append(Range(part, first, stop - first, first - end + num))
        first = stop
    return cut


class _OfThread(threading.local):
    """Buffers of each thread, made when it first draws: small tensors are drawn faster than these are made."""

    def __init__(self) -> None:
        self.normals, self.product = NormalsOfBlocks(), np.empty(CHUNK)


_OWN = _OfThread()


def add_on_host(key: bytes, parts: Sequence[Part], stddev: float) -> None:
    """Add ``stddev`` times their normals to parts in the host's memory, chunk by chunk on all cores.

    Args:
        key: key of the step; 32 bytes.
        parts: what is added to; none overlaps another.
        stddev: what a normal is multiplied by.
    """
    totals = [part.total.numpy() for part in parts]
    ranges = [cut for i, part in enumerate(parts) for cut in ranges_of(i, part.first, part.total.numel())]

    def adder() -> Callable[[Range], None]:
        normals, product = _OWN.normals, _OWN.product

        def add(cut: Range) -> None:
            z = normals.draw_range(key, parts[cut.part].tensor, cut.first, cut.num)
            scaled = np.multiply(z, stddev, out=product[: cut.num], dtype=np.float64)
            total = totals[cut.part][cut.place : cut.place + cut.num]
            np.add(total, scaled, out=total, casting="same_kind")  # in float64: that of its arguments

        return add

    run_in_pieces(ranges, adder, min(usable_cores(), sum(cut.num for cut in ranges) // LEAST))


def add_from_host(key: bytes, part: Part, stddev: float) -> None:
    """Add the normals of a part that lies on another device: drawn here, segment by segment, and copied."""
    for place in range(0, part.total.numel(), SEGMENT):
        total = part.total[place : place + SEGMENT]
        z = torch.zeros(total.shape)
        add_on_host(key, [Part(part.tensor, part.first + place, z)], 1.0)
        total.copy_(total.double().add_(z.to(total.device).double(), alpha=stddev))
