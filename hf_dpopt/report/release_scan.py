"""Scan of a folder before it is saved, pushed or copied: keys of the run, and files that no private run writes."""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import is_secret_key

# torch's generator states (they replay dropout), key files, and the folder of ledgers and keys itself.
FORBIDDEN_NAMES = ("rng_state*.pth", "*.key")
# Files that the Trainer and this package write and that a push may take, below output_dir or a checkpoint in it.
# Files of tokenizers and a model's own code are named by what `save_pretrained` writes.
ALLOWED_NAMES = (
    "README.md", "LICENSE*", ".gitattributes", ".gitignore", "config.json", "generation_config.json",
    "model.safetensors*", "model-*.safetensors", "pytorch_model*.bin*", "training_args.bin",
    "trainer_state.json", "*_results.json", "adapter_config.json", "adapter_model.*",
    "privacy/ledger.jsonl", "privacy/ledger.jsonl.lock", "privacy/report.json",
    "privacy/head.json", "privacy/audit.json", "privacy/statement.md", "privacy/*.png", "privacy/*.svg", "tuning.json",
    "runs/*events.out.tfevents.*", "privacy_ledger.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt",
    "released_state*", "pytorch_model_fsdp_*/*",
)  # fmt: skip
RESULTS = ("trainer_state.json", "*_results.json")  # where the stock Trainer writes un-noised values
IN_CHECKPOINT = re.compile(r"(?:checkpoint-\d+|last-checkpoint)/")
SECRET, LINK, UNCHECKED = "secret", "link", "unchecked"  # kinds of findings
MIN_SECRET_BYTES = 16  # a shorter secret would be found by chance
WINDOW = 2**24  # bytes of a file that are held at once
EDGE = 2**20  # bytes at each end of a larger file that are read at a save


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in ``path`` (relative to the scanned folder) that must not be published, and the fix.

    Attributes:
        path: file or folder.
        what: what is wrong with it.
        fix: what to do about it.
        kind: `SECRET`; `LINK` for a link, which an upload follows; `UNCHECKED` for what could not be read.
    """

    path: str
    what: str
    fix: str
    kind: str = SECRET

    def __str__(self) -> str:
        return f"{self.path}: {self.what} ({self.fix})"


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


def scan_for_secrets(
    folder: str | os.PathLike[str],
    secrets: Sequence[bytes] = (),
    *,
    allowed: Sequence[str] | None = None,
    unpublished: Sequence[str] = (),
    reads_everything: bool = True,
) -> list[Finding]:
    """Find what a private run must not publish.

    Formal guarantee: a secret that a file holds as consecutive bytes, in hexadecimal or in base64 is found. Files of
    another name than `allowed` are findings. Not found is a secret in any other form: compressed, as a list of
    numbers, in parts.

    Args:
        folder: folder that is about to be saved, pushed or copied.
        secrets: keys and other byte strings that must not occur; each at least 16 bytes.
        allowed: patterns (`fnmatch`) of the paths that may be published, below the folder or a checkpoint in it; None
            for all but `FORBIDDEN_NAMES`.
        unpublished: names of folders directly below `folder` that no upload takes; they are not read.
        reads_everything: False reads of files above `WINDOW` bytes the two ends only.

    Returns:
        The findings, ordered by path; an empty list for a clean folder.

    Raises:
        DPConfigError: if there is no such folder, or a secret is too short.
    """
    root, needles = Path(folder), Needles(secrets)
    if not root.is_dir():
        raise DPConfigError(f"{root} is not a folder, so there is nothing to scan. Give the output_dir of a run.")
    found: list[Finding] = []
    for path, problem in _walk(root, unpublished):
        name = path.relative_to(root).as_posix()
        printable = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in _decoded(name))
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in FORBIDDEN_NAMES):
            found.append(Finding(printable, "a name that belongs to private state", "move it out of the folder"))
        elif problem is not None:
            found.append(dataclasses.replace(problem, path=printable))
        elif not path.is_dir():
            if allowed is not None and not _is_allowed(name, allowed):
                found.append(Finding(printable, "no file that a private run writes", "move it out of the folder"))
            try:
                found += _in_file(path, printable, needles, reads_everything)
            except OSError as error:
                found.append(_unreadable(printable, error))
    return sorted(found, key=lambda finding: (finding.path, finding.what))


def _walk(root: Path, unpublished: Sequence[str]) -> Iterator[tuple[Path, Finding | None]]:
    """Yield what is below a folder, and what is wrong with it; no link is followed."""
    unread: list[OSError] = []
    for parent, folders, files in os.walk(root, onerror=unread.append):
        if Path(parent) == root:
            folders[:] = [name for name in folders if name not in unpublished]
        for name in sorted({*folders, *files}):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                yield path, Finding("", "a link, which an upload would follow", "replace it by a copy", LINK)
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield path, Finding("", "neither a file nor a folder (a pipe, socket or device)", "delete it")
            else:
                yield path, None
    for error in unread:
        yield Path(error.filename), _unreadable("", error)


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    name = IN_CHECKPOINT.sub("", name, count=1) if IN_CHECKPOINT.match(name) else name
    adapter = name.partition("/")[2]  # further adapters have a folder each
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed) or (
        adapter in ("adapter_config.json", "README.md") or fnmatch.fnmatchcase(adapter, "adapter_model.*")
    )


def _in_file(path: Path, name: str, needles: Needles, reads_everything: bool) -> Iterator[Finding]:
    """Findings in the content of a file."""
    spellings: set[str] = set()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start, length in _windows(size, needles.longest, reads_everything):
            file.seek(start)
            spellings |= needles.find(file.read(length))
    if spellings:
        spelled = ", ".join(sorted(spellings))
        yield Finding(name, f"a secret key, as {spelled}", "delete the file and start the run again with new keys")
    if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in RESULTS):
        try:
            unnoised = sorted(set(_unnoised(json.loads(path.read_bytes()))))
        except (ValueError, RecursionError) as error:
            yield _unreadable(name, error)
        else:
            for key in unnoised:
                yield Finding(name, f"un-noised value of {key}", "remove the entry")


def _windows(size: int, overlap: int, reads_everything: bool) -> Iterator[tuple[int, int]]:
    """Yield start and length of each part of a file to search."""
    if size > WINDOW and not reads_everything:
        yield from ((0, EDGE), (size - EDGE, EDGE))
        return
    for start in range(0, max(1, size), WINDOW):
        yield start, WINDOW + overlap


def _unnoised(value: Any) -> Iterator[str]:
    """Keys under which a number of the training data stands; 0 and None stand for what was not released."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if is_secret_key(str(key)) and isinstance(item, (int, float)) and item:
                yield str(key)
            yield from _unnoised(item)
    elif isinstance(value, list):
        for item in value:
            yield from _unnoised(item)


def _unreadable(name: str, error: BaseException) -> Finding:
    what = f"unreadable, so not checked ({type(error).__name__})"
    return Finding(name, what, "delete it or write it again", UNCHECKED)


def _decoded(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Needles:
    """Secrets of a run, and how they may be spelled.

    A search compares one word of 32 bits per stride S with the words of all needles: a needle of L bytes covers a
    multiple of S <= L - 3 and the whole word that begins there, wherever it is. Needles with a word that is found are
    looked for as a whole.

    Args:
        secrets: root keys and keys derived from them.

    Raises:
        DPConfigError: if a secret is too short to be told from chance.
    """

    def __init__(self, secrets: Sequence[bytes]):
        if any(len(secret) < MIN_SECRET_BYTES for secret in secrets):
            raise DPConfigError(
                f"A secret of {min(map(len, secrets))} bytes would also be found by chance. Use secrets of "
                f"{MIN_SECRET_BYTES} bytes or more; keys have 32."
            )
        self._kinds = {text: kind for secret in secrets for kind, text in _spellings(bytes(secret))}
        self.longest = max(map(len, self._kinds), default=0)
        shortest = min(map(len, self._kinds), default=MIN_SECRET_BYTES)
        self._stride = (shortest - 3) // 4 * 4
        found = {text[j : j + 4] for text in self._kinds for j in range(self._stride)}
        self._words = np.sort(np.frombuffer(b"".join(found), dtype="<u4"))

    def find(self, data: bytes) -> set[str]:
        """Return the spellings in which a secret occurs."""
        words = np.frombuffer(data, dtype="<u4", count=len(data) // 4)[:: self._stride // 4]
        places = np.searchsorted(self._words, words)
        hits = words[self._words.take(places, mode="clip") == words] if self._kinds else words[:0]
        seen = {word.tobytes() for word in np.unique(hits)}
        return {kind for text, kind in self._kinds.items() if any(word in text for word in seen) and text in data}


def _spellings(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """The secret as it is, in hexadecimal, and in base64 at any offset of a longer text."""
    yield "raw bytes", secret
    yield from (("hexadecimal", secret.hex().encode()), ("hexadecimal", secret.hex().upper().encode()))
    for offset in range(3):
        # Inside a longer base64 text the first and last characters also hold bits of the neighbours: leave them out.
        text = base64.b64encode(bytes(offset) + secret + bytes(2))
        inner = text[-(-8 * offset // 6) : 8 * (offset + len(secret)) // 6]
        yield from (("base64", inner), ("base64", inner.replace(b"+", b"-").replace(b"/", b"_")))
