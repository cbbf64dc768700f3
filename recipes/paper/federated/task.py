"""The task: the next word of chat messages, with users held out; the words come from public text."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel

from recipes.stackoverflow_data import END, UNKNOWN, Collator, NextWords, Vocabulary, separate_words
from recipes.stackoverflow_model import language_model, word_metrics
from recipes.tables import TEXT_EXTENSIONS, read_table

USER = "user"
# what counts in the metric is what is learned: 1 word in 5 is unknown to the public vocabulary, messages are short
COLLATE = Collator(ignored=(UNKNOWN, END))
EVALUATION_BATCH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model, a small GPT-2 with a word per token."""

    vocabulary: int = 2000
    width: int = 64
    layers: int = 1
    max_words: int = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """Records of disjoint sets of users, each a dataset of ``input_ids`` and ``user``.

    Args:
        train: everything that the training users wrote in the training split.
        validation: of users who wrote in the dev split only; learning rates are chosen here.
        test: of users who wrote in the test split only.
    """

    size: Size
    num_words: int
    train: Dataset
    validation: Dataset
    test: Dataset

    @functools.cached_property
    def num_users(self) -> int:
        return len(set(self.train[USER]))

    def model(self, seed: int) -> GPT2LMHeadModel:
        """Fresh weights of `seed`."""
        torch.manual_seed(seed)
        size = self.size
        return language_model(self.num_words, width=size.width, layers=size.layers, max_words=size.max_words)


def read_task(folder: Path, public_file: Path, size: Size) -> Task:
    """Reads ``messages.jsonl.gz``, with the columns user, split and text, and the column text of `public_file`.

    Raises:
        DPConfigError: if a file is not there.
    """
    texts = [separate_words(str(text)) for text in read_table(public_file, kinds=TEXT_EXTENSIONS).columns["text"]]
    vocabulary = Vocabulary.of(texts, size.vocabulary)
    encoder = NextWords(vocabulary, "text", size.max_words)
    columns = read_table(folder / "messages.jsonl.gz", kinds=TEXT_EXTENSIONS).columns
    splits = dict.fromkeys(columns["split"])
    users = {
        split: {u for u, s in zip(columns[USER], columns["split"], strict=True) if s == split} for split in splits
    }

    def records(split: str, wanted: set[str]) -> Dataset:
        rows = zip(columns["text"], columns[USER], columns["split"], strict=True)
        kept = [(text, user) for text, user, of in rows if of == split and user in wanted]
        ids = encoder.encode([{"text": text} for text, _ in kept])
        return Dataset.from_dict({**ids, USER: [user for _, user in kept]})

    return Task(
        size,
        len(vocabulary),
        records("train", users["train"]),
        records("dev", users["dev"] - users["train"] - users["test"]),
        records("test", users["test"] - users["train"] - users["dev"]),
    )


def evaluate(model: GPT2LMHeadModel, records: Dataset, limit: int | None = None) -> dict[str, float]:
    """As `word_metrics`, of the first `limit` records."""
    some = records if limit is None else records.select(range(min(limit, len(records))))
    return word_metrics(model, some, USER, COLLATE, EVALUATION_BATCH)
