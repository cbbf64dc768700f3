"""Kept state of a noise stream: a file that is signed by its key, so that no bit of it changes unseen."""

from __future__ import annotations

import hashlib
import hmac
import io
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.durable import write_durably
from hf_dpopt.common.log import logger
from hf_dpopt.randomness.cipher import derive_key

_SIGNATURE_BYTES = 32  # at the end of the file; torch reads over them
_CHUNK_BYTES = 2**24


def write_noise(path: Path, state: dict[str, Any], root: bytes) -> None:
    """Write a state in place of an older one, readable by its owner alone.

    Args:
        state: what `NoiseStream.state` gave.
        root: root key of the chain. A plain hash of secret noise could be tested for by who knows the rest of it.
    """
    content = io.BytesIO()
    torch.save(state, content)
    with content.getbuffer() as written:
        signature = _signature(root, [written])
    content.seek(0, io.SEEK_END)
    content.write(signature)
    write_durably(path, content.getbuffer(), mode=0o600)


def read_noise(path: Path, root: bytes, *, num_steps: int | None = None) -> dict[str, Any] | None:
    """The state that was written, or None if one bit of it is another: it would be noise of another law.

    Its tensors are mapped from the file: they are read once, for the signature, and take no memory of their own.

    Args:
        root: root key of the chain.
        num_steps: steps that were taken; the state of a later moment is of no use, and not read. None for any.
    """
    if num_steps is not None and _steps_of(path) > num_steps:
        return None
    if not _is_signed(path, root):
        logger.warning(
            f"{path} is damaged: the noise that it kept is drawn again from the key, which takes time and changes "
            "nothing."
        )
        return None
    return torch.load(path, weights_only=True, map_location="cpu", mmap=True)  # a rank's device is its own affair


def _steps_of(path: Path) -> int:
    """Steps after which a state was kept, from the first bytes of the file and unproven; 0 if it does not say."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception:  # whatever a damaged file makes its reader do
        return 0
    done = state.get("num_done") if isinstance(state, dict) else None
    return done if isinstance(done, int) else 0


def noise_state_key(root: bytes) -> bytes:
    """Key under which the state of a chain's noise is signed."""
    return derive_key(root, "noise state")


def _signature(root: bytes, content: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(key=noise_state_key(root), digest_size=_SIGNATURE_BYTES)
    for part in content:
        digest.update(part)
    return digest.digest()


def _is_signed(path: Path, root: bytes) -> bool:
    """Whether a file ends with the signature of what comes before."""
    left = path.stat().st_size - _SIGNATURE_BYTES
    if left < 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:

        def parts() -> Iterator[bytes]:
            for start in range(0, left, _CHUNK_BYTES):
                yield content[start : min(start + _CHUNK_BYTES, left)]

        return hmac.compare_digest(_signature(root, parts()), content[left:])
