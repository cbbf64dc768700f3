"""The data sets that several experiments share, and how their words and texts become numbers."""

from __future__ import annotations

import csv
import zlib
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

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


@torch.no_grad()
def embeddings(texts: list[str], model: Path) -> torch.Tensor:
    """Means of the last hidden states of an encoder, of norm 1, (N, H)."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    found = torch.zeros(len(texts), encoder.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    for first in range(0, len(texts), 64):
        rows = order[first : first + 64]
        batch = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask_BT1 = batch["attention_mask"].unsqueeze(-1)
        means_BH = (encoder(**batch).last_hidden_state * mask_BT1).sum(dim=1) / mask_BT1.sum(dim=1)
        found[rows] = torch.nn.functional.normalize(means_BH, dim=1)
    return found
