"""Scan of a folder, before it is saved or pushed, for anything the privacy statement calls secret."""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import io
import json
import os
import pickle
import pickletools
import re
import string
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import SECRET_LOG_KEYS, SECRET_LOG_PREFIX, is_secret_key
from hf_dpopt.report.model_card import strip_training_losses

CHUNK_BYTES = 8 * 2**20
RAW = "raw bytes"
# A shorter secret would be found by chance: 16 bytes at a given place match with probability 2**-128.
MIN_SECRET_BYTES = 16

# torch's generator states (they replay dropout), key files, and the folder of ledgers and keys itself.
FORBIDDEN_NAMES = ("rng_state*.pth", "*.key", "*.noise", "*.dp_private", "noise_buffer*")

# Where the stock Trainer writes SECRET_LOG_KEYS. 0 and None are placeholders; any other number is data.
RESULT_FILES = ("trainer_state.json", "*_results.json")
TOKEN_FIELDS = frozenset({"hub_token", "push_to_hub_token"})
# Maps the characters that occur in spellings as text to 1 and all other bytes to 0.
_IS_TEXT = bytes(chr(byte) in string.ascii_letters + string.digits + "+/-_, " for byte in range(256))
_EVENT_TAG = re.compile(
    rb"train/(" + "|".join([*SECRET_LOG_KEYS, SECRET_LOG_PREFIX + r"\w+"]).encode() + rb")\x15(.{4})", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in ``path`` (relative to the scanned folder) that must not be published, and the fix."""

    path: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what} ({self.fix})"


def scan_for_secrets(
    folder: str | os.PathLike[str],
    secrets: Sequence[bytes] = (),
    forbidden_names: Sequence[str] = FORBIDDEN_NAMES,
) -> list[Finding]:
    """Find everything under ``folder`` that would break the privacy statement, or leak a credential, if published.

    Formal guarantee: a secret that occurs in some file as consecutive raw bytes, as hexadecimal digits of one case, as
    base64 (standard or URL alphabet, at any offset, without line breaks inside) or as a JSON list of byte values is
    found. Compressed or encrypted copies are not, nor is what was derived from the secret. Nothing is unpickled.

    Args:
        folder: folder that is about to be saved or pushed; links are followed.
        secrets: noise keys, sampling keys and other byte strings that must not occur; each at least 16 bytes.
        forbidden_names: patterns (`fnmatch`) that no file or folder name may match.

    Returns:
        The findings, ordered by path; an empty list for a clean folder.

    Raises:
        DPConfigError: if there is no such folder, or a secret is too short to be told from chance.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DPConfigError(f"{root} is not a folder, so there is nothing to scan. Give the output_dir of a run.")
    for secret in secrets:
        if len(secret) < MIN_SECRET_BYTES:
            raise DPConfigError(
                f"A secret of {len(secret)} bytes would also be found by chance. Use secrets of {MIN_SECRET_BYTES} "
                "bytes or more; keys have 32."
            )
    needles = [needle for secret in secrets for needle in _spellings(secret)]
    findings: list[Finding] = []
    for path, is_folder in _walk(root):
        name = path.relative_to(root).as_posix()
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in forbidden_names):
            findings.append(Finding(name, "a name that belongs to private state", "move it out of the folder"))
        if not is_folder and path.is_file():
            findings += _scan_file(path, name, needles)
    return sorted(findings, key=lambda finding: (finding.path, finding.what))


def refuse_release(findings: Sequence[Finding]) -> None:
    """Raise if there is any finding.

    Raises:
        DPConfigError: naming every file, what is in it, and the way out.
    """
    if findings:
        listing = "; ".join(map(str, findings))
        raise DPConfigError(
            f"Nothing was published, {len(findings)} finding(s) contradict the privacy statement: {listing}. "
            "A release may hold noised values only. Fix each as said, then save or push again."
        )


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Every folder (True) and file (False) below ``root``; a folder reached twice through links is read once."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from ((Path(parent, name), True) for name in sorted(folders))
        yield from ((Path(parent, name), False) for name in sorted(files))


def _scan_file(path: Path, name: str, needles: Sequence[tuple[str, bytes]]) -> Iterator[Finding]:
    """Findings inside one file."""
    try:
        for spelling in _occurring(path, needles):
            yield Finding(
                name, f"a secret key, as {spelling}", "delete the file and start the run again with new keys"
            )
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in RESULT_FILES):
            for where, value in _unnoised(json.loads(path.read_bytes()), ""):
                yield Finding(name, f"un-noised value {where}={value:g}", "remove the entry")
        elif path.name.startswith("events.out.tfevents"):
            for tag in _unnoised_events(path):
                yield Finding(name, f"un-noised values of {tag}", "delete the file")
        elif path.name == "training_args.bin":
            for field in _pickled_tokens(path):
                yield Finding(name, f"a credential in {field}", "set it to None and save again; revoke the token")
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8", errors="replace")
            if strip_training_losses(text) != text:
                yield Finding(name, "un-noised training values in its tables", "rewrite it with strip_training_losses")
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        yield Finding(name, f"unreadable, so not checked ({type(error).__name__})", "delete it or write it again")


def _spellings(secret: bytes) -> list[tuple[str, bytes]]:
    """The secret in the usual encodings, each with its name."""
    spellings = [
        (RAW, secret),
        ("hexadecimal", secret.hex().encode()),
        ("hexadecimal", secret.hex().upper().encode()),
        ("a list of bytes", ",".join(map(str, secret)).encode()),
        ("a list of bytes", ", ".join(map(str, secret)).encode()),
    ]
    for offset in range(3):
        # Inside a longer base64 text the first and last characters also hold bits of the neighbours: leave them out.
        text = base64.b64encode(bytes(offset) + secret + bytes(2))
        inner = text[-(-8 * offset // 6) : 8 * (offset + len(secret)) // 6]
        spellings += [("base64", inner), ("base64", inner.replace(b"+", b"-").replace(b"/", b"_"))]
    return list(dict.fromkeys(spellings))


def _occurring(path: Path, needles: Sequence[tuple[str, bytes]]) -> list[str]:
    """Names of the spellings that occur in the file, read in chunks that overlap by the longest spelling."""
    if not needles:
        return []
    overlap = max(len(needle) for _, needle in needles) - 1
    text = b"\1" * min(len(needle) for _, needle in needles)
    found: dict[str, None] = {}
    with path.open("rb") as file:
        window = b""
        while chunk := file.read(CHUNK_BYTES):
            window = window[-overlap:] + chunk
            # Weights hardly ever look like text for as long as a spelling is: most of the search is saved there.
            as_text = text in window.translate(_IS_TEXT)
            found.update((name, None) for name, needle in needles if (as_text or name == RAW) and needle in window)
    return list(found)


def _unnoised(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Places in a JSON value with a number that the Trainer computed from un-noised data."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            place = f"{where}.{key}" if where else key
            if isinstance(item, (int, float)) and item and is_secret_key(key):
                yield place, float(item)
            yield from _unnoised(item, place)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unnoised(item, f"{where}[{index}]")


def _unnoised_events(path: Path) -> list[str]:
    """Scalars of a TensorBoard file: in the protobuf of a summary value, its float (field 2) follows the tag."""
    data = path.read_bytes()
    tags = {tag.decode() for tag, number in _EVENT_TAG.findall(data) if struct.unpack("<f", number)[0] != 0}
    return sorted(f"train/{tag}" for tag in tags)


def _pickled_tokens(path: Path) -> list[str]:
    """Fields with a credential in a `torch.save` file, found in the opcodes: unpickling a file would run its code."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    else:
        pickles = [path.read_bytes()]
    fields: set[str] = set()
    for data in pickles:
        previous: Any = None
        for value in _pickled_values(data):
            if previous in TOKEN_FIELDS and value not in (None, ""):
                fields.add(previous)
            previous = value if isinstance(value, str) else None
    return sorted(fields)


def _pickled_values(data: bytes) -> Iterator[Any]:
    """The strings and Nones of the pickles in order, memo references resolved; ``...`` for every other value."""
    stream = io.BytesIO(data)  # torch's format without zip is several pickles in a row
    while stream.tell() < len(data):
        memo: dict[int, Any] = {}
        latest: Any = ...
        argument: Any  # by opcode: a string, a number or nothing
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "FRAME":  # may stand between a key and its value
                continue
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if opcode.name == "MEMOIZE" else int(argument)] = latest
                continue
            if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                latest = memo.get(int(argument), ...)
            elif opcode.name == "NONE":
                latest = None
            else:
                latest = argument if isinstance(argument, str) else ...
            yield latest
