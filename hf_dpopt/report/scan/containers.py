"""Content of files, containers opened: tensors of safetensors, torch, numpy; members of archives; pickled values.

Nothing is executed, and what is opened is bounded: depth, number of members, and bytes that come out of compressed
ones. A bound that is reached is a `Problem`: content that nobody looked at is not taken for clean.
"""

from __future__ import annotations

import ast
import bz2
import dataclasses
import json
import lzma
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hf_dpopt.report.scan import pickles
from hf_dpopt.report.scan.sources import Reader, Section, Source

MAX_DEPTH = 4  # of containers in containers
MAX_MEMBERS = 50_000  # of all archives in one file
MAX_DECOMPRESSED = 256 * 2**20  # bytes that come out of one file
MAX_PICKLE = 64 * 2**20  # bytes of a pickle that are followed
MAX_NUMPY_HEADER = 10_000  # bytes; as numpy's own reader
MAX_HEADER = 100 * 2**20  # that safetensors itself allows
PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt")
ARGUMENTS = "training_args.bin"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Bytes without a structure that is known here: text, or a binary file.

    Attributes:
        name: name of the file or member, without folders.
        source: the bytes.
    """

    name: str
    source: Source


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A tensor: where its bytes lie, and of what type they are."""

    source: Source
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of a pickle."""

    name: str
    values: list[Any]


@dataclasses.dataclass(frozen=True)
class Member:
    """The name of a member of an archive, or of a tensor."""

    name: str
    is_tensor: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """Content that could not be looked at, and why."""

    why: str


Part = Leaf | Numbers | Values | Member | Problem

_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "u1", "UntypedStorage": "u1",
    "BFloat16Storage": "<V2",
}  # fmt: skip
_UNKNOWN = np.dtype("V2")  # a type numpy does not have: floats of 16 or 8 bits


class Opener:
    """Content of one file; counts what comes out of it."""

    def __init__(self) -> None:
        self._members = MAX_MEMBERS
        self._bytes = MAX_DECOMPRESSED

    def open(self, source: Source, name: str, depth: int = 0) -> Iterator[Part]:
        """Open a file, or a member of one.

        Args:
            source: its bytes.
            name: its name, without folders; decides only where the bytes do not.
            depth: number of containers it lies in.
        """
        head = source.read(0, 16)
        if depth > MAX_DEPTH:
            yield Problem(f"containers nested more than {MAX_DEPTH} deep")
            return
        if (header := _safetensors_header(source, head)) is not None:
            yield from _open_safetensors(source, header, name)
        elif head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            yield from self._open_zip(source, name, depth)
        elif head[:6] == b"\x93NUMPY":
            yield from self._open_numpy(source, name, depth)
        elif (stream := _decompressor(head)) is not None:
            yield from self._open_compressed(source, name, depth, stream)
        elif head[:1] == b"\x80" and head[1:2] <= b"\x05" or name.endswith(PICKLE_SUFFIXES) or name == ARGUMENTS:
            yield from _open_pickle(source, name)
        else:
            yield Leaf(name, source)

    # --- archives ---

    def _open_zip(self, source: Source, name: str, depth: int) -> Iterator[Part]:
        try:
            with zipfile.ZipFile(Reader(source)) as archive:  # type: ignore[arg-type]  # a raw file object is enough
                members = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
            yield Problem(f"a zip archive that cannot be read ({type(error).__name__})")
            yield Leaf(name, source)
            return
        self._members -= len(members)
        stored = sum(m.compress_size for m in members if m.compress_type == zipfile.ZIP_STORED)
        if self._members < 0 or stored > source.size:
            yield Problem(f"an archive with more than {MAX_MEMBERS} members, or with members that overlap")
            return
        pickled, types = _torch_pickle(source, members)
        for member in members:
            short = member.filename.rpartition("/")[2]
            yield Member(short or member.filename)
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                yield Problem("an encrypted member")
                continue
            if member is pickled[0]:
                yield Values(short, pickled[1])
                continue
            inner = self._inner(source, member)
            if isinstance(inner, Problem):
                yield inner
            elif types and "/data/" in f"/{member.filename}" and short in types:
                yield Numbers(inner, types[short])
            else:
                yield from self.open(inner, short, depth + 1)

    def _inner(self, source: Source, member: zipfile.ZipInfo) -> Source | Problem:
        """The bytes of a member."""
        raw = _stored_section(source, member)
        if raw is None:
            return Problem("a member that is not where its archive says")
        if member.compress_type == zipfile.ZIP_STORED:
            return raw
        makers: dict[int, Callable[[], Any]] = {
            zipfile.ZIP_DEFLATED: lambda: zlib.decompressobj(-15),
            zipfile.ZIP_BZIP2: bz2.BZ2Decompressor,
        }
        if member.compress_type not in makers:
            return Problem(f"a member compressed by method {member.compress_type}")
        return self._decompress(raw, makers[member.compress_type])

    def _decompress(self, source: Source, make: Callable[[], Any]) -> Source | Problem:
        """All that comes out of a compressed source, as far as the bound allows; streams in a row are one."""
        parts, place = [], 0
        stream = make()
        try:
            while place < source.size:
                pending = source.read(place, 2**16)
                place += len(pending)
                while pending:
                    part = stream.decompress(pending, max_length=2**20)
                    self._bytes -= len(part)
                    if self._bytes < 0:
                        return Problem(f"more than {MAX_DECOMPRESSED // 2**20} MiB compressed in it")
                    parts.append(part)
                    if stream.eof:
                        pending, stream = stream.unused_data.lstrip(b"\0"), make()
                    else:
                        pending = getattr(stream, "unconsumed_tail", b"")
                        while not getattr(stream, "needs_input", True) and not stream.eof:
                            part = stream.decompress(b"", max_length=2**20)
                            self._bytes -= len(part)
                            if self._bytes < 0:
                                return Problem(f"more than {MAX_DECOMPRESSED // 2**20} MiB compressed in it")
                            parts.append(part)
        except (zlib.error, OSError, EOFError, ValueError, lzma.LZMAError) as error:
            if not parts:
                return Problem(f"compressed data that cannot be read ({type(error).__name__})")
        return Source(b"".join(parts))

    def _open_compressed(self, source: Source, name: str, depth: int, make: Callable[[], Any]) -> Iterator[Part]:
        inner = self._decompress(source, make)
        if isinstance(inner, Problem):
            if make is not _zlib or inner.why.startswith("more"):  # two bytes make no zlib stream
                yield inner
            yield Leaf(name, source)
        else:
            yield from self.open(inner, name.rpartition(".")[0] or name, depth + 1)

    # --- numpy ---

    def _open_numpy(self, source: Source, name: str, depth: int) -> Iterator[Part]:
        try:
            dtype, start = _numpy_header(source)
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
            yield Problem(f"a numpy array that cannot be read ({type(error).__name__})")
            yield Leaf(name, source)
            return
        content = Section(source, start, source.size - start)
        if dtype.hasobject:
            yield from _open_pickle(content, "array.pkl")
        elif dtype.kind in "SU" or dtype.fields:
            yield Leaf(name, content if dtype.kind != "U" else Source(content.read(0, MAX_PICKLE).replace(b"\0", b"")))
        else:
            yield Numbers(content, dtype)


def _numpy_header(source: Source) -> tuple[np.dtype, int]:
    """Type of the elements of a numpy file, and where they begin; read as a literal, numpy's own reader guesses more.

    Raises:
        ValueError: or another error of the literal, if it is damaged.
    """
    size = 2 if source.read(6, 1) == b"\x01" else 4
    length = int.from_bytes(source.read(8, size), "little")
    if length > MAX_NUMPY_HEADER:
        raise ValueError(f"a header of {length} bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what damaged literals look like
        header = ast.literal_eval(source.read(8 + size, length).decode("utf-8", "strict").strip())
        return np.lib.format.descr_to_dtype(header["descr"]), 8 + size + length


def _decompressor(head: bytes) -> Callable[[], Any] | None:
    """A maker of decompressors for data that begins like this."""
    if head[:2] == b"\x1f\x8b":
        return _gzip
    if head[:3] == b"BZh":
        return bz2.BZ2Decompressor
    if head[:6] == b"\xfd7zXZ\x00":
        return lzma.LZMADecompressor
    if head[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda"):
        return _zlib
    return None


def _gzip() -> Any:
    return zlib.decompressobj(31)


def _zlib() -> Any:
    return zlib.decompressobj(15)


def _stored_section(source: Source, member: zipfile.ZipInfo) -> Section | None:
    """The bytes of a member as they lie in the archive."""
    local = source.read(member.header_offset, 30)
    if len(local) < 30 or local[:4] != b"PK\x03\x04":
        return None
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    return Section(source, member.header_offset + 30 + name_length + extra_length, member.compress_size)


def _open_safetensors(source: Source, header: bytes, name: str) -> Iterator[Part]:
    yield Leaf(name, Source(header))
    for tensor, entry in json.loads(header).items():
        yield Member(tensor, is_tensor=True)
        if tensor == "__metadata__" or not isinstance(entry, dict):
            continue
        try:
            start, end = (int(place) for place in entry["data_offsets"])
            dtype = np.dtype(_SAFETENSORS.get(entry["dtype"], _UNKNOWN))
        except (KeyError, TypeError, ValueError):
            yield Problem("a tensor without a place or a type")
            continue
        yield Numbers(Section(source, 8 + len(header) + start, end - start), dtype)


def _safetensors_header(source: Source, head: bytes) -> bytes | None:
    """The header, in JSON; None if this is another kind of file."""
    if len(head) < 10 or head[8:9] != b"{":
        return None
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(MAX_HEADER, source.size - 8):
        return None
    header = source.read(8, length)
    try:
        return header if isinstance(json.loads(header), dict) else None
    except (ValueError, RecursionError):
        return None


# --- pickles ---


def _open_pickle(source: Source, name: str) -> Iterator[Part]:
    data = source.read(0, MAX_PICKLE)
    try:
        values, end = pickles.read_pickles(data)
    except pickles.PickleError as error:
        if name == ARGUMENTS or (name.endswith(PICKLE_SUFFIXES) and data[:1] == b"\x80"):
            yield Problem(str(error))
        yield Leaf(name, source)
        return
    yield Values(name, values)
    if values and values[0] == pickles.TORCH_MAGIC:
        yield from _legacy_storages(source, values, end)
    elif end < source.size:
        yield Leaf(name, Section(source, end, source.size - end))


def _legacy_storages(source: Source, values: list[Any], place: int) -> Iterator[Part]:
    """Tensors of torch's format without zip: each is its number of elements, then these, in the order of a list."""
    types = _types_in(values)
    for key in values[-1] if isinstance(values[-1], list) else []:
        dtype = types.get(str(key), np.dtype("u1"))
        length = int.from_bytes(source.read(place, 8), "little") * dtype.itemsize
        yield Numbers(Section(source, place + 8, length), dtype)
        place += 8 + length


def _torch_pickle(
    source: Source, members: list[zipfile.ZipInfo]
) -> tuple[tuple[zipfile.ZipInfo | None, list[Any]], dict[str, np.dtype]]:
    """The pickle of a torch file with its values, and the type of each storage; nothing for other archives."""
    for member in members:
        section = _stored_section(source, member) if member.filename.endswith("data.pkl") else None
        if section is not None and section.size <= MAX_PICKLE and member.compress_type == zipfile.ZIP_STORED:
            try:
                pickled, end = pickles.read_pickles(section.read(0, section.size))
            except pickles.PickleError:
                break
            if end == section.size:
                return (member, pickled), _types_in(pickled)
    return (None, []), {}


def _types_in(values: list[Any]) -> dict[str, np.dtype]:
    """Types of the storages that pickled tensors refer to: ("storage", class, name, device, number of elements)."""
    found: dict[str, np.dtype] = {}
    for _, value in pickles.walk(values):
        if isinstance(value, pickles.Opaque) and value.name == "tensor storage" and value.content:
            reference = value.content[0]
            if isinstance(reference, tuple) and len(reference) >= 3 and isinstance(reference[1], pickles.Opaque):
                kind = reference[1].name.split(" ")[-1].rpartition(".")[2]
                found[str(reference[2])] = np.dtype(_STORAGES.get(kind, "V2"))
    return found
