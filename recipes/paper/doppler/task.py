"""What is learned from scratch: topics of AG News by a small BERT, whose words are hashed to buckets.

Shape legend: B = records, T = words.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertModel

from recipes.paper.texts import AG_NEWS_CLASSES, ag_news, bucket

PADDING = 0
WORD = re.compile(r"[a-z]{2,}")


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and its records; the default is that of the reported runs."""

    buckets: int = 4096
    width: int = 32
    layers: int = 2
    heads: int = 2
    max_words: int = 16
    initial_stddev: float = 0.1
    word_stddev: float = 0.02
    with_positions: bool = False


@dataclasses.dataclass(frozen=True)
class Records:
    """Words as buckets with `PADDING` after the last one, (B, T); labels, (B,)."""

    inputs: torch.Tensor
    labels_B: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels_B)

    def __getitem__(self, rows: torch.Tensor | slice) -> Records:
        return Records(self.inputs[rows], self.labels_B[rows])

    def trimmed(self) -> Records:
        """Words without the columns that are padding in every record."""
        longest = int((self.inputs != PADDING).sum(dim=1).max())
        return Records(self.inputs[:, :longest], self.labels_B)


def read_records(path: Path, size: Size) -> Records:
    """A file of AG News: text, tab, class, no header. The first words of each record, hashed."""
    texts, labels = ag_news(path)
    words_BT = np.zeros((len(texts), size.max_words), dtype=np.int64)
    for row_T, text in zip(words_BT, texts, strict=True):
        buckets = [1 + bucket(word, size.buckets - 1) for word in WORD.findall(text.lower())][: size.max_words]
        row_T[: len(buckets)] = buckets
    return Records(torch.tensor(words_BT), torch.tensor(labels))


@dataclasses.dataclass(frozen=True)
class Data:
    """Records to train on, to choose learning rates by, and to report accuracies on: three disjoint sets."""

    train: Records
    validation: Records
    test: Records


def read_data(folder: Path, size: Size) -> Data:
    """AG News' train.tsv and test.tsv; a third of the latter, at random, is for validation."""
    train, rest = (read_records(folder / name, size) for name in ("train.tsv", "test.tsv"))
    order = torch.tensor(np.random.default_rng(0).permutation(len(rest)))
    third = len(rest) // 3
    return Data(train, rest[order[:third]], rest[order[third:]])


class Classifier(nn.Module):
    """A BERT with fresh weights and without dropout; a linear layer on the mean over its words.

    Unless `with_positions`, the tables of positions and token types stay zero. Their rows are common to all records,
    and the LayerNorm behind them multiplies their gradients by 1 / `word_stddev`: directions so steep that SGD
    oscillates in them even without noise.
    """

    def __init__(self, size: Size):
        super().__init__()
        config = BertConfig(
            vocab_size=size.buckets, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=2 * size.width, max_position_embeddings=size.max_words,
            type_vocab_size=1, pad_token_id=PADDING, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=size.initial_stddev,
        )  # fmt: skip
        self.encoder, self.head = (
            BertModel(config, add_pooling_layer=False),
            nn.Linear(size.width, len(AG_NEWS_CLASSES)),
        )
        nn.init.normal_(self.head.weight, std=size.initial_stddev)
        nn.init.zeros_(self.head.bias)
        embeddings = self.encoder.embeddings
        nn.init.normal_(embeddings.word_embeddings.weight, std=size.word_stddev)
        for table in (embeddings.position_embeddings, embeddings.token_type_embeddings):
            nn.init.zeros_(table.weight)
            table.weight.requires_grad_(size.with_positions)

    def forward(self, words_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = words_BT != PADDING
        hidden_BTD = self.encoder(input_ids=words_BT, attention_mask=mask_BT.long()).last_hidden_state
        mean_BD = (hidden_BTD * mask_BT[..., None]).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return self.head(mean_BD)


@torch.no_grad()
def evaluate(model: nn.Module, records: Records, at_a_time: int = 500) -> tuple[float, float]:
    """Accuracy and cross entropy."""
    parts = [model(records[slice(i, i + at_a_time)].inputs) for i in range(0, len(records), at_a_time)]
    all_logits = torch.cat(parts)
    loss = nn.functional.cross_entropy(all_logits, records.labels_B)
    return (all_logits.argmax(dim=1) == records.labels_B).float().mean().item(), loss.item()
