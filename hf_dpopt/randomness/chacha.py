"""Normals from ChaCha20: addressed by element, so that any range is drawn without the rest, on any device.

Shape legend: B = blocks of the cipher, P = pairs of normals.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hf_dpopt.randomness.cores import run_in_pieces, usable_cores
from hf_dpopt.randomness.source import NoiseSource
from hf_dpopt.randomness.subkeys import derive_key

BLOCK_BYTES = 64
NORMALS = 8  # of a block: 64 bits each
CHUNK = 2**14  # normals that one thread draws at a time: its words and buffers (0.4 MB) stay in the cache
SLICE = 2**11  # elements up to which torch computes a function on the calling thread alone
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
        in_torch = [torch.from_numpy(x).split(SLICE) for x in (self._radius, self._cos, self._angle)]
        self._slices = list(zip(*in_torch, strict=True))

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
        for r_slice, cos_slice, angle_slice in self._slices[: -(-num_pairs // SLICE)]:
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
    """Some elements of a tensor, all within one chunk."""

    tensor: int  #: number of the tensor within the step
    first: int  #: element of the flattened, unsharded tensor
    num: int
    place: int  #: where they lie in what is filled, or added to


def ranges_of(tensor: int, first: int, num: int) -> list[Range]:
    """Elements ``first .. first + num - 1`` of a tensor, cut where a chunk ends: no part crosses a nonce."""
    end, cut = first + num, []
    while first < end:
        stop = min(end, first - first % CHUNK + CHUNK)
        cut.append(Range(tensor, first, stop - first, first - end + num))
        first = stop
    return cut


class ChaCha20Gaussian(NoiseSource):
    """Normals from a cipher: ChaCha20 words, 53-bit uniforms, float64 Box-Muller, rounded once to float32.

    The words of a step are the keystream of RFC 8439 under a subkey of (key, step); block b of tensor i has the
    counter ``b mod 2^32`` and the nonce ``(b div 2^32, i)``. A block is 8 words of 64 bits, little-endian: four pairs
    (u, v), of which pair k makes the normals 2 k and 2 k + 1 of the block. Element e of the flattened, unsharded
    tensor lies in block ``e div 8``.

    Formal guarantee: element e of a tensor is a function of (key, step, tensor, e) alone, whatever the tensor's shape,
    the range that is drawn, the number of threads, ranks and shards. To someone without the key the words cannot be
    told from random ones as long as ChaCha20 is a pseudorandom function (one subkey per step, and no pair of nonce and
    counter twice under it; it is no permutation, so a long step tells no more than a short one). A normal made of
    them reaches 8.57, where 1e-17 of the law is left. Rounding is outside the promise, as for every floating-point
    mechanism.

    Words are equal on all devices, bit for bit. The float64 functions are those of torch, and of the device's library:
    normals agree to one unit in the last place of float32, or to 1e-14 near zero, and differ in about one of 10^8.
    Ranks on unlike devices should all receive the noise of one of them, or each the noise of its own slice.

    Args:
        key: 32 bytes, secret, never used for a second run.

    References:
        Nir and Langley (2018), RFC 8439, Sec. 2.3 and 2.4. Box and Muller (1958), doi:10.1214/aoms/1177706645.
    """

    name = "secure"
    stream = "chacha20/1"
    description = "ChaCha20 keystream (RFC 8439), 53-bit uniforms, float64 Box-Muller"

    def __init__(self, key: bytes):
        self._key = derive_key(key, "chacha20 gaussian")

    def step_key(self, step: int) -> bytes:
        """Key of the words of a step; secret."""
        return derive_key(self._key, "step", str(step))

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        num = math.prod(shape)
        return self.normal_range(0, num, step=step, tensor=tensor, device=device).view(torch.Size(shape))

    def normal_range(
        self, first: int, num: int, *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Normals of elements ``first .. first + num - 1`` of a tensor; those of the whole, bit for bit.

        Args:
            first: number of an element of the flattened, unsharded tensor, >= 0; below 2^63.
            num: elements, >= 0.
            step: the step.
            tensor: number of the tensor within the step.
            device: where they are wanted.

        Returns:
            float32, (num,).
        """
        assert first >= 0 and num >= 0, (first, num)
        out, key = np.empty(num, dtype=np.float32), self.step_key(step)

        def filler() -> Callable[[Range], None]:
            draw = NormalsOfBlocks().draw_range

            def fill(part: Range) -> None:
                out[part.place : part.place + part.num] = draw(key, part.tensor, part.first, part.num)

            return fill

        run_in_pieces(ranges_of(tensor, first, num), filler, usable_cores())
        return torch.from_numpy(out).to(device)
