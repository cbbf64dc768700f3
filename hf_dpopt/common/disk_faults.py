"""Faults of disks (full, read-only, failing): which file, what the system says, and what to do, on one line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_OF_THE_SYSTEM = _FULL | _READ_ONLY | {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_OF_SAFETENSORS = re.compile(r"\(os error (\d+)\)")
_OF_TORCH = re.compile(
    r"inline_container\.cc.*(?:strerror: (.*)|unexpected pos|Writer failed|write failed)"
    r"|basic_ios::clear: iostream error",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class StorageFault:
    """A file that could not be written or read.

    Attributes:
        path: the file, or a folder above it; None if the system does not say which one.
        number: error number; None if a library does not pass it on.
        reason: the system's words.
    """

    path: Path | None
    number: int | None
    reason: str

    @property
    def remedy(self) -> str:
        """Advice on the fault, as the beginning of a sentence."""
        if self.number in _FULL:
            return "Make room there"
        if self.number is None:
            return "Make room there, or see to that disk"
        return "Make it writable" if self.number in _READ_ONLY else "Choose another folder, or see to that disk"

    def describe(self, options: Mapping[str, Path]) -> str:
        """Say what could not be written, and how much room there is; without a full stop.

        Args:
            options: option -> the folder or file that it names.
        """
        is_write = self.number is None or self.number in (*_FULL, errno.EROFS)  # others may be of a dataset
        of = [
            f"{name}={place}"
            for name, place in options.items()
            if (is_write if self.path is None else _is_in(self.path, place))
        ]
        done = "written" if of or is_write else "read or written"
        prefix = f"{' or '.join(of)}: " if of else ""
        return f"{prefix}{self.path or 'a file'} could not be {done} ({self.reason}{self._room(options)})"

    def _room(self, options: Mapping[str, Path]) -> str:
        if self.number not in (errno.ENOSPC, errno.EDQUOT, None):
            return ""
        rooms = []
        for place in [self.path] if self.path is not None else options.values():
            there = next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())
            rooms.append(f"{shutil.disk_usage(there).free / 1e6:,.1f} MB are free in {there}")
        return "; " + ", ".join(rooms) if rooms else ""


def find_fault(error: BaseException, folders: Iterable[Path] = ()) -> StorageFault | None:
    """The fault that an error is about, the first one if others followed from it; None for an error of another kind.

    Args:
        error: an error of the system, of safetensors or of `torch.save`.
        folders: whatever fails below them is a fault, also where a file is missing.
    """
    fault = _fault(error, tuple(folders))
    while fault is not None and (cause := error.__cause__ or error.__context__) is not None:
        earlier = _fault(cause, ())
        if earlier is not None:
            fault = dataclasses.replace(earlier, path=earlier.path or fault.path)
        error = cause
    return fault


def _fault(error: BaseException, folders: tuple[Path, ...]) -> StorageFault | None:
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    path = Path(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else None
    if isinstance(error, OSError):
        ours = path is not None and any(_is_in(path, folder) for folder in folders)
        if error.errno is None or not (ours or error.errno in _OF_THE_SYSTEM):
            return None
        return StorageFault(path, error.errno, error.strerror or os.strerror(error.errno))
    if found := _OF_SAFETENSORS.search(str(error)):
        return StorageFault(path, int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, RuntimeError) and (found := _OF_TORCH.search(str(error))):
        return StorageFault(path, None, found[1] or "the write failed")
    return None


def _is_in(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file, or the folder, in errors of the system and of libraries that do not name it themselves."""
    try:
        yield
    except Exception as error:
        of_error: Any = error
        if getattr(error, "filename", None) is None and _fault(error, ()) is not None:
            of_error.filename = str(path)
        raise
