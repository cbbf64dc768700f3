"""Scan of a folder, before it is saved or pushed, for anything the privacy statement calls secret."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report.scan import values
from hf_dpopt.report.scan.containers import Leaf, Member, Numbers, Opener, Problem, Values
from hf_dpopt.report.scan.credentials import find_credentials, is_credential
from hf_dpopt.report.scan.finding import LINK_OUT, SECRET, UNCHECKED, Finding, refuse_release
from hf_dpopt.report.scan.folder import LEADS_OUT, walk_folder
from hf_dpopt.report.scan.needles import LIST, MIN_SECRET_BYTES, RAW, Needles, number_lists
from hf_dpopt.report.scan.pickles import walk
from hf_dpopt.report.scan.sources import WINDOW, FileSource
from hf_dpopt.report.scan.training_text import Block, FileTexts, TrainingRecords

__all__ = [
    "LINK_OUT", "SECRET", "UNCHECKED", "Block", "Finding", "ReleaseScan", "TrainingRecords", "refuse_release",
    "scan_for_secrets",
]  # fmt: skip

# torch's generator states (they replay dropout), key files, and the folder of ledgers and keys itself.
FORBIDDEN_NAMES = ("rng_state*.pth", "*.key", "*.noise", "*.dp_private", "noise_buffer*")

WHOLE = 16 * 2**20  # bytes of a file that are all read at a save, too
EDGE = 2**12  # bytes at each end of a tensor of floats that are read at a save, of larger files
SMALL_FLOATS = 2**16  # bytes of a tensor of floats that may hold the bytes of a key one by one
SMALL_BYTES = 8 * 2**20  # bytes of a tensor of bytes that may hold a text
MANY_IDS = 2**24  # whole numbers of one tensor that are compared with token ids
REMEMBERED = 32 * 2**20  # bytes of a file that is not looked at again while its content is the same
OVERLAP = 4096  # bytes that neighbouring windows of a text share: no spelling, token or phrase is longer
TEXT_RUN = 16  # printable characters in a row that make text in a binary file
_PRINTABLE = re.compile(rb"[\t\n\r\x20-\x7e]{%d,}" % TEXT_RUN)
_IS_PRINTABLE = bytes(byte in b"\t\n\r" or 0x20 <= byte <= 0x7E for byte in range(256))
_GAP = bytes(8)  # between ends of tensors
_ANY_RUN = b"\1" * TEXT_RUN


def scan_for_secrets(
    folder: str | os.PathLike[str],
    secrets: Sequence[bytes] = (),
    forbidden_names: Sequence[str] = FORBIDDEN_NAMES,
    training: TrainingRecords | None = None,
) -> list[Finding]:
    """Find everything under ``folder`` that would break the privacy statement, or leak a credential, if published.

    Formal guarantee: a secret that some file holds as consecutive bytes is found. So is one that a text, a pickle, or
    a tensor of whole numbers spells out: in hexadecimal (with or without separators), base64, base32, one decimal
    number, a list of bytes or words on one line or on many, escaped bytes. Safetensors, torch files, pickles, numpy
    arrays, zip, gzip, bzip2, xz and zlib are looked into, four deep, without executing anything; what is encrypted,
    damaged or too large to be opened is a finding. Not found is what was derived from a secret: parts of it, sums,
    roundings, other encodings. docs/reliability.md has the list.

    Args:
        folder: folder that is about to be saved or pushed. A link that leads out of it is a finding, and not followed.
        secrets: noise keys, sampling keys and other byte strings that must not occur; each at least 16 bytes.
        forbidden_names: patterns (`fnmatch`) that no file or folder name may match.
        training: the training records, to be compared with text and token ids in the files; None for no comparison.

    Returns:
        The findings, ordered by path; an empty list for a clean folder.

    Raises:
        DPConfigError: if there is no such folder, or a secret is too short to be told from chance.
    """
    return ReleaseScan(secrets, forbidden_names, training).findings(folder)


class ReleaseScan:
    """Scan for the same secrets in folder after folder; files seen before, and clean, are not searched again.

    Args:
        secrets, forbidden_names, training: the arguments of `scan_for_secrets`.
        is_thorough: whether every byte is read, as before a push. Else, in files above `WHOLE` bytes, of tensors of
            floats only the two ends are: a copy of a noise buffer is found by its beginning, and a key is no tensor of
            floats. So the scan of a save takes no longer for larger tensors.
        unpublished: names of folders directly below the scanned one that no upload takes; they are not looked into.
        earlier: a scan with the same training records and other secrets (of a noise state there is a new marker after
            every step). Texts that were clean then are searched for the secrets only: neither compared with training
            records again nor searched for credentials.
    """

    def __init__(
        self,
        secrets: Sequence[bytes] = (),
        forbidden_names: Sequence[str] = FORBIDDEN_NAMES,
        training: TrainingRecords | None = None,
        is_thorough: bool = True,
        unpublished: Sequence[str] = (),
        earlier: ReleaseScan | None = None,
    ):
        self.needles, self.is_thorough = Needles(secrets), is_thorough
        self._forbidden, self.training = tuple(forbidden_names), training
        self._unpublished = frozenset(unpublished)
        self._users = _pattern_of_users(training.users if training is not None else ())
        self._clean: set[bytes] = set()  # digests of texts
        self._compared: set[bytes] = earlier._clean | earlier._compared if earlier is not None else set()
        self._unsure: set[bytes] = set()

    def findings(self, folder: str | os.PathLike[str]) -> list[Finding]:
        """Find what must not leave a folder; see `scan_for_secrets`.

        Raises:
            DPConfigError: if there is no such folder.
        """
        root = Path(folder)
        if not root.is_dir():
            raise DPConfigError(f"{root} is not a folder, so there is nothing to scan. Give the output_dir of a run.")
        found: set[Finding] = set()
        texts = FileTexts()
        self._unsure = set()
        for path, name, problem in walk_folder(root):
            if name.partition("/")[0] in self._unpublished:
                continue
            if self._is_forbidden(path.name) or self._is_forbidden(name.rpartition("/")[2]):
                found.add(Finding(name, "a name that belongs to private state", "move it out of the folder"))
            if problem:
                kind = LINK_OUT if problem == LEADS_OUT else UNCHECKED if "not checked" in problem else SECRET
                found.add(Finding(name, problem, "replace it by a copy of what is meant, or delete it", kind))
            elif path.is_file():
                found |= self._scan_file(path, name, texts)
        if self.training is not None and texts:
            matches = texts.compare(self.training)
            found |= {Finding(name, what, "take it out of the file") for name, what in matches.items()}
        if all(finding.kind == LINK_OUT for finding in found):  # a link says nothing about the files
            self._clean |= self._unsure
        return sorted(found, key=lambda finding: (finding.path, finding.what))

    def _is_forbidden(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self._forbidden)

    def is_known(self, content: bytes) -> bool:
        """Whether this content was looked at before, in a folder that was clean; if this one is, it will be known."""
        digest = _digest(content)
        self._unsure.add(digest)
        return digest in self._clean

    def was_compared(self, text: bytes) -> bool:
        """Whether an earlier scan found nothing in this text."""
        return bool(self._compared) and _digest(text) in self._compared

    def _scan_file(self, path: Path, name: str, texts: FileTexts) -> set[Finding]:
        """Findings inside one file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return {_unreadable(name, error)}
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {Finding(name, "no regular file", "delete it")}
            source = FileSource(descriptor)
            # How a file is read depends on its name, too. Tensors differ from save to save: they are not remembered.
            if source.size <= REMEMBERED and b"\0" not in source.read(0, 512):
                if self.is_known(os.fsencode(path.name) + b"\0" + source.read(0, source.size)):
                    return set()
            return set(_FileScan(self, name, texts).scan(source, path.name))
        except Exception as error:  # whatever a file is made of: what was not looked at is not taken for clean
            return {_unreadable(name, error)}
        finally:
            os.close(descriptor)

    def names_users(self, text: bytes) -> bool:
        """Whether a text holds two ids of users, or more."""
        return self._users is not None and len({match.group() for match in self._users.finditer(text)}) >= 2


class _FileScan:
    """Search of one file, container by container; what is found is told once per kind."""

    def __init__(self, of: ReleaseScan, name: str, texts: FileTexts):
        self._of, self._name, self._texts = of, name, texts
        self._spellings: set[str] = set()
        self._credentials: set[str] = set()
        self._by_part = False
        self._ends = bytearray()  # of tensors, gathered: a search has a cost of its own
        self._found: list[tuple[str, str]] = []
        self._unchecked: list[str] = []
        self._unnoised: dict[str, list[tuple[str, float]]] = {}  # key -> places, values

    def scan(self, source: FileSource, file_name: str) -> Iterator[Finding]:
        self._by_part = not self._of.is_thorough and source.size > WHOLE
        if not self._by_part:
            self._search_raw(source.buffers(self._of.needles.longest + 64))
        for part in Opener().open(source, file_name):
            if isinstance(part, Leaf):
                self._leaf(part)
            elif isinstance(part, Numbers):
                self._numbers(part)
            elif isinstance(part, Values):
                self._values(part.values)
            elif isinstance(part, Member):
                self._member(part)
            elif isinstance(part, Problem):
                self._unchecked.append(f"not checked: {part.why}")
        self._search_ends()
        for what, fix in self._found:
            yield Finding(self._name, what, fix)
        for what in self._unchecked:
            yield Finding(self._name, what, "delete it or write it again", UNCHECKED)
        for (where, value), *more in self._unnoised.values():
            others = f", and {len(more)} more" if more else ""
            yield Finding(self._name, f"un-noised value {where}={value:g}{others}", "remove the entry")
        if self._spellings:
            spelled = ", ".join(sorted(self._spellings, key=lambda name: (name != RAW, name)))
            yield Finding(
                self._name, f"a secret key, as {spelled}", "delete the file and start the run again with new keys"
            )
        if self._credentials:
            kinds = ", ".join(sorted(self._credentials))
            yield Finding(self._name, f"a credential in it: {kinds}", "take it out and save again; revoke the token")

    def _search_raw(self, windows: Iterable[bytes | bytearray | memoryview]) -> None:
        needles = self._of.needles
        if needles and RAW not in self._spellings and any(needles.in_bytes(window) for window in windows):
            self._spellings.add(RAW)

    def _search_ends(self) -> None:
        self._search_raw([self._ends])
        self._ends = bytearray()

    def _member(self, member: Member) -> None:
        if self._of._is_forbidden(member.name) or (member.is_tensor and values.is_step_key(member.name)):
            self._found.append((f"{member.name!r}, a name that belongs to private state", "leave it out of the file"))

    # --- tensors ---

    def _numbers(self, part: Numbers) -> None:
        kind, source = part.dtype.kind, part.source
        if self._by_part and (kind not in "fV" or source.size <= 2 * EDGE):
            self._search_raw(source.windows(self._of.needles.longest + 64))
        elif self._by_part:
            self._ends += source.read(0, EDGE) + _GAP + source.read(source.size - EDGE, EDGE) + _GAP
            if len(self._ends) > WINDOW:
                self._search_ends()
        if kind in "iub" and part.dtype.itemsize == 1:
            if source.size <= SMALL_BYTES:
                self._leaf(Leaf("bytes", source), is_text=False)
        elif kind in "iu":
            width = part.dtype.itemsize
            for window in source.windows(overlap=self._of.needles.longest * width):
                array = np.frombuffer(window[: len(window) // width * width], part.dtype)
                self._search(array)
            if source.size <= MANY_IDS * width:
                data = source.read(0, source.size)
                self._texts.add_ids(self._name, np.frombuffer(data[: len(data) // width * width], part.dtype))
        elif kind == "f" and MIN_SECRET_BYTES * part.dtype.itemsize <= source.size <= SMALL_FLOATS:
            data = source.read(0, source.size)
            array = np.frombuffer(data[: len(data) // part.dtype.itemsize * part.dtype.itemsize], part.dtype)
            with np.errstate(all="ignore"):  # what is no whole number makes no byte of a key
                self._search(np.clip(np.nan_to_num(array), -(2.0**15), 2.0**15).astype(np.int64))

    def _search(self, array: np.ndarray) -> None:
        if self._of.needles and self._of.needles.in_numbers(array):
            self._spellings.add(LIST)

    # --- pickles ---

    def _values(self, pickled: list[object]) -> None:
        strings: list[bytes] = []
        unnoised: set[str] = set()
        for key, value in walk(pickled):
            if key and values.is_unnoised(key, value):
                unnoised.add(key)
            if isinstance(value, str):
                strings.append(value.encode("utf-8", "surrogateescape" if value.isprintable() else "replace"))
                if is_credential(key, value):
                    self._credentials.add(key)
            elif isinstance(value, (bytes, bytearray)):
                strings.append(bytes(value))
            elif isinstance(value, (list, tuple)) and len(value) >= 4:
                self._list(value)
            elif isinstance(value, int) and abs(value) >= 2**120:
                strings.append(str(abs(value)).encode())
        for key in sorted(unnoised):
            self._found.append((f"un-noised value of {key}", "take it out and save again"))
        self._search_text(b"\n".join(strings))

    def _list(self, items: Sequence[object]) -> None:
        numbers = [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
        if len(numbers) < len(items):
            return
        if all(isinstance(item, int) or item.is_integer() for item in numbers):
            numbers = [int(item) for item in numbers]
            small = all(-(2**63) <= item < 2**63 for item in numbers)
            if small or all(0 <= item < 2**64 for item in numbers):
                array = np.array(numbers, dtype=np.int64 if small else np.uint64)
                if self._of.needles and self._of.needles.in_list(array):
                    self._spellings.add(LIST)
                if small:
                    self._texts.add_ids(self._name, array)

    # --- text ---

    def _leaf(self, leaf: Leaf, is_text: bool = True) -> None:
        if leaf.source.size <= values.MAX_JSON and self._results(leaf):
            is_text = is_text and not leaf.name.endswith(".json")
        for window in leaf.source.windows(overlap=OVERLAP):
            if leaf.name.startswith("events.out.tfevents"):
                tags = sorted(set(values.in_events(window)))
                self._found += [(f"un-noised values of {tag}", "delete the file") for tag in tags]
            text = _text_of(window)
            if self._by_part or not isinstance(leaf.source, FileSource):
                self._search_raw([window])
            if not text:
                continue
            self._search_text(text)
            if leaf.name.endswith(values.LOG_SUFFIXES) and is_text:
                self._add_unnoised(values.in_log(text, leaf.name))

    def _results(self, leaf: Leaf) -> bool:
        """Look for un-noised values where the format of a file says what they are called; whether it could be read."""
        if leaf.name.endswith(".json"):
            try:
                self._add_unnoised(values.in_json(leaf.source.read(0, leaf.source.size)))
            except (ValueError, RecursionError) as error:
                if values.RESULT_FILES.fullmatch(leaf.name):
                    self._unchecked.append(f"unreadable, so not checked ({type(error).__name__})")
                return False
        elif leaf.name.endswith(values.TABLE_SUFFIXES):
            self._add_unnoised(values.in_table(leaf.source.read(0, leaf.source.size), leaf.name))
        elif leaf.name.endswith(".md"):
            if values.in_card(leaf.source.read(0, leaf.source.size).decode("utf-8", "replace")):
                self._found.append(
                    ("un-noised training values in its tables", "rewrite it with strip_training_losses")
                )
        return True

    def _add_unnoised(self, places: Iterable[tuple[str, float]]) -> None:
        for where, value in places:
            self._unnoised.setdefault(where.rpartition(".")[2], []).append((where, value))

    def _search_text(self, text: bytes) -> None:
        if self._of.is_known(text):
            return
        self._spellings |= self._of.needles.in_text(text)
        if self._of.was_compared(text):
            return
        self._credentials |= find_credentials(text)
        if self._of.names_users(text):
            self._found.append(("ids of users", "take them out of the file"))
        if self._of.training is not None:
            self._texts.add_text(self._name, text.decode("utf-8", "replace"))
            for numbers in number_lists(text):
                if numbers.dtype == np.int64:
                    self._texts.add_ids(self._name, numbers)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _unreadable(name: str, error: BaseException) -> Finding:
    why = f"unreadable, so not checked ({type(error).__name__})"
    return Finding(name, why, "delete it or write it again", UNCHECKED)


def _text_of(window: bytes) -> bytes:
    """The text of a window: all of it, decoded from UTF-16, or the printable runs of binary data."""
    if window[:2] in (b"\xff\xfe", b"\xfe\xff") and len(window) % 2 == 0:
        window += b"\n" + window.decode("utf-16", "replace").encode("utf-8", "replace")
    if b"\0" not in window:
        return window
    runs: list[bytes] = []
    mask = window.translate(_IS_PRINTABLE)
    for start in range(0, len(window), 2**16):  # most blocks of weights have no run of that length
        if _ANY_RUN in mask[max(0, start - TEXT_RUN) : start + 2**16 + TEXT_RUN]:
            runs += _PRINTABLE.findall(window[max(0, start - OVERLAP) : start + 2**16 + OVERLAP])
    return b"\n".join(dict.fromkeys(runs))


def _pattern_of_users(users: Sequence[str]) -> re.Pattern[bytes] | None:
    """A pattern for ids of users that no other word is: five characters or more, and not letters alone."""
    telling = [user for user in users if len(user) >= 5 and not user.isalpha()]
    if not telling:
        return None
    alternatives = b"|".join(re.escape(user.encode()) for user in sorted(telling, key=len, reverse=True))
    return re.compile(rb"(?<![\w.-])(?:" + alternatives + rb")(?![\w-])")
