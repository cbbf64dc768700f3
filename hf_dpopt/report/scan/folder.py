"""Files and folders below a folder, as an upload would take them; nothing outside of it is looked at."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

LEADS_OUT = "a link out of the folder, which was not followed; what it leads to would be uploaded"


def walk_folder(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folders and files below ``root``: place, printable name, and what is wrong with it (an empty text if nothing).

    Nothing outside the folder is looked at. A folder that a link reaches a second time is read once.
    """
    inside = os.path.realpath(root)
    seen, todo = {inside}, [root]
    while todo:
        folder = todo.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            yield folder, _printable(folder, root), f"a folder that cannot be read, so not checked ({_reason(error)})"
            continue
        for entry in entries:
            path = folder / entry.name
            problem, real = _problem(path, inside)
            is_folder = not problem and os.path.isdir(real)
            yield Path(real) if not problem and entry.is_symlink() else path, _printable(path, root), problem
            if is_folder and real not in seen:
                seen.add(real)
                todo.append(path)


def _problem(path: Path, inside: str) -> tuple[str, str]:
    """The reason why a folder or file cannot be read (or an empty text), and where it really lies."""
    real = os.path.realpath(path)
    try:
        if path.is_symlink() and os.path.commonpath([inside, real]) != inside:
            return LEADS_OUT, real
        mode = os.stat(real).st_mode
    except (OSError, ValueError) as error:
        return f"unreadable, so not checked ({_reason(error)})", real
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "neither a file nor a folder (a pipe, socket or device)", real
    return "", real


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number, type(error).__name__) if number is not None else type(error).__name__


def _printable(path: Path, root: Path) -> str:
    """The path below the folder, in characters that every console can print on one line."""
    name = "." if path == root else path.relative_to(root).as_posix()
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
