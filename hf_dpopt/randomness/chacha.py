"""Normals from ChaCha20: addressed by element, so that any range is drawn without the rest, on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hf_dpopt.randomness import on_device
from hf_dpopt.randomness.blocks import add_from_host, add_on_host
from hf_dpopt.randomness.source import AddressedSource
from hf_dpopt.randomness.spans import Part
from hf_dpopt.randomness.subkeys import derive_key


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
            if on_device.serves(place):
                on_devices.setdefault(place, []).append(part)
            elif place.type == "cpu":
                on_host.append(part)
            else:
                add_from_host(key, part, stddev)
        add_on_host(key, on_host, stddev)
        for there in on_devices.values():
            on_device.add_parts(key, there, stddev)

    def is_drawn_at(self, device: torch.device) -> bool:
        return on_device.serves(device)
