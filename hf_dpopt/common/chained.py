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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_dpopt.common.disk_faults import naming
from hf_dpopt.common.durable import is_open_at, parse_json, read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import FileLock, LockHeld, open_plain

GENESIS = "0" * 64  # what the first record names as the one before it
PATIENCE = 60.0  # seconds to wait for another process that writes, which takes milliseconds
_FIX = "A ledger that was changed no longer proves what was spent. Put the original file back."


def canonical(record: dict[str, Any]) -> str:
    """The one text of a record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def seal_record(record: dict[str, Any], prev: str) -> tuple[str, bytes]:
    """The digest of a record that follows ``prev``, and its line without the newline."""
    body = record | {"prev": prev}
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    return digest, canonical(body | {"sha256": digest}).encode()


class ChainedFile:
    """Records of a file, read and verified. Whoever holds its lock may add to it.

    Formal guarantee: when `append` returns, the records are on the disk.

    Attributes:
        records: all of them, oldest first, without their digests.
        digest: SHA-256 of the last record, and through it of all.
    """

    def __init__(self, path: Path, mode: int = 0o644):
        self.path, self.records, self.digest = path, list[dict[str, Any]](), GENESIS
        self._mode, self._digests = mode, set[str]()
        self._end, self._lacks_newline = 0, False
        self._file: int | None = None  # held open, so that another file at its place has another inode
        self._is_open = False

    def contains(self, digest: str) -> bool:
        """Whether the file had that digest at some moment."""
        return digest in self._digests

    # --- reading ---

    @classmethod
    def read(cls, path: Path, mode: int = 0o644) -> ChainedFile:
        """Read and verify without a lock; half a record at the end is one that is being written, or that a kill left.

        Raises:
            DPConfigError: if a line was changed, or the file cannot be read.
        """
        found = cls(path, mode)
        *lines, tail = read_whole(path).split(b"\n")
        for number, line in enumerate(lines, start=1):
            found._take_in(line, number)
        with contextlib.suppress(DPConfigError):
            if tail:  # a whole record that an editor took the newline from stays
                found._take_in(tail, len(lines) + 1)
                found._end, found._lacks_newline = found._end - 1, True
        return found

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
        self._keep(record, digest, len(line) + 1)

    def _keep(self, record: dict[str, Any], digest: str, size: int) -> None:
        self.records.append(record)
        self._digests.add(digest)
        self.digest, self._end = digest, self._end + size

    # --- writing ---

    @classmethod
    def open(cls, path: Path, *, mode: int = 0o644) -> ChainedFile:
        """Read the file, which may be absent, and add to it until `close`; the caller holds its lock.

        Raises:
            DPConfigError: if a line was changed.
        """
        found = cls.read(path, mode) if os.path.lexists(path) else cls(path, mode)
        if os.path.lexists(path):
            found._settle()
        found._is_open = True
        return found

    def _settle(self) -> None:
        """Cut off half a record that a kill left, and put the newline back that an editor took."""
        self._file = open_plain(self.path, os.O_RDWR | os.O_APPEND)
        if self._lacks_newline or os.fstat(self._file).st_size > self._end:
            with naming(self.path):
                os.ftruncate(self._file, self._end)
                self._end += os.write(self._file, b"\n" * self._lacks_newline)
                os.fsync(self._file)

    @classmethod
    @contextlib.contextmanager
    def writing(cls, path: Path, *, mode: int = 0o644) -> Iterator[ChainedFile]:
        """Open the file under a lock beside it. Waits for other writers.

        Raises:
            DPConfigError: if a line was changed, or another process keeps the lock.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, found = wait_for_lock(Path(f"{path}.lock"), mode), None
        try:
            found = cls.open(path, mode=mode)
            yield found
        finally:
            if found is not None:
                found.close()
            lock.close()

    @classmethod
    def rewrite(cls, path: Path, records: Iterable[dict[str, Any]]) -> ChainedFile:
        """Open a file that holds these records and no others; it is replaced as a whole if it differs."""
        made, lines = cls(path), list[bytes]()
        for record in records:
            digest, line = seal_record(record, made.digest)
            made._keep(record, digest, len(line) + 1)
            lines.append(line + b"\n")
        content = b"".join(lines)
        if not os.path.lexists(path) or path.is_symlink() or read_whole(path) != content:
            write_durably(path, content, mode=made._mode)
        made._settle()
        made._is_open = True
        return made

    def append(self, *records: dict[str, Any]) -> None:
        """Write records to the disk, and then take them in.

        Raises:
            DPConfigError: if the file is not as it was left here.
        """
        self.check_intact()
        digest, sealed = self.digest, list[tuple[dict[str, Any], str, bytes]]()
        for record in records:
            digest, line = seal_record(record, digest)
            sealed.append((json.loads(canonical(record)), digest, line + b"\n"))
        content = b"".join(line for _, _, line in sealed)
        try:
            with naming(self.path):
                self._write(content)
        except BaseException:
            self.close()  # the file may hold more than this object knows; whoever opens it next settles it
            raise
        for record, digest, line in sealed:
            self._keep(record, digest, len(line))

    def _write(self, content: bytes) -> None:
        if self._file is None:
            write_durably(self.path, content, mode=self._mode)
            self._file = open_plain(self.path, os.O_RDWR | os.O_APPEND)
            return
        if os.write(self._file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file)

    @property
    def is_intact(self) -> bool:
        """Whether the file is still at its place, as this writer left it."""
        if self._file is None:
            return not os.path.lexists(self.path)
        return is_open_at(self._file, self.path) and os.fstat(self._file).st_size == self._end

    def check_intact(self) -> None:
        """Stop a writer whose file was taken from under it: what it adds would be on no disk that anybody reads.

        Raises:
            DPConfigError: if the file was deleted, replaced or changed since it was opened.
        """
        assert self._is_open, f"{self.path} is not open for writing"
        if not self.is_intact:
            raise DPConfigError(
                f"{self.path} was deleted, replaced or changed while the run was going on, so nothing further was "
                f"charged, and no further step was run. The last record was {self.digest}. Resume with "
                "resume_from_checkpoint=True: what was charged is known. Something else writes there: keep it out."
            )

    def close(self) -> None:
        """Add nothing any more."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._is_open = None, False


def wait_for_lock(path: Path, mode: int) -> FileLock:
    """Take a lock that others hold for milliseconds.

    Raises:
        DPConfigError: if somebody keeps it.
    """
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
