"""Bytes to be scanned, wherever they lie: a file, a section of it, or what was decompressed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

WINDOW = 2**20  # bytes that are read at once; more do not stay in the cache between two looks


class Source:
    """Bytes of a known number; this one holds them in memory.

    Args:
        content: the bytes.
    """

    def __init__(self, content: bytes):
        self._content = content
        self.size = len(content)

    def read(self, start: int, length: int) -> bytes:
        """The bytes from `start` on, `length` of them or what there is."""
        return self._content[start : start + length]

    def windows(self, overlap: int) -> Iterator[bytes]:
        """The bytes in order, `WINDOW` at once; each window begins with the last `overlap` bytes of the one before."""
        length = WINDOW
        for start in range(0, self.size, length):
            before = min(start, overlap)
            yield self.read(start - before, before + length)


class FileSource(Source):
    """A regular file that is open for reading."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        parts, end = [], min(start + length, self.size)
        while start < end and (part := os.pread(self._descriptor, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def buffers(self, overlap: int) -> Iterator[memoryview]:
        """The same windows without copies: each view is valid until the next one is asked for."""
        length = WINDOW
        buffer, kept, start = bytearray(overlap + length), 0, 0
        view = memoryview(buffer)
        while num := os.preadv(self._descriptor, [view[kept : kept + length]], start):
            start += num
            yield view[: kept + num]
            left = min(overlap, kept + num)
            buffer[:left] = buffer[kept + num - left : kept + num]
            kept = left


class Section(Source):
    """A part of another source."""

    def __init__(self, source: Source, start: int, size: int):
        self._source, self._start = source, start
        self.size = max(0, min(size, source.size - start))

    def read(self, start: int, length: int) -> bytes:
        return self._source.read(self._start + start, max(0, min(length, self.size - start)))


class Reader(io.RawIOBase):
    """A source as a file object, for libraries that want one."""

    def __init__(self, source: Source):
        self._source, self._place = source, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(
            0, {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._source.size}[whence] + offset
        )
        return self._place

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        content = self._source.read(self._place, len(buffer))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)
