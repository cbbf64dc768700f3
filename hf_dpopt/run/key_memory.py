"""Memory of how far each key was used; it lies beside the keys and is not restored together with ``output_dir``.

A ledger that was restored from a backup, or that goes on as a copy, has forgotten steps that ran: under the same key
the next ones would draw the same noise for other gradients. So every step leaves a *mark* in the private directory,
after the ledger and before any record is looked at. Marks outlive the keys that a finished run forgets.

Copies of a ledger share its first chain. Its random name is the name of their *family*: whatever ran in it is charged
in every ledger of the family that meets the marks, and no other run's is. One folder per family,
``used/<family>/<chain>.mark``; one run at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from hf_dpopt.common.chained import canonical
from hf_dpopt.common.durable import fsync_directory, is_open_at, read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import FileLock, LockHeld
from hf_dpopt.common.storage import naming
from hf_dpopt.plan.plan import RESUME_KEYS
from hf_dpopt.run.ledger import ChainRecord, Ledger

# A page each: a write that a crash tears damages one of them alone.
PAGE = 4096
SLOTS = (PAGE, 2 * PAGE)
_SLOT = struct.Struct("<Q32s")  # step, SHA-256 of the ledger's last record
_SEAL_BYTES = 16
# Note of a chain that this ledger did not begin.
ELSEWHERE = "ran in a copy of this ledger, or before it was put back to an earlier state"
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Knowledge about the use of a key.

    Attributes:
        chain_id, key_id, start_step: what the ledger says of the chain, see `ChainRecord`.
        step: the highest step that may have run; `start_step` if none has.
        digest: digest of the ledger when that step was charged; None if a crash tore the write that said so.
        plan: digest of the mechanism that the key was made for, see `_digest_of_plan`; None of an earlier release.
    """

    chain_id: str
    key_id: str
    start_step: int
    step: int
    digest: str | None
    plan: str | None = None


class KeyMemory:
    """The marks of one ledger's family, and the lock under which they are used.

    Formal guarantee: when `note` returns, the step is on the disk. `charge_unknown` leaves the ledger with at least
    the steps that the marks show, on every chain of its family. While the lock is held no other run of the family goes
    on. All of it rests on a directory that is not itself put back to an earlier state.

    Args:
        directory: private to the owner; below it is what is kept here.
        ledger: ledger of the run. Its family begins with its first chain.
    """

    def __init__(self, directory: Path, ledger: Ledger):
        self._used, self._ledger = directory / "used", ledger
        self._lock: FileLock | None = None
        self._path_in_use: Path | None = None
        self._file: int | None = None
        self._header: bytes = b""
        self._next_slot = 0

    @property
    def folder(self) -> Path | None:
        """Folder of the family; None while the ledger has no chain."""
        return next(iter(self._folders()), None)

    def _folders(self) -> list[Path]:
        """Folders that have a mark of a chain in the ledger, and that of its first chain.

        They are one, unless somebody put chains into the ledger or took some out.
        """
        chains = self._ledger.chains
        found = [path.parent for chain in chains for path in self._used.glob(f"*/{chain.chain_id}.mark")]
        return list(dict.fromkeys([*found, *(self._used / chain.chain_id for chain in chains[:1])]))

    # --- one run at a time ---

    def lock(self) -> None:
        """Keep other runs of the family out until `close`, or until this process is gone; do nothing a second time.

        The ledger's own lock is always taken before, and neither is waited for, so they cannot block each other.

        Raises:
            DPConfigError: if another run, on a copy of this ledger, has it.
        """
        if self._lock is not None or self.folder is None:
            return
        _make_folder(self.folder)
        try:
            self._lock = FileLock.take(self.folder / "lock", mode=0o600)
        except LockHeld as held:
            raise DPConfigError(
                f"The keys of {self._ledger.path} are in use by process {held}, a run on a copy of this ledger, or on "
                "itself: what it will use is not known yet, so this run could draw the same noise. Wait for that run, "
                "stop it, or give this one a private_state_dir of its own; it then takes a fresh key."
            ) from None
        if not self._lock.is_enforced:
            self.close()
            raise DPConfigError(
                f"The filesystem of {self.folder} has no file locks, so two runs could use one noise key. Give "
                "--private_state_dir a folder on a local disk, or on a network disk that is mounted with locks (NFS "
                "with lockd, Lustre with -o flock)."
            )

    def close(self) -> None:
        """Let other runs go on."""
        if self._file is not None:
            os.close(self._file)
        if self._lock is not None:
            self._lock.close()
        self._file = self._lock = None

    def remove(self) -> None:
        """Delete what is kept of the family; for a run that has no marks, and that nobody can continue any more."""
        if self.folder is not None and self.folder.is_dir():
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()

    # --- what is known ---

    def marks(self) -> list[Mark]:
        """The marks of all chains of the family.

        Raises:
            DPConfigError: if one is damaged.
        """
        return [self._read(path)[0] for folder in self._folders() for path in sorted(folder.glob("*.mark"))]

    def knows(self, chain_id: str) -> bool:
        """Whether a chain has a mark in the family."""
        return self._path(chain_id).exists()

    def mark(self, chain_id: str) -> Mark | None:
        """The mark of a chain; None if it has none.

        Raises:
            DPConfigError: if it is damaged.
        """
        path = self._path(chain_id)
        return self._read(path)[0] if path.exists() else None

    def charge_unknown(self) -> int:
        """Charge in the ledger what the marks show and it does not know; return how many steps that were.

        Raises:
            DPConfigError: if a mark is damaged, or contradicts the ledger.
        """
        before, known = self._ledger.num_charged, {chain.chain_id: chain for chain in self._ledger.chains}
        for mark in self.marks():
            chain = known.get(mark.chain_id)
            self._check(mark, chain)
            if chain is None and mark.step > mark.start_step:
                self._ledger.start_chain(
                    chain_id=mark.chain_id, key_id=mark.key_id, start_step=mark.start_step, note=ELSEWHERE
                )
            if chain is not None or mark.step > mark.start_step:
                self._ledger.charge_up_to(mark.chain_id, mark.step)
        return self._ledger.num_charged - before

    def num_unknown(self) -> int:
        """Return how many steps the marks show and the ledger does not know; nothing is written.

        Raises:
            DPConfigError: if a mark is damaged, or contradicts the ledger.
        """
        known, num = {chain.chain_id: chain for chain in self._ledger.chains}, 0
        for mark in self.marks():
            chain = known.get(mark.chain_id)
            self._check(mark, chain)
            reached = None if chain is None else self._ledger.last_step(mark.chain_id)
            num += max(0, mark.step - (reached or mark.start_step))
        return num

    def _check(self, mark: Mark, chain: ChainRecord | None) -> None:
        """Refuse a ledger that contradicts a mark."""
        if chain is not None and (chain.key_id, chain.start_step) != (mark.key_id, mark.start_step):
            raise _damage_error(self._path(mark.chain_id), f"it is of another key than chain {mark.chain_id}")
        if mark.plan not in (None, _digest_of_plan(self._ledger)):
            raise DPConfigError(
                f"The plan in {self._ledger.path} is not the one that the keys of this run were used for: it was "
                "edited, and what the steps cost would be misread. Put the original file back, or use another "
                "output_dir, whose epsilon is added to that of this one."
            )

    # --- what is added ---

    def begin(self, chain: ChainRecord) -> None:
        """Write the mark of a chain that the ledger has just begun."""
        path, header = self._path(chain.chain_id), _header_of(chain, _digest_of_plan(self._ledger))
        content = header + _slot_of(header, chain.start_step, self._ledger.digest())
        _make_folder(path.parent)
        write_durably(path, content.ljust(3 * PAGE, b"\0"), mode=0o600)

    def use(self, chain_id: str) -> None:
        """Open the mark of the chain whose steps come next, under the lock."""
        assert self._lock is not None and self._file is None
        path = self._path(chain_id)
        _, newest = self._read(path)
        self._header, self._next_slot = _page(read_whole(path), 0), 1 - newest
        self._file, self._path_in_use = os.open(path, os.O_RDWR | os.O_NOFOLLOW), path

    def note(self, step: int) -> None:
        """Note that the noise of a step may be used from now on; its charge is the last record of the ledger."""
        assert self._file is not None and self._path_in_use is not None
        if not is_open_at(self._file, self._path_in_use):
            raise DPConfigError(
                f"{self._path_in_use} was deleted or replaced while the run was going on, so nothing would remember "
                f"how far its key was used; step {step} was charged and not run. Put the private folder back; without "
                "it, resume with a fresh key (the cost is added)."
            )
        with naming(self._path_in_use):
            os.pwrite(self._file, _slot_of(self._header, step, self._ledger.digest()), SLOTS[self._next_slot])
            _fdatasync(self._file)
        self._next_slot = 1 - self._next_slot

    # --- the file ---

    def _path(self, chain_id: str) -> Path:
        assert self.folder is not None, "the ledger has no chain yet"
        return self.folder / f"{chain_id}.mark"

    def _read(self, path: Path) -> tuple[Mark, int]:
        """A mark, and the slot that was written last."""
        content = read_whole(path)
        header = _page(content, 0)
        public = _unseal(header)
        if len(content) != 3 * PAGE or public is None or public["chain_id"] != path.stem:
            raise _damage_error(path, "its header is not what was written")
        found: dict[int, tuple[int, str]] = {}
        num_torn = 0
        for slot, start in enumerate(SLOTS):
            page = _page(content, start)
            step, digest = _SLOT.unpack_from(page)
            if page == _slot_of(header, step, digest.hex()):
                found[slot] = (step, digest.hex())
            elif any(page):
                num_torn += 1
        if not found:
            raise _damage_error(path, "neither of its two places holds what was written")
        newest = max(found, key=lambda slot: found[slot])
        last, last_digest = found[newest]
        return Mark(**public, step=last + num_torn, digest=None if num_torn else last_digest), newest


def is_own(chain: ChainRecord) -> bool:
    """Whether a chain of a ledger was begun there; else it was found by its mark."""
    return chain.note != ELSEWHERE


def _page(content: bytes, start: int) -> bytes:
    return content[start : start + PAGE]


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES, person=b"hf_dpopt mark").digest()


def _digest_of_plan(ledger: Ledger) -> str:
    """SHA-256 of the fields of a plan that all runs of a ledger share."""
    plan = ledger.plan or {}
    return hashlib.sha256(canonical({name: plan.get(name) for name in RESUME_KEYS}).encode()).hexdigest()


def _header_of(chain: ChainRecord, plan: str) -> bytes:
    """The first page: what never changes."""
    public = {"chain_id": chain.chain_id, "key_id": chain.key_id, "start_step": chain.start_step, "plan": plan}
    body = json.dumps(public, sort_keys=True).encode().ljust(PAGE - _SEAL_BYTES, b"\0")
    return body + _seal(body)


def _unseal(header: bytes) -> dict[str, Any] | None:
    body, seal = header[:-_SEAL_BYTES], header[-_SEAL_BYTES:]
    return json.loads(body.rstrip(b"\0")) if seal == _seal(body) else None


def _slot_of(header: bytes, step: int, digest: str) -> bytes:
    """A page that says the step; bound to the header, so that it is worth nothing in another file."""
    body = _SLOT.pack(step, bytes.fromhex(digest))
    return (body + _seal(header + body)).ljust(PAGE, b"\0")


def _make_folder(folder: Path) -> None:
    for made in (folder.parent, folder):
        if not made.is_dir():
            made.mkdir(mode=0o700, exist_ok=True)
            fsync_directory(made.parent)


def _damage_error(path: Path, what: str) -> DPConfigError:
    return DPConfigError(
        f"{path} is damaged: {what}. It says how far a noise key of this run was used, so nobody knows what the steps "
        "to come would repeat, nor what was spent. Put the file back if there is a copy; else start over in another "
        "output_dir: what was spent here comes on top, all steps that the run was planned for."
    )
