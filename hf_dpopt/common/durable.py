"""Files and folders that must survive a crash: whole or absent, and on the disk before the caller goes on."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_dpopt.common.disk_faults import naming
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger, warn_once

# What a filesystem answers that does not have an operation; anything else (EIO, ENOSPC) is a failure of one that has.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOTTY})


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading, or the one that a link leads to; never wait for a pipe or read from a device.

    Raises:
        OSError: if it is not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_whole(path: Path) -> bytes:
    """Content of a file that a run keeps its state in.

    Raises:
        DPConfigError: if it is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise DPConfigError(
            f"{path} cannot be read ({error.strerror}). It holds state of a private run: put the file back, or see "
            "what the folder holds with `hf-dpopt doctor`."
        ) from error


def is_file_name(name: object) -> bool:
    """Whether a name that was read from a file names an entry of one folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def make_folder(folder: Path) -> None:
    """Make a folder that a run writes to; refuse a link, which would lead the run to other files.

    Raises:
        DPConfigError: if it is a link.
    """
    if folder.is_symlink():
        raise DPConfigError(
            f"{folder} is a link, and a run would write to where it leads. Remove it, or put the folder itself there."
        )
    folder.mkdir(parents=True, exist_ok=True)


def remove_links(folder: Path) -> None:
    """Remove links to files, which a library that writes files by their names would follow to others.

    Args:
        folder: folder that is about to be written to; it need not be there.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and not path.is_dir():
            path.unlink(missing_ok=True)
            logger.warning(f"{path} was a link, and is removed: a save would write to what it leads to.")


def fsync_directory(directory: Path) -> None:
    """Make the creation, renaming and removal of files in ``directory`` durable, where its filesystem can do so.

    Elsewhere (object stores that are mounted, some network disks) one line of the log says so.
    """
    if not has_directory_fsync(directory):
        warn_once(
            f"fsync of folders {os.stat(directory).st_dev}",
            f"The filesystem of {directory} cannot make the creation of a file durable: a power cut may lose the "
            "ledger, with what it charged, or a checkpoint, where they were just made. The keys remember the steps: "
            "keep private_state_dir on a local disk.",
        )


def has_directory_fsync(directory: Path) -> bool:
    """Make what happened in ``directory`` durable; return whether its filesystem can do so."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(directory):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def write_durably(path: Path, content: bytes | memoryview, *, mode: int) -> None:
    """Create ``path`` with ``content`` and permissions ``mode``; see `writing_durably`."""
    with writing_durably(path, mode=mode) as file:
        file.write(content)


@contextlib.contextmanager
def writing_durably(path: Path, *, mode: int) -> Iterator[io.BufferedWriter]:
    """Create ``path`` with permissions ``mode`` and what is written inside; a crash leaves all of it or nothing.

    The permissions are set at creation, so the content is at no time readable by more users than ``mode`` says. A link
    at ``path`` is replaced, never followed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # a crash may have left another
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still what lies at ``path``: not deleted, and nothing else put in its place."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder below ``folder``, and itself, durable."""
    for parent, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            try:
                with naming(Path(parent, name)):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(parent))


def move_into_place(folder: Path, place: Path) -> None:
    """Rename a folder whose files are written to ``place``, durably; what was there before is deleted.

    At no moment is anything at ``place`` but a whole folder: the one before, nothing, or the new one.

    Args:
        folder: what to move; it lies on the same filesystem, in a folder that takes the one before for a moment.

    Raises:
        DPConfigError: if the filesystem cannot rename folders.
    """
    fsync_tree(folder)
    with _refusing_without_renames(place.parent):
        replaced = move_aside(place, folder.parent)
        os.rename(folder, place)
    fsync_directory(place.parent)
    if replaced is not None:
        remove(replaced)


@contextlib.contextmanager
def _refusing_without_renames(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.EXDEV, errno.EPERM}:
            raise
        raise DPConfigError(
            f"The filesystem of {folder} cannot rename folders ({error.strerror}), so a checkpoint may be torn there. "
            "Use an output_dir on a local disk, NFS or Lustre, and copy what is finished to the object store."
        ) from None


def check_renames(folder: Path) -> None:
    """Refuse a filesystem that cannot rename folders, by an empty one in ``folder``, which is made if it is not there.

    Raises:
        DPConfigError: see `move_into_place`.
    """
    make_folder(folder)
    probe = folder / f"removed-checkpoint-probe.{secrets.token_hex(4)}"
    probe.mkdir()
    try:
        with _refusing_without_renames(folder.parent):
            moved = move_aside(probe, folder)
        assert moved is not None
        moved.rmdir()
    except BaseException:
        with contextlib.suppress(OSError):
            probe.rmdir()
        raise
    with contextlib.suppress(OSError):  # a killed run left something there
        folder.rmdir()


def remove_folder(folder: Path, by_way_of: Path) -> None:
    """Delete a folder so that a crash leaves it whole at its place, or not there.

    Args:
        by_way_of: a folder on the same filesystem from which it is deleted.
    """
    make_folder(by_way_of)
    moved = move_aside(folder, by_way_of)
    if moved is not None:
        remove(moved)


def move_aside(place: Path, into: Path) -> Path | None:
    """Move a file or folder, if there is one, into another folder to be deleted, durably; return where it is now."""
    if not os.path.lexists(place):
        return None
    moved = into / f"removed-{place.name}.{secrets.token_hex(4)}"
    os.rename(place, moved)
    fsync_directory(place.parent)
    return moved


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


MOST_NESTED = 100  # what is nested deeper, a reader further down the stack could not follow


def parse_json(text: str | bytes) -> Any:
    """Value of a text in JSON.

    Raises:
        ValueError: if it is none, or nested deeper than a reader can follow.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too many brackets") from None
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
    if level:
        raise ValueError("too many brackets")
    return value


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
