"""The journal of releases: what each step released since the last checkpoint, on the disk before the optimizer steps.

Released values are public, so a run that was killed takes them again after its last checkpoint: no record is read,
nothing is charged, and the weights are those of the undisturbed run, bit for bit (`hf_dpopt.run.resume`).

Entries are appended to files in ``output_dir/_journal`` (transformers uploads nothing that begins with an underscore),
a new file after every checkpoint, so that what a checkpoint holds is dropped by removing files. A file that a chain or
a checkpoint begins says first what it continues. An entry is::

    b"DPJ1" | length of the header, 4 bytes | header, JSON | values, float32, little-endian | SHA-256, 32 bytes

The checksum finds what a kill or a disk tore. Whoever can write to ``output_dir`` can write other entries, too: he may
spoil the model, which is then a function of what he wrote and of releases. Ranks hold the same sums, so rank 0 writes
all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_dpopt.common.durable import fsync_directory, is_open_at, make_folder, open_regular
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.storage import naming
from hf_dpopt.common.types import Released

JOURNAL = "_journal"  # in output_dir
SUFFIX = ".releases"
MAGIC = b"DPJ1"
CHECKSUM_BYTES = 32
LONGEST_HEADER = 2**26  # bytes; names and shapes of the tensors
LEAST_STEPS = 10  # that have to fit into the limit, else checkpoints would be all that a run does
GIGABYTE = 10**9
_PREFIX = struct.Struct("<4sI")
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync

STEP, OPENING, BASE = "step", "opening", "base"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Place of an entry whose checksum is right, and its header.

    Attributes:
        path: file that holds it.
        start: position of its first byte.
        header: ``chain``, ``step``, ``kind``, ``tensors`` ([name, shape] each); ``base`` for what is continued.
    """

    path: Path
    start: int
    header: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step, 1-based."""
        return int(self.header["step"])

    @property
    def kind(self) -> str:
        """``step``, ``opening`` (the query before the first step) or ``base`` (what is continued)."""
        return str(self.header["kind"])


@dataclasses.dataclass(frozen=True)
class Contents:
    """Contents of the files of a chain.

    Attributes:
        entries: those with a right checksum, in the order in which they were written.
        torn: files in which something else follows the last of them -> where that one ends.
    """

    entries: tuple[Entry, ...]
    torn: Mapping[Path, int]


class Journal:
    """The journal of one chain of steps.

    Formal guarantee: when `write` returns, the entry is on the disk. `read` and `contents` return no torn one.

    Args:
        output_dir: folder of the run.
        chain_id: public name of the chain.
        limit: bytes that the files may fill before a checkpoint is wanted; 0 for a journal that is only read.
    """

    def __init__(self, output_dir: Path, chain_id: str, *, limit: float = 0.0):
        self.folder, self.chain_id = output_dir / JOURNAL, chain_id
        self._limit = limit
        self._file: BinaryIO | None = None
        self._last_steps: dict[Path, int] = {}  # of every file
        self._largest = 0  # bytes of one entry
        self._is_off = limit <= 0
        self._is_broken = False  # whether files were deleted that a resume would need

    # --- writing ---

    def begin(self, step: int, base: str) -> None:
        """Write what is continued, and remove what lies before it: a chain or the time after a checkpoint begins.

        Args:
            step: steps done so far.
            base: digest of the initial weights, or the origin of the checkpoint.
        """
        self.close()
        self._is_broken = False
        before = dict(self._last_steps)
        if not self._is_off:
            self._append({"kind": BASE, "step": step, "base": base}, {})
        for path, last in before.items():
            if last <= step:
                path.unlink(missing_ok=True)
                del self._last_steps[path]
        for path in self.folder.glob(f"*{SUFFIX}"):
            if not path.name.startswith(f"{self.chain_id}-"):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not there, or something is left in it
            self.folder.rmdir()

    def write(self, kind: str, step: int, values: Released) -> None:
        """Make what a step released durable.

        Args:
            kind: `STEP` or `OPENING`.
            step: the step, 1-based.
            values: name -> released tensor, float32.
        """
        if self._is_off:
            return
        size = _size_of(values)
        if not self.takes(values):
            self._is_off = True
            self.remove()
            logger.warning(
                f"No journal is kept: a step has {size / GIGABYTE:.3g} GB, and journal_limit of "
                f"{self._limit / GIGABYTE:g} GB holds fewer than {LEAST_STEPS} of them. If the run is killed it goes "
                "on from its last checkpoint, and pays for the steps since again. Raise --journal_limit, or save more "
                "often (--save_steps)."
            )
            return
        self._largest = max(self._largest, size)
        self._append({"kind": kind, "step": step}, values)

    def takes(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether a step of these values would be written, and not be too large for the limit."""
        return not self._is_off and _size_of(values) * LEAST_STEPS <= self._limit

    def _append(self, header: dict[str, Any], values: Mapping[str, torch.Tensor]) -> None:
        """Append an entry and its checksum to the file in use, and wait for the disk."""
        names = list(values)  # their order tells the queries of a step apart
        tensors = [[name, list(values[name].shape)] for name in names]
        public: dict[str, Any] = {"chain": self.chain_id, "tensors": tensors, **header}
        body = json.dumps(public, sort_keys=True).encode()
        assert len(body) <= LONGEST_HEADER, len(body)
        with naming(self.folder):
            file, checksum = self._in_use(int(header["step"])), hashlib.sha256()
            for part in (_PREFIX.pack(MAGIC, len(body)), body, *map(_bytes_of, values.values())):
                checksum.update(part)
                file.write(part)
            file.write(checksum.digest())
            file.flush()
            _fdatasync(file.fileno())
        self._last_steps[Path(file.name)] = int(header["step"])

    def _in_use(self, step: int) -> BinaryIO:
        """The file that is written to; a new one after a checkpoint, or where it was taken away."""
        if self._file is not None and not is_open_at(self._file.fileno(), Path(self._file.name)):
            logger.warning(
                f"{self._file.name} was deleted or replaced while the run was going on. Its steps are lost to a "
                "resume until a checkpoint is saved, which is asked for now."
            )
            self._last_steps.pop(Path(self._file.name), None)
            self.close()
            self._is_broken = True
        if self._file is None:
            self._file = self._open(step)
        return self._file

    def _open(self, step: int) -> BinaryIO:
        if not self.folder.is_dir() or self.folder.is_symlink():
            make_folder(self.folder)
            fsync_directory(self.folder.parent)
        names = (f"{self.chain_id}-{step:09d}-{number:03d}{SUFFIX}" for number in itertools.count())
        # a kill, or a checkpoint that was written again, may have left some
        file = open(next(path for name in names if not os.path.lexists(path := self.folder / name)), "xb")
        fsync_directory(self.folder)
        return file

    @property
    def is_full(self) -> bool:
        """Whether the next entry would not fit into the limit."""
        if self._is_off or self._is_broken:
            return self._is_broken
        return sum(path.stat().st_size for path in self._last_steps if path.exists()) + self._largest > self._limit

    def describe(self, num_values: int) -> str:
        """Say what a step of so many coordinates adds to it; an empty text where none is kept."""
        size = 4 * num_values
        if self._is_off or size * LEAST_STEPS > self._limit:
            return ""
        return (
            f"Journal of releases: {size / 1e6:.3g} MB a step in {self.folder}, until a checkpoint is saved, which is "
            f"done at {self._limit / GIGABYTE:g} GB (journal_limit). A killed run goes on from it."
        )

    def remove(self) -> None:
        """Delete the journals of all chains in the folder of the run."""
        self.close()
        self._last_steps.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the file in use."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- reading ---

    def contents(self) -> Contents:
        """Look through the files of the chain, checking every entry.

        Raises:
            DPConfigError: for something else than a file, or a file that cannot be read.
        """
        entries, torn = list[Entry](), dict[Path, int]()
        for path in sorted(self.folder.glob(f"{self.chain_id}-*{SUFFIX}")):
            end = 0
            _check_readable(path)
            for entry, after in self._entries(path):
                end = after
                entries.append(entry)
                self._largest = max(self._largest, 4 * _num_values(entry.header))
                self._last_steps[path] = entry.step
            self._last_steps.setdefault(path, -1)
            if end < path.stat().st_size:
                torn[path] = end
        return Contents(tuple(entries), torn)

    def cut_torn(self) -> None:
        """Cut off what follows the last whole entry of a file, which a kill left half-written.

        Call it when the ledger has noted the step as lost: else a later resume, of a run that wrote no further
        entries, would take the rest for an edited one.
        """
        for path, end in self.contents().torn.items():
            with open(path, "r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())

    def _entries(self, path: Path) -> Iterator[tuple[Entry, int]]:
        """Entries of a file up to the first that is not whole, and where each ends."""
        with open_regular(path) as file:
            start = 0
            while (header := self._read(file, start, None)) is not None:
                yield Entry(path, start, header), file.tell()
                start = file.tell()

    def read(self, entry: Entry) -> Released:
        """Read what was released, on the CPU.

        Raises:
            DPConfigError: if the file has changed since it was looked through.
        """
        values: dict[str, torch.Tensor] = {}
        with open_regular(entry.path) as file:
            if self._read(file, entry.start, values) != entry.header:
                raise DPConfigError(
                    f"{entry.path} was changed while it was read: step {entry.step} is not what was written. Put the "
                    "file back, or remove the folder: the run then goes on as one that kept no journal."
                )
        return Released(values)

    def _read(self, file: BinaryIO, start: int, values: dict[str, torch.Tensor] | None) -> dict[str, Any] | None:
        """Header of the entry that begins there, if it is whole; its tensors are put into `values`."""
        file.seek(start)
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            return None
        magic, length = _PREFIX.unpack(prefix)
        body = file.read(length) if magic == MAGIC and length <= LONGEST_HEADER else b""
        try:
            header = json.loads(body)
            shapes = [(str(name), tuple(shape)) for name, shape in header["tensors"]]
            is_entry = type(header["step"]) is int and header["kind"] in (STEP, OPENING, BASE)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not is_entry or not all(map(_is_shape, (shape for _, shape in shapes))):
            return None
        remaining = os.fstat(file.fileno()).st_size - file.tell()
        if 4 * _num_values(header) + CHECKSUM_BYTES > remaining:
            return None
        checksum = hashlib.sha256(prefix + body)
        for name, shape in shapes:
            content = bytearray(4 * math.prod(shape))
            file.readinto(content)  # type: ignore[attr-defined]
            checksum.update(content)
            if values is not None:
                flat = torch.frombuffer(content, dtype=torch.float32) if content else torch.empty(0)
                values[name] = flat.view(shape)
        is_whole = checksum.digest() == file.read(CHECKSUM_BYTES)
        return header if is_whole and header.get("chain") == self.chain_id else None


def _check_readable(path: Path) -> None:
    """Refuse what is not a file of this user: whether it held a release cannot be told, and a link leads elsewhere."""
    if path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK):
        raise DPConfigError(
            f"{path} is not a regular file that can be read, and the journal of releases of this run was there. Put "
            "the file back (its owner can allow it: chmod u+r), or remove it: what it held was paid for and is lost."
        )


def _is_shape(sizes: tuple[Any, ...]) -> bool:
    """Whether torch makes a tensor of it."""
    return all(type(size) is int and size >= 0 for size in sizes) and math.prod(max(1, size) for size in sizes) < 2**63


def _num_values(header: Mapping[str, Any]) -> int:
    return sum(math.prod(shape) for _, shape in header["tensors"])


def _bytes_of(value: torch.Tensor) -> Any:
    """The values as a buffer of bytes, little-endian; no copy of what lies on the CPU."""
    assert value.dtype == torch.float32, value.dtype
    return value.detach().contiguous().cpu().numpy().reshape(-1).astype("<f4", copy=False).data.cast("B")


def _size_of(values: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the values in an entry."""
    return 4 * sum(value.numel() for value in values.values())
