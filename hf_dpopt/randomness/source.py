"""Base of the random numbers: subkeys, and the contract of a source of noise.

A source gives standard normals as a pure function of (key, step, tensor, element).
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

KEY_BYTES = 32


def derive_key(root: bytes, *labels: str) -> bytes:
    """Independent 256-bit subkey for a purpose: BLAKE2b keyed with ``root``, over the list of labels.

    Formal guarantee: two different label lists never hash the same message (the list and each label are preceded by
    their length), so subkeys are independent as long as keyed BLAKE2b is a pseudorandom function.

    Args:
        root: parent key, 32 to 64 bytes.
        *labels: purpose, from the coarse to the fine (``"step", "7"``).

    Returns:
        The subkey, 32 bytes.

    References:
        Saarinen and Aumasson (2015), RFC 7693, Sec. 2.9 (keyed hashing).
    """
    assert KEY_BYTES <= len(root) <= hashlib.blake2b.MAX_KEY_SIZE, f"a root key has 32 to 64 bytes, got {len(root)}"
    encoded = [label.encode() for label in labels]
    message = len(encoded).to_bytes(8, "little")
    message += b"".join(len(label).to_bytes(8, "little") + label for label in encoded)
    return hashlib.blake2b(message, key=root, digest_size=KEY_BYTES, person=b"hf_dpopt subkey").digest()


class Part(NamedTuple):
    """Consecutive elements of a flattened, unsharded tensor, which noise is added to."""

    tensor: int  #: number of the tensor within the step
    first: int  #: number of the first element
    total: torch.Tensor  #: the elements, float32, contiguous, (num,)


class NoiseSource(abc.ABC):
    """Standard normals as a pure function of (key, step, tensor, element).

    A subclass writes `normal`; the rest is made of it.
    """

    #: Name and version of the stream, which ledgers write: a resumed run draws from the same one.
    stream: ClassVar[str] = "unnamed"
    description: ClassVar[str] = ""  #: its description in a privacy statement

    @abc.abstractmethod
    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Standard normals, float32, of ``shape`` on ``device``; ``tensor`` numbers the tensor within the step."""

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        """Add ``stddev`` times the normals of a step to tensors, in place.

        Args:
            totals: number of the tensor within the step -> float32 tensor, of any shape.
            stddev: what a normal is multiplied by; in the units of the tensors.
            step: the step.
        """
        for tensor, total in totals.items():
            total.add_(self.normal(total.shape, step=step, tensor=tensor, device=total.device), alpha=stddev)


class AddressedSource(NoiseSource):
    """A source that draws any part of a tensor without the rest of it."""

    @abc.abstractmethod
    def add_parts(self, parts: Sequence[Part], *, stddev: float, step: int) -> None:
        """Add ``stddev`` times the normals of parts of tensors to them, in place; the bits are those of `add_to`."""

    @abc.abstractmethod
    def is_drawn_at(self, device: torch.device) -> bool:
        """Whether a device draws the noise of its tensors itself, so fast that a rank need not share the work."""
