"""`hf-dpopt doctor`: what a folder holds of a run, whether it can be resumed, what it has cost; and fixing of it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from hf_dpopt.cli.examination import Examination, entries
from hf_dpopt.common.durable import fsync_directory, make_folder, move_aside
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.checkpoint import MANIFEST, NEEDED, TORN, clean, leftovers
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.run.log import RunLog, lock_ledger


def show_health(output_dir: Path, private_state_dir: Path | None, *, fix: bool) -> bool:
    """Print what was found in the folder of a run; return whether nothing is wrong with it.

    Args:
        output_dir: folder of the run.
        private_state_dir: where it kept its keys; None for the default.
        fix: whether to fix first what can be fixed.

    Raises:
        DPConfigError: if there is no such folder, or a run that is going on would be disturbed.
    """
    if fix:
        for line in _fix(Examination(output_dir, private_state_dir)):
            typer.echo(f"fixed        {line}")
    found = Examination(output_dir, private_state_dir, needed=NEEDED)
    is_well = True
    for entry in entries(found):
        typer.echo(f"{entry.name:<13} {'!' if entry.is_wrong else ' '} {' '.join(entry.text.split())}")
        is_well &= not entry.is_wrong
    return is_well


def _fix(found: Examination) -> Iterator[str]:
    """Fix what can be fixed without losing anything, under the locks of a run; yield what was done.

    Torn checkpoints are moved, not deleted: a person may know what to do with the files.
    """
    lock = found.lock
    if lock.is_symlink() or (lock.is_file() and lock.stat().st_nlink > 1):
        lock.unlink()
        yield f"removed {lock}, which led to another file"
    elif lock.exists() and not lock.is_file():
        try:
            lock.rmdir() if lock.is_dir() else lock.unlink()
        except OSError as error:
            raise DPConfigError(f"{lock} is not a lock and cannot be removed ({error.strerror}). Move it.") from None
        yield f"removed {lock}, which was not a file"
    if found.ledger is None or found.private_dir is None:
        return
    left = leftovers(found.output_dir)
    with _locked(found.output_dir, found.private_dir, has_log=found.found.log is not None) as ledger:
        clean(found.output_dir, ledger)
        yield from (f"settled {path}" for path in left)
        for one in Examination(found.output_dir, found.private_dir).checkpoints:
            if not one.is_whole and ((one.folder / MANIFEST).exists() or not (one.folder / NEEDED[-1]).exists()):
                yield f"moved {one.folder.name} to {_move_torn(one.folder)}"
        lock.unlink(missing_ok=True)  # it is ours now, and nobody can be waiting for it
    fsync_directory(lock.parent)


@contextlib.contextmanager
def _locked(output_dir: Path, directory: Path, *, has_log: bool) -> Iterator[Ledger]:
    """Record of the run, under its locks. Where its log is somewhere else, no other log is begun in its place."""
    if has_log:
        with RunLog.open(output_dir, directory) as log:
            yield log.state
    else:
        with contextlib.closing(lock_ledger(output_dir / LEDGER)):
            yield Ledger.read(output_dir / LEDGER)


def _move_torn(folder: Path) -> Path | None:
    """Move a folder where nothing takes it for a checkpoint, under its name, or one with a number."""
    aside = folder.parent / TORN
    names = itertools.chain([folder.name], (f"{folder.name}.{number}" for number in itertools.count(2)))
    name = next(name for name in names if not os.path.lexists(aside / name))
    try:
        make_folder(aside)
        return move_aside(folder, aside, name)
    except OSError as error:
        raise DPConfigError(f"{folder} could not be moved to {aside} ({error.strerror}). Move it by hand.") from None
