"""Subkeys: every purpose, step and stream has a key of its own, made of one root."""

from __future__ import annotations

import hashlib

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
