"""Lock files: one process at a time, for as long as it lives, on filesystems that have locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from hf_dpopt.common.disk_faults import naming
from hf_dpopt.common.durable import UNSUPPORTED
from hf_dpopt.common.errors import DPConfigError


class LockHeld(Exception):
    """Another process has the lock; the argument says which one."""


class FileLock:
    """A lock that is held until `close`, or until this process is gone.

    It belongs to the open file, not to the process: taking it a second time in one process is refused as well.

    Attributes:
        is_enforced: whether the filesystem has locks; without, nobody is kept out.
    """

    def __init__(self, path: Path, descriptor: int, *, is_enforced: bool):
        self.path, self.is_enforced = path, is_enforced
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, *, mode: int) -> FileLock:
        """Take the lock and write down who has it; never wait.

        Args:
            path: lock file, made with permissions ``mode`` if there is none. A link is not followed: whoever can write
                to the folder could point it at another file, which would be overwritten.

        Raises:
            LockHeld: if another process has it.
            DPConfigError: if something else than a plain file lies there.
        """
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            if os.fstat(descriptor).st_nlink > 1:  # a second name of another file, which would be overwritten
                raise _not_plain(path)
            is_enforced = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld(os.read(descriptor, 32).decode(errors="replace").strip() or "unknown") from None
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                is_enforced = False
            with naming(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, is_enforced=is_enforced)

    def close(self) -> None:
        """Give up the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def is_held(path: Path) -> bool:
    """Whether a process has the lock, as far as this machine and its filesystem tell."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(descriptor)
    return False


def open_plain(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a plain file; a link is not followed, for whoever can write to the folder could lead it anywhere.

    Raises:
        DPConfigError: if something else than a plain file lies there.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_plain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def _not_plain(path: Path) -> DPConfigError:
    what = "a link" if path.is_symlink() else "not a file of its own"
    return DPConfigError(
        f"{path} is {what}, and a run would write to what it leads to. Remove it, "
        "or put the file itself there; somebody or something else made it."
    )
