"""Normals from ChaCha20: addressed by element, so that any range is drawn without the rest, on any device.

On the CPU they are drawn on all cores that this process may use, whatever `OMP_NUM_THREADS` says (`accelerate launch`
sets it to 1, for torch); on a CUDA device by `kernel`, where that can be built and draws what the CPU draws.

Shape legend: B = blocks of the cipher, P = pairs of normals.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hf_dpopt.common.log import warn_once
from hf_dpopt.randomness.source import AddressedSource, Part, derive_key

Piece = TypeVar("Piece")

RANKS_HERE = "LOCAL_WORLD_SIZE"  # processes of the run on this machine, as torchrun and accelerate set it


def usable_cores() -> int:
    """Number of cores for one rank: those of the affinity mask, shared with the other ranks of this machine; >= 1."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get(RANKS_HERE, "")
    return max(1, here // max(1, int(ranks) if ranks.isdigit() else 1))


def run_in_pieces(
    pieces: Sequence[Piece], make_worker: Callable[[], Callable[[Piece], None]], num_threads: int
) -> None:
    """Do every piece once, on that many threads, the calling one among them; raise what a worker raised.

    Args:
        pieces: independent of each other. Who comes first takes the next one: a busy core does less.
        make_worker: called once per thread, for a worker owns scratch memory.
        num_threads: threads at most, >= 1.
    """
    left = iter(pieces)  # the iterator of a list hands out each element once, whichever thread asks

    def work(pieces: Iterator[Piece]) -> None:
        worker = make_worker()
        for piece in pieces:
            worker(piece)

    helpers = min(num_threads, len(pieces)) - 1
    if helpers <= 0:
        work(left)
        return
    with ThreadPoolExecutor(helpers) as pool:  # not kept: an idle pool does not survive a fork
        others = [pool.submit(work, left) for _ in range(helpers)]
        work(left)
        for other in others:
            other.result()


# --- on the CPU ------------------------------------------------------------------------------------------------------

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


# --- on a CUDA device ------------------------------------------------------------------------------------------------

SWITCH = "HF_DPOPT_KERNELS"  # that of `hf_dpopt.clipping.kernels`: 0 keeps to torch
CLOSE = 2.0**-22  # relative: two libraries of float64 functions, each rounded to float32


def is_drawn_on(device: torch.device) -> bool:
    """Whether the noise of tensors on a device is drawn there."""
    return device.type == "cuda" and _works_on(device)


def _kernel() -> Any:
    return importlib.import_module("hf_dpopt.randomness.kernel")  # imports Triton, which CPUs do without


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether the kernel can be built for a device, and draws the normals of the CPU; builds and runs it."""
    if os.environ.get(SWITCH) == "0" or importlib.util.find_spec("triton") is None:
        why = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else "Triton is not installed"
    else:
        try:
            if _draws_alike(device):
                return True
            why = "its kernel draws other values there"
        except Exception as error:  # whatever a compiler or driver raises
            why = f"{type(error).__name__}: {error}"
    warn_once(
        f"noise on {device}",
        f"Noise for {device} is drawn on the CPU and copied, which takes longer: {why}. The noise is the same.",
    )
    return False


def _draws_alike(device: torch.device) -> bool:
    """Whether a few thousand normals are the CPU's; around a change of nonce, from within a block."""
    key, num, first = bytes(range(32)), 3000, COUNTER * NORMALS - 1003
    here, there = torch.zeros(num), torch.zeros(num, device=device)
    add_on_host(key, [Part(2**32 + 1, first, here)], 0.5)
    add_on_device(key, [Part(2**32 + 1, first, there)], 0.5)
    return torch.allclose(there.cpu(), here, rtol=CLOSE, atol=1e-14)


def add_on_device(key: bytes, parts: Sequence[Part], stddev: float) -> None:
    """Add ``stddev`` times their normals to parts that all lie on one device, in place.

    Args:
        key: key of the step; 32 bytes. It is on the device while the kernels run, and overwritten after them.
        parts: what is added to; none overlaps another.
        stddev: what a normal is multiplied by.
    """
    kernel, device = _kernel(), parts[0].total.device
    words = kernel.key_tensor(key, device)
    level = torch.tensor([stddev], dtype=torch.float64).to(device)
    for part in parts:
        kernel.add_normals_(part.total, words, level, tensor=part.tensor, first=part.first)
    words.zero_()


# --- the source ------------------------------------------------------------------------------------------------------


class ChaCha20Gaussian(AddressedSource):
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
        out = torch.zeros(num, dtype=torch.float32, device=device)
        self.add_parts([Part(tensor, first, out)], stddev=1.0, step=step)  # 0 + 1 * z is z
        return out

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        """Add ``stddev`` times the normals of a step to float32 tensors, in place, without a tensor of the noise.

        Product and sum are computed in float64 and rounded once, which changes no bit where a tensor is added to in
        parts.
        """
        flat = {tensor: total.detach().reshape(-1) for tensor, total in totals.items()}
        self.add_parts([Part(tensor, 0, total) for tensor, total in flat.items()], stddev=stddev, step=step)
        for tensor, total in totals.items():
            if flat[tensor].data_ptr() != total.data_ptr():  # one whose elements are not in order was copied
                total.copy_(flat[tensor].view_as(total))

    def add_parts(self, parts: Sequence[Part], *, stddev: float, step: int) -> None:
        assert all(part.total.dtype == torch.float32 and part.total.is_contiguous() for part in parts)
        key, on_host = self.step_key(step), list[Part]()
        on_devices: dict[torch.device, list[Part]] = {}
        for part in parts:
            place = part.total.device
            if is_drawn_on(place):
                on_devices.setdefault(place, []).append(part)
            elif place.type == "cpu":
                on_host.append(part)
            else:
                add_from_host(key, part, stddev)
        add_on_host(key, on_host, stddev)
        for there in on_devices.values():
            add_on_device(key, there, stddev)

    def is_drawn_at(self, device: torch.device) -> bool:
        return is_drawn_on(device)
