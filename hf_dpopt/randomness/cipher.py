"""Secret random numbers: words for the sampling, and the sources of normals for the noise by their names.

Nothing here has a state. Every draw is a function of (key, step, ...), so it depends on no thread, rank or point of
resumption; no step may run twice under one key, which `run.keys` and the ledger ensure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.chacha import ChaCha20Gaussian, run_in_pieces, usable_cores
from hf_dpopt.randomness.source import NoiseSource, derive_key

WORD_BLOCK = 2**20  # words that are held at once where many are drawn; changes nothing but memory

# A chunk is what one thread draws at a time. Its words and buffers (0.5 MB) stay in the L2 cache; chunk c of a tensor
# holds elements [c * CHUNK, (c + 1) * CHUNK) of the flattened, unsharded tensor. Changing it changes the stream.
CHUNK = 2**14


# --- words ----------------------------------------------------------------------------------------------------------


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


# --- sources ---------------------------------------------------------------------------------------------------------


def _half_sum_of_four(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """``(n1 + n2 + n3 + n4) / 2`` with ``n`` drawn on the generator's device: standard normal, with a longer tail.

    A single fp32 normal on a CUDA device ends near 6.8 (32-bit uniforms), which is within reach of a record at small
    noise multipliers; four of them end at twice that. Holohan and Braghin (2021), arXiv:2107.10138.
    """
    total = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    normal = torch.empty_like(total)
    for _ in range(3):
        total.add_(normal.normal_(generator=generator))
    return total.mul_(0.5)


class FastGaussian(NoiseSource):
    """Normals from a statistical generator; fast on a CUDA device, but not cryptographic, and reports say so.

    On CPU: numpy's Philox with a 128-bit key. (Never torch's CPU generator: it keeps 32 bits of its seed, so every
    key could be tried.) On CUDA: the device's Philox with a 63-bit key per (step, tensor), half the sum of four draws.

    Formal guarantee: a function of (key, step, tensor, element) and of the kind of device. The law is the standard
    normal's; that the stream cannot be predicted from parts of it is *not* claimed.

    Args:
        key: 32 bytes, secret, never used for a second run.

    References:
        Salmon et al. (2011), doi:10.1145/2063384.2063405 (Philox).
        Holohan and Braghin (2021), arXiv:2107.10138 (sum of four).
    """

    name = "fast"
    stream = "fast"
    description = "statistical PRNG (Philox), not cryptographically secure"

    def __init__(self, key: bytes):
        self._key = derive_key(key, "fast gaussian")

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Standard normals (see `NoiseSource`), drawn on a CUDA device itself, else on the CPU and copied."""
        if torch.device(device).type == "cuda":
            seed = derive_key(self._key, "cuda", "step", str(step), "tensor", str(tensor))
            generator = torch.Generator(device).manual_seed(int.from_bytes(seed[:8], "little") >> 1)
            return _half_sum_of_four(shape, generator)
        flat = np.empty(math.prod(shape), dtype=np.float32)
        num_chunks = -(-len(flat) // CHUNK)
        num_threads = min(usable_cores(), num_chunks // 4)  # a thread with less to do costs more than it saves
        run_in_pieces(range(num_chunks), lambda: self._filler(flat, step, tensor), num_threads)
        return torch.from_numpy(flat).view(torch.Size(shape)).to(device)

    def _filler(self, flat: np.ndarray, step: int, tensor: int) -> Callable[[int], None]:
        """One thread's generator, numpy's Philox through its float64 ziggurat: fills the chunk of a number."""
        key, prefix = int.from_bytes(derive_key(self._key, "cpu")[:16], "little"), (step << 64 | tensor) << 64
        normals = np.empty(CHUNK)

        def fill(chunk: int) -> None:
            out = flat[chunk * CHUNK : (chunk + 1) * CHUNK]
            # the lowest of the four counter words runs inside the chunk; float64 keeps the tail up to 13.7 and 53 bits
            bits = np.random.Philox(key=key, counter=(prefix | chunk) << 64)
            np.random.Generator(bits).standard_normal(out=normals[: len(out)])
            out[:] = normals[: len(out)]

        return fill


NOISE_SOURCES: dict[str, type[ChaCha20Gaussian] | type[FastGaussian]] = {
    source.name: source for source in (ChaCha20Gaussian, FastGaussian)
}


def source_of(kind: str) -> type[ChaCha20Gaussian] | type[FastGaussian]:
    """Return the class of the source that ``noise_rng=kind`` names: a cipher, or a statistical generator.

    Raises:
        DPConfigError: if no source has that name.
    """
    if kind not in NOISE_SOURCES:
        allowed = "; ".join(f"{name!r}: {source.description}" for name, source in NOISE_SOURCES.items())
        raise DPConfigError(f"noise_rng={kind!r} is not a noise source. Use one of {allowed}.")
    return NOISE_SOURCES[kind]


def make_noise_source(kind: str, key: bytes) -> NoiseSource:
    """Return the source that ``noise_rng=kind`` names, under a key of `hf_dpopt.run.keys.Chain.noise_key`."""
    return source_of(kind)(key)


def describe_stream(stream: str) -> str:
    """Describe a noise stream, by its name in a ledger or report.

    Raises:
        DPConfigError: for a stream that this release does not know.
    """
    for source in NOISE_SOURCES.values():
        if source.stream == stream:
            return source.description
    raise DPConfigError(
        f"noise_rng={stream!r}: this release does not know the noise stream. Use the release that wrote it, or a "
        "newer one."
    )
