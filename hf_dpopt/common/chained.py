"""A file of JSON records, each of which commits to all before it; locked while it is written, and durable.

``prev`` of a record is the ``sha256`` of the one before it, so the last digest commits to the whole file: a line that
was edited, removed or moved is found when the file is read; lines removed from the end are not, from the file alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.common.locks import FileLock, LockHeld, open_plain
from hf_dpopt.common.storage import naming

GENESIS = "0" * 64  # what the first record names as the one before it
PATIENCE = 60.0  # seconds to wait for another process that writes, which takes milliseconds


def canonical(record: dict[str, Any]) -> str:
    """The one text of a record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def seal_record(record: dict[str, Any], prev: str) -> tuple[str, bytes]:
    """The digest of a record that follows ``prev``, and its line without the newline."""
    body = record | {"prev": prev}
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    return digest, canonical(body | {"sha256": digest}).encode()


class ChainedFile:
    """Records of a file, read and verified; those of `writing` can be added to.

    Attributes:
        records: all of them, oldest first, without their digests.
        digests: SHA-256 of each record, and through it of all before.
    """

    def __init__(self, path: Path):
        self.path, self.records, self.digests = path, list[dict[str, Any]](), list[str]()
        self._end, self._is_locked, self._lacks_newline, self._mode = 0, False, False, 0o644

    @property
    def digest(self) -> str:
        """SHA-256 of the last record."""
        return self.digests[-1] if self.digests else GENESIS

    @classmethod
    def read(cls, path: Path) -> ChainedFile:
        """Read and verify without a lock; half a record at the end is one that is being written.

        Raises:
            DPConfigError: if a line was changed, or the file cannot be read.
        """
        found = cls(path)
        *lines, tail = read_whole(path).split(b"\n")
        for number, line in enumerate(lines, start=1):
            found._take_in(line, number)
        with contextlib.suppress(DPConfigError):
            if tail:  # a whole record that an editor took the newline from stays
                found._take_in(tail, len(lines) + 1)
                found._end, found._lacks_newline = found._end - 1, True
        return found

    @classmethod
    @contextlib.contextmanager
    def writing(cls, path: Path, *, mode: int = 0o644) -> Iterator[ChainedFile]:
        """Read the file under its lock, so that records can be added; it may be absent. Waits for other writers.

        Raises:
            DPConfigError: if a line was changed, or another process keeps the lock.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(Path(f"{path}.lock"), mode)
        try:
            found = cls.read(path) if path.exists() else cls(path)
            found._is_locked, found._mode = True, mode
            yield found
        finally:
            lock.close()

    def append(self, record: dict[str, Any]) -> None:
        """Write a record to the disk, and then take it in."""
        assert self._is_locked, "records are added under the lock"
        digest, line = seal_record(record, self.digest)
        if not self.path.exists():
            write_durably(self.path, line + b"\n", mode=self._mode)
        else:
            descriptor = open_plain(self.path, os.O_RDWR | os.O_APPEND)
            try:
                with naming(self.path):
                    os.ftruncate(descriptor, self._end)  # half a record that a kill left
                    content = b"\n" * self._lacks_newline + line + b"\n"
                    if os.write(descriptor, content) < len(content):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._end, self._lacks_newline = self._end + self._lacks_newline + len(line) + 1, False
        self.records.append(json.loads(canonical(record)))
        self.digests.append(digest)

    def _take_in(self, line: bytes, number: int) -> None:
        """Verify one line and keep its record."""
        try:
            sealed = parse_json(line)
            record = {key: value for key, value in sealed.items() if key not in ("prev", "sha256")}
            digest, expected = seal_record(record, sealed["prev"])
        except (ValueError, KeyError, AttributeError):
            raise DPConfigError(f"{self.path}, line {number}: no record; it was edited or damaged. {_FIX}") from None
        if expected != line or sealed["prev"] != self.digest:
            raise DPConfigError(
                f"{self.path}, line {number}: it was edited, or lines were removed or moved before it. {_FIX}"
            )
        self.records.append(record)
        self.digests.append(digest)
        self._end += len(line) + 1


_FIX = "A ledger that was changed no longer proves what was spent. Put the original file back."


def _take_lock(path: Path, mode: int) -> FileLock:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return FileLock.take(path, mode=mode)
        except LockHeld as held:
            if time.monotonic() > until:
                raise DPConfigError(
                    f"{path} was held by process {held} for {PATIENCE:g} s. End that process, or wait for it."
                ) from None
            time.sleep(0.02)
