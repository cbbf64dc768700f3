"""Files that must survive a crash: whole or absent, and on the disk before the caller goes on."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def fsync_directory(directory: Path) -> None:
    """Make the creation, renaming and removal of files in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes, *, mode: int) -> None:
    """Create ``path`` with ``content`` and permissions ``mode``; a crash leaves all of it or nothing.

    The permissions are set at creation, so the content is at no time readable by more users than ``mode`` says.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # a crash may have left another
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
