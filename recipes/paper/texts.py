"""The data sets that several experiments share, and how their words become numbers."""

from __future__ import annotations

import csv
import zlib
from pathlib import Path

AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def _rows(path: Path, columns: list[str] | None = None) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, columns, delimiter="\t", quoting=csv.QUOTE_NONE))


def sst2(path: Path) -> tuple[list[str], list[int]]:
    """Texts and labels of a file of GLUE's SST-2: its training file holds phrases, the other one sentences."""
    rows = _rows(path)
    return [row["sentence"] for row in rows], [int(row["label"]) for row in rows]


def ag_news(path: Path) -> tuple[list[str], list[int]]:
    """Texts and classes of a file of AG News: text, class name, no header."""
    rows = _rows(path, ["text", "label"])
    return [row["text"] for row in rows], [AG_NEWS_CLASSES.index(row["label"]) for row in rows]


def bucket(word: str, num: int) -> int:
    """Number of a word below `num`. A vocabulary of private text would have to be paid for; a hash fits nothing."""
    return zlib.crc32(word.encode()) % num
