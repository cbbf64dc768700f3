"""Removal of what killed runs left: unfinished checkpoints, half-written files, keys that were never used.

Only what is provably the ledger's own is touched, under the locks of a run: no other process writes there then. What a
person may have to decide on (a torn checkpoint, a lock that leads elsewhere) is left to `hf-dpopt doctor`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_dpopt.common.durable import move_into_place, remove
from hf_dpopt.common.log import logger
from hf_dpopt.run.checkpoint import FOLDER_NAME, examine
from hf_dpopt.run.journal import JOURNAL
from hf_dpopt.run.keys import PrivateState
from hf_dpopt.run.ledger import Ledger

# In output_dir, while a checkpoint is written or deleted. The Trainer does not take what is in there for a checkpoint,
# and does not push a folder of this name.
UNFINISHED = "_unfinished_checkpoints"
TORN = "_torn_checkpoints"  # beside it: where `hf-dpopt doctor` moves what cannot be resumed
UNPUBLISHED = (JOURNAL, UNFINISHED, TORN)  # folders in output_dir that no push takes
_REMOVED = re.compile(r"removed-checkpoint-.+\.[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # see `write_durably`
_WRITTEN = frozenset({"ledger.jsonl", "report.json", "statement.md"})  # in the folder of the ledger


def clean(output_dir: Path, ledger: Ledger, state: PrivateState) -> None:
    """Remove what killed runs of this ledger left, and say so; finish a save that lacks only its last step.

    Args:
        output_dir: folder of the run.
        ledger: open for writing, and the lock of its keys held.
        state: its keys, after they and the ledger were compared.
    """
    done = [_finish(path, output_dir) for path in _finished(output_dir, ledger, state)]
    for path in leftovers(output_dir, ledger, state):
        remove(path)
        done.append(f"removed {path.name}")
    if (folder := output_dir / UNFINISHED).is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if done:
        logger.info(f"A run was killed here and left unfinished work: {', '.join(done)}.")


def leftovers(output_dir: Path, ledger: Ledger, state: PrivateState) -> list[Path]:
    """Files and folders of killed runs of this ledger that nothing can need any more."""
    found = [path for path in _entries(output_dir / UNFINISHED) if _is_unfinished(path)]
    found += [path for path in _entries(ledger.path.parent) if _is_temporary(path, _WRITTEN)]
    return found + list(_private_leftovers(ledger, state))


def _private_leftovers(ledger: Ledger, state: PrivateState) -> Iterator[Path]:
    """Files of chains that were never used, and half-written ones; nothing of a chain that has a mark is whole here.

    No step runs before the mark of its chain is on the disk. So a key whose chain the ledger does not know, and of
    which there is no mark in any family, was never used; the note of its birth says whose it is.
    """
    own = {chain.chain_id for chain in ledger.chains}
    used = state.directory / "used"
    unborn = {one for one in state.births(ledger.path) if one not in own and not any(used.glob(f"*/{one}.mark"))}
    chains = state.directory / "chains"
    for path in sorted(_entries(chains), key=lambda path: ".born." in path.name):  # a key goes before its note
        name = path.name.lstrip(".").partition(".")[0]
        is_settled = name in own and ".born." in path.name
        is_forgotten = name in own and path.suffix in (".noise", ".data") and not (chains / f"{name}.key").exists()
        if name in unborn or is_settled or is_forgotten or (name in own and _is_temporary(path)):
            yield path
    if ledger.chains:
        family = used / ledger.chains[0].chain_id
        yield from (path for path in _entries(family) if _is_temporary(path))


def _finished(output_dir: Path, ledger: Ledger, state: PrivateState) -> Iterator[Path]:
    """Yield unfinished checkpoints that are whole, whose place is empty: the run was killed before it renamed them."""
    seal = state.seal(ledger)
    for path in _entries(output_dir / UNFINISHED):
        is_due = FOLDER_NAME.fullmatch(path.name) and not os.path.lexists(output_dir / path.name)
        if is_due and seal is not None and not path.is_symlink():
            found = examine(path, ledger, seal)
            if found.is_whole and not found.cautions:
                yield path


def _finish(path: Path, output_dir: Path) -> str:
    move_into_place(path, output_dir / path.name)
    return f"finished {path.name}"


def _is_unfinished(path: Path) -> bool:
    return bool(FOLDER_NAME.fullmatch(path.name) or _REMOVED.fullmatch(path.name))


def _is_temporary(path: Path, names: frozenset[str] | None = None) -> bool:
    """Whether a file is what `write_durably` leaves when it is killed, of one of these names."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None or (names is not None and match[1] not in names):
        return False
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
