"""Film reviews as vectors of words, split into private, public, tuning and test records.

Shape legend: N = records, W = words.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import nn

NUM_WORDS = 10_000
NUM_TUNING = 750  # records of the test file that choose hyper-parameters
NUM_PUBLIC = 250  # labelled; 1 % of the paper's training set, which is what its public-data baselines get


@dataclasses.dataclass(frozen=True)
class Records:
    """How often a text has each word, what those counts are divided by, and its label."""

    counts_NW: torch.Tensor  # uint8
    divisors_N: torch.Tensor  # float32
    labels_N: torch.Tensor  # int64
    sparse_NW: csr_matrix = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        sparse = csr_matrix(self.counts_NW.numpy(), dtype=np.float32).multiply(1 / self.divisors_N.numpy()[:, None])
        object.__setattr__(self, "sparse_NW", csr_matrix(sparse))

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, rows: slice | torch.Tensor) -> Records:
        return Records(self.counts_NW[rows], self.divisors_N[rows], self.labels_N[rows])

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features, float32 (B, W), and labels, (B,)."""
        return self.counts_NW[rows].float().div_(self.divisors_N[rows].unsqueeze(1)), self.labels_N[rows]


@dataclasses.dataclass(frozen=True)
class Task:
    """A linear classifier of texts in two classes. Public, tuning and test records come from the test file."""

    name: str
    train: Records
    public: Records
    tuning: Records
    test: Records
    bias: bool = True

    def model(self) -> nn.Linear:
        """Weights zero, as in the authors' code."""
        model = nn.Linear(self.train.counts_NW.size(1), 1, bias=self.bias)
        for p in model.parameters():
            nn.init.zeros_(p)
        return model

    def losses(self, logits: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Cross entropy of every record, (B,)."""
        return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels_B.float(), reduction="none")

    def accuracy(self, model: nn.Linear, records: Records) -> float:
        """Share of records that are classified correctly."""
        logits = records.sparse_NW @ model.weight.detach().numpy().T
        if self.bias:
            logits = logits + model.bias.detach().numpy()
        return float(((logits[:, 0] > 0) == (records.labels_N.numpy() > 0)).mean())


def tokens(text: str) -> list[str]:
    """Lower case, split at everything that is no letter, digit or apostrophe."""
    return re.findall(r"[a-z0-9']+", text.lower())


def vocabulary(passages: Iterable[str]) -> dict[str, int]:
    """The most frequent words; of equals, the one that comes first in the alphabet."""
    counts = collections.Counter(word for text in passages for word in tokens(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(ranked[:NUM_WORDS])}


def bags(
    passages: Iterable[str],
    labels: Sequence[int],
    number_of: Callable[[str], int | None],
    size: int = NUM_WORDS,
    features: str = "frequencies",
) -> Records:
    """Texts as vectors of words.

    Args:
        number_of: word -> its coordinate, or None for a word that has none.
        features: "frequencies": how often a word occurs / words of the text, with those that have no number;
            "presence": 1 for a word that occurs.
    """
    counts_NW, divisors = np.zeros((len(labels), size), dtype=np.uint8), []
    for row, text in zip(counts_NW, passages, strict=True):
        words = tokens(text)
        for number, times in collections.Counter(map(number_of, words)).items():
            if number is not None:
                row[number] = 1 if features == "presence" else min(times, 255)
        divisors.append(1.0 if features == "presence" else max(len(words), 1))
    return Records(torch.from_numpy(counts_NW), torch.tensor(divisors, dtype=torch.float32), torch.tensor(labels))


def imdb(folder: Path, *, features: str = "frequencies", bias: bool = True) -> Task:
    """Film reviews. The words are the most frequent ones of the unlabelled reviews, which count as public.

    Args:
        folder: holds train.jsonl.gz, test.jsonl.gz (text, label; in random order) and unsup.jsonl.gz (text).
        features: "frequencies", as the authors make them (the code of arXiv:2202.05963), or "presence".
        bias: whether the model has one, as theirs.
    """

    def rows(split: str) -> list[dict]:
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    numbers = vocabulary(row["text"] for row in rows("unsup"))

    def records(split: str) -> Records:
        found = rows(split)
        labels = [row["label"] for row in found]
        return bags((row["text"] for row in found), labels, numbers.get, len(numbers), features)

    name = f"imdb, {features}" + ("" if bias else ", no bias")
    held_out, last = records("test"), NUM_PUBLIC + NUM_TUNING
    return Task(name, records("train"), held_out[:NUM_PUBLIC], held_out[NUM_PUBLIC:last], held_out[last:], bias)
