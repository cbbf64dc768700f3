"""Seal of a run's checkpoints: a key in the private folder, under which their lists of files are signed.

Whoever can write to ``output_dir`` can replace weights and the list of their digests alike; without the key he cannot
sign the list. A plain hash of what is secret (noise, data) would let somebody who knows the rest test his guess of it,
so such things are hashed under the key, too. It outlives the keys of a finished run: it makes no noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from pathlib import Path

from hf_dpopt.common.durable import read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.ledger import GENESIS, Ledger

FILE = "seal"
_KEY_BYTES, _SINCE_BYTES, _CHECK_BYTES = 32, 64, 16


@dataclasses.dataclass(frozen=True)
class Seal:
    """The key of one ledger's family, and since when its checkpoints are signed.

    Attributes:
        key: 32 secret bytes.
        since: digest of the ledger's last record before signing began; `GENESIS` for a run that always did.
    """

    key: bytes = dataclasses.field(repr=False)
    since: str

    @classmethod
    def load(cls, folder: Path | None) -> Seal | None:
        """The seal that is kept in a family's folder, see `KeyMemory.folder`; None if there is none.

        Raises:
            DPConfigError: if it is damaged.
        """
        if folder is None or not (path := folder / FILE).exists():
            return None
        content = read_whole(path)
        body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
        if len(body) != _KEY_BYTES + _SINCE_BYTES or _check(body) != check:
            raise DPConfigError(
                f"{path} is damaged: checkpoints of this run cannot be told from forged ones. Put it back if there is "
                "a copy; else delete it, and they are resumed from with a warning."
            )
        return cls(body[:_KEY_BYTES], body[_KEY_BYTES:].decode("ascii"))

    @classmethod
    def load_or_make(cls, folder: Path, since: str) -> Seal:
        """The seal that is kept, or a new one, which is on the disk before it is used.

        Args:
            since: digest of the ledger now; `GENESIS` if it has charged nothing.
        """
        kept = cls.load(folder)
        if kept is not None:
            return kept
        made = cls(os.urandom(_KEY_BYTES), since)
        body = made.key + made.since.encode("ascii")
        write_durably(folder / FILE, body + _check(body), mode=0o600)
        return made

    @property
    def key_id(self) -> str:
        """Public commitment to the key, 32 hexadecimal digits."""
        return self.sign(b"", "key id")

    @property
    def entry(self) -> str:
        """Name of the run in the ledger of its dataset: only a run with the same private folder has it."""
        return self.sign(b"", "entry")[:16]

    def sign(self, content: bytes, purpose: str) -> str:
        """Keyed hash of some bytes, 32 hexadecimal digits; those of two purposes are never equal."""
        person = f"hf {purpose}".encode()
        return hashlib.blake2b(content, key=self.key, digest_size=16, person=person).hexdigest()

    def is_signed(self, content: bytes, purpose: str, signature: object) -> bool:
        """Whether a signature is the one of those bytes."""
        return isinstance(signature, str) and hmac.compare_digest(self.sign(content, purpose), signature)

    def covers(self, ledger: Ledger, digest: str) -> bool:
        """Whether a checkpoint that stands at that record of the ledger must have been signed."""
        if self.since == GENESIS:
            return True
        began, there = ledger.position(self.since), ledger.position(digest)
        return began is not None and there is not None and there > began


def beginning(ledger: Ledger) -> str:
    """Value of `Seal.since` for a run that opens this ledger now."""
    return ledger.digest() if ledger.num_charged else GENESIS


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES, person=b"hf_dpopt seal").digest()
