"""Search for known secrets in bytes, in text and in numbers, whatever their number and at one pass over the data."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import numpy as np

from hf_dpopt.common.errors import DPConfigError

# A shorter secret would be found by chance: 16 bytes at a given place match with probability 2**-128.
MIN_SECRET_BYTES = 16
RAW, HEXADECIMAL, BASE64, BASE32 = "raw bytes", "hexadecimal", "base64", "base32"
LIST, ESCAPED, DECIMAL = "a list of numbers", "escaped bytes", "a decimal number"

MAX_CANDIDATES = 10_000  # places of one window looked at one by one; data that has more is searched needle by needle
_NUMBER = rb"-?\d{1,20}(?:\.0*)?(?![\d.])"
# Numbers between commas, spaces, line ends or bars, as in JSON (indented or not), Python, YAML's flow style or CSV.
_RUN = re.compile(_NUMBER + rb"(?:(?:\s*[,;|]\s*|\s+-?\s*)" + _NUMBER + rb"){3,}")
_FRACTION = re.compile(rb"\.0*")
_SPLIT = re.compile(rb"[\s,;|]+")
_HEX = re.compile(rb"(?:(?:0x|\\x|%)?[0-9A-Fa-f]{2}[\s:,_-]{0,2}){16,}[0-9A-Fa-f]?")
_HEX_PREFIX = re.compile(rb"0x|[^0-9A-Fa-f]")
_LONG_NUMBER = re.compile(rb"\d{36,}")
_SPACES = b" \t\r\n\v\f"

# Escapes of Python and JSON that stand for one byte; other backslashes stay.
_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|u00([0-9A-Fa-f]{2})|([0-3][0-7]{2})|([abtnvfr0'\"/\\]))")
_LETTERS = dict(zip(b"abtnvfr0'\"/\\", b"\a\b\t\n\v\f\r\0'\"/\\", strict=True))


class Needles:
    """Secrets of a run, looked for in everything a file holds.

    Formal guarantee: a secret that occurs as consecutive bytes, in either order, is found by `in_bytes`; one that is
    spelled out as a whole, as `in_text` lists it, is found there.

    Args:
        secrets: keys, marks and beginnings of noise buffers; 16 bytes each, or more.

    Raises:
        DPConfigError: if a secret is too short to be told from chance.
    """

    def __init__(self, secrets: Sequence[bytes]):
        for secret in secrets:
            if len(secret) < MIN_SECRET_BYTES:
                raise DPConfigError(
                    f"A secret of {len(secret)} bytes would also be found by chance. Use secrets of "
                    f"{MIN_SECRET_BYTES} bytes or more; keys have 32."
                )
        self.secrets = list(dict.fromkeys(bytes(secret) for secret in secrets))
        self.raw = list(dict.fromkeys(s for secret in self.secrets for s in (secret, secret[::-1])))
        self._numbers = {int.from_bytes(secret, order) for secret in self.secrets for order in ("big", "little")}
        self._coded = [(name, text) for secret in self.secrets for name, text in _coded(secret)]
        self.longest = max(map(len, self.raw), default=0)
        self._filter = _WordFilter(self.raw) if self.raw else None

    def __bool__(self) -> bool:
        return bool(self.secrets)

    def in_bytes(self, data: bytes | bytearray | memoryview) -> bool:
        """Whether a secret occurs as it is, at any place, or with its bytes in reverse order."""
        if self._filter is None or len(data) < MIN_SECRET_BYTES:
            return False
        return self._filter.finds(data)

    def in_numbers(self, values: np.ndarray) -> bool:
        """Whether the low bytes of consecutive whole numbers, (n,), spell a secret."""
        return self.in_bytes(np.bitwise_and(values, 0xFF).astype(np.uint8).tobytes())

    def in_text(self, data: bytes) -> set[str]:
        """Spellings that occur in a text.

        Raw bytes, hexadecimal digits (either case, with colons, spaces, commas, dashes or "0x" between bytes), base64
        (either alphabet, any offset, broken into lines), base32, a list of numbers (bytes, signed bytes, words of 32
        or 64 bits), bytes escaped as in Python or JSON, a decimal number.
        """
        if not self.secrets:
            return set()
        found = {RAW} if self.in_bytes(data) else set()
        if self._in_lists(data):
            found.add(LIST)
        if any(self._in_hexadecimal(match.group()) for match in _HEX.finditer(data)):
            found.add(HEXADECIMAL)
        joined = data.translate(None, _SPACES).replace(b"\\n", b"").replace(b"\\r", b"")
        found |= {name for name, text in self._coded if text in joined}
        if any(int(match.group()) in self._numbers for match in _LONG_NUMBER.finditer(data) if _is_short(match)):
            found.add(DECIMAL)
        if self._in_escapes(data):
            found.add(ESCAPED)
        return found

    def _in_lists(self, data: bytes) -> bool:
        return any(self.in_list(values) for values in number_lists(data))

    def in_list(self, values: np.ndarray) -> bool:
        """Whether the numbers of a list, int64 or uint64, are bytes of a secret, or words of it."""
        if self.in_numbers(values):
            return True
        unsigned = values.astype(np.uint64)
        return any(
            self.in_bytes(unsigned.astype(kind).tobytes()) for kind in ("<u4", ">u4", "<u8", ">u8") if len(values) >= 2
        )

    def _in_hexadecimal(self, text: bytes) -> bool:
        digits = _HEX_PREFIX.sub(b"", text)
        return any(
            self.in_bytes(bytes.fromhex(digits[start : start + (len(digits) - start) // 2 * 2].decode()))
            for start in (0, 1)
        )

    def _in_escapes(self, data: bytes) -> bool:
        if data.count(b"\\") >= 4:
            if self.in_bytes(_ESCAPE.sub(_unescaped, data)):
                return True
        if b"\xc2" in data or b"\xc3" in data:  # bytes above 127 taken for letters, and these written as UTF-8
            return self.in_bytes(data.decode("utf-8", "replace").encode("latin-1", "replace"))
        return False


class _WordFilter:
    """Search by one word of 32 bits per stride: wherever a needle lies, one of its words is among them.

    A needle of L bytes holds every place at a multiple of S <= L - 3 with the whole word that begins there. So a pass
    reads one word of S / 4, and the number of needles hardly matters.
    """

    def __init__(self, needles: Sequence[bytes]):
        self._needles = needles
        self.stride = (min(map(len, needles)) - 3) // 4 * 4
        places = [(n, j) for n in range(len(needles)) for j in range(self.stride)]
        words = np.array([int.from_bytes(needles[n][j : j + 4], "little") for n, j in places], dtype=np.uint32)
        order = np.argsort(words, kind="stable")
        self._words, self._places = words[order], [places[i] for i in order]
        self._low = np.zeros(2**16, dtype=bool)
        self._low[words & 0xFFFF] = True

    def finds(self, data: bytes | bytearray | memoryview) -> bool:
        view = memoryview(data)
        count = (len(view) - 4) // self.stride + 1
        if count <= 0:
            return False
        half = np.frombuffer(view[: len(view) // 2 * 2], dtype="<u2")
        positions = np.flatnonzero(self._low.take(half[:: self.stride // 2][:count])) * self.stride
        if not len(positions):
            return False
        words = half[positions // 2].astype(np.uint32) | half[positions // 2 + 1].astype(np.uint32) << 16
        first, last = (np.searchsorted(self._words, words, side=side) for side in ("left", "right"))
        hits = np.flatnonzero(first < last)
        if len(hits) > MAX_CANDIDATES:  # zeros, or another pattern that a needle shares
            content = bytes(view)
            return any(needle in content for needle in self._needles)
        return any(
            self._is_at(view, int(positions[hit]), place)
            for hit in hits
            for place in self._places[first[hit] : last[hit]]
        )

    def _is_at(self, view: memoryview, position: int, place: tuple[int, int]) -> bool:
        needle, start = self._needles[place[0]], position - place[1]
        return start >= 0 and view[start : start + len(needle)] == needle


def number_lists(data: bytes) -> list[np.ndarray]:
    """The lists of whole numbers in a text, four or more in a row, as int64 or uint64; larger numbers are left out."""
    found = []
    for match in _RUN.finditer(data):
        parts = _SPLIT.split(_FRACTION.sub(b"", match.group()))
        try:
            found.append(np.array(parts).astype(np.int64))
        except (ValueError, OverflowError):
            numbers = [int(part) for part in parts if part.strip(b"-")]
            if all(0 <= number < 2**64 for number in numbers):
                found.append(np.array(numbers, dtype=np.uint64))
    return found


def _unescaped(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal = match.group(1) or match.group(2), match.group(3)
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    return bytes([int(octal, 8)]) if octal else bytes([_LETTERS[match.group(4)[0]]])


def _is_short(match: re.Match[bytes]) -> bool:
    return match.end() - match.start() <= 400  # a secret of 160 bytes


def _coded(secret: bytes) -> list[tuple[str, bytes]]:
    """Spellings whose characters do not stand for one byte each."""
    found = [(BASE32, base64.b32encode(secret)[: len(secret) * 8 // 5])]
    for offset in range(3):
        # Inside a longer base64 text the first and last characters also hold bits of the neighbours: leave them out.
        text = base64.b64encode(bytes(offset) + secret + bytes(2))
        inner = text[-(-8 * offset // 6) : 8 * (offset + len(secret)) // 6]
        found += [(BASE64, inner), (BASE64, inner.replace(b"+", b"-").replace(b"/", b"_"))]
    return list(dict.fromkeys(found))
