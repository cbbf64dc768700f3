"""Models and metrics of the two tasks.

Shape legend: B = records, T = words, V = words of the vocabulary, K = tags.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from recipes.stackoverflow_data import BEGIN, END, IGNORED, PAD, UNKNOWN, Collator, Pieces

RECALL_AT = 5


def language_model(vocabulary_size: int, *, width: int, layers: int, max_words: int) -> GPT2LMHeadModel:
    """A small GPT-2 with fresh weights, a word per token and no dropout; the head is the table of words."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary_size, n_embd=width, n_layer=layers, n_head=max(1, width // 32),
            n_positions=max_words + 2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=BEGIN,
            eos_token_id=END, pad_token_id=PAD,
        )
    )  # fmt: skip


class TagModel(nn.Module):
    """Logistic regression on the normalised bag of a post's words: a table of one row per word, (V, K), and a bias."""

    def __init__(self, vocabulary_size: int, num_tags: int):
        super().__init__()
        self.config = PreTrainedConfig(num_labels=num_tags, vocab_size=vocabulary_size)
        self.words = nn.Embedding(vocabulary_size, num_tags)
        self.bias = nn.Linear(1, num_tags, bias=False)
        nn.init.zeros_(self.words.weight)
        nn.init.zeros_(self.bias.weight)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        mask_BT1 = attention_mask.unsqueeze(-1).to(self.words.weight.dtype)
        share_B1 = 1 / mask_BT1.sum(dim=1).clamp(min=1)
        logits_BK = (self.words(input_ids) * mask_BT1).sum(dim=1) * share_B1
        return SequenceClassifierOutput(logits=logits_BK + self.bias(torch.ones_like(share_B1)))


def tag_losses(outputs: Any, labels_BK: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy of a post, summed over the tags, (B,)."""
    losses_BK = nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels_BK, reduction="none")
    return losses_BK.sum(dim=1)


@torch.no_grad()
def _batches(
    model: nn.Module, dataset: Dataset, user_column: str, collate: Collator, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """Yield logits, labels and users of `size` records at a time."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    for rows in dataset.iter(size):
        users = rows.pop(user_column)
        batch = collate([dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)])
        labels = batch.pop("labels")
        yield model(**{name: value.to(device) for name, value in batch.items()}).logits.float().cpu(), labels, users
    model.train(was_training)


def _tally_users(tallies: dict[str, np.ndarray], users: list[str], columns: Sequence[torch.Tensor]) -> None:
    """Add the numbers of each record to those of its user."""
    for user, numbers in zip(users, torch.stack([c.double().sum(dim=1) for c in columns], dim=1).numpy(), strict=True):
        tallies[user] += numbers


def word_metrics(
    model: nn.Module,
    dataset: Dataset,
    user_column: str,
    collate: Collator,
    size: int,
    pieces: Pieces | None = None,
) -> dict[str, float]:
    """Accuracy of the next word as the StackOverflow benchmark has it: padding, unknown words and ends do not count.

    Args:
        pieces: how the tokens make up words; None for a word per token.

    Returns:
        ``accuracy`` over all words that count, ``perplexity`` of all words, unknown ones and ends included, and
        ``user_accuracy``, ``user_perplexity``: the mean over users of their own (for perplexity, of the losses).
    """
    tallies: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(4))
    for logits_BTV, labels_BT, users in _batches(model, dataset, user_column, collate, size):
        said_BT, targets_BT = logits_BTV.argmax(dim=-1), labels_BT[:, 1:]
        losses_BT = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(targets_BT.shape)
        if pieces is not None:
            words_BT, counts_BT, right_BT = pieces.judge(said_BT, targets_BT)
        else:
            words_BT = targets_BT != IGNORED
            counts_BT = words_BT & (targets_BT != UNKNOWN) & (targets_BT != END)
            right_BT = (said_BT[:, :-1] == targets_BT) & counts_BT
        _tally_users(tallies, users, (right_BT, counts_BT, losses_BT, words_BT))
    right, counted, loss, targets = np.stack(list(tallies.values())).T
    seen, some = targets > 0, counted > 0
    return {
        "accuracy": float(right.sum() / max(1, counted.sum())),
        "perplexity": math.exp(loss.sum() / max(1, targets.sum())),
        "user_accuracy": float((right[some] / counted[some]).mean()) if some.any() else 0.0,
        "user_perplexity": math.exp((loss[seen] / targets[seen]).mean()) if seen.any() else 1.0,
    }


def tag_metrics(
    model: nn.Module, dataset: Dataset, user_column: str, collate: Collator, size: int
) -> dict[str, float]:
    """Share of all tags of all posts that are among the five (or K) most likely of their post.

    Returns:
        ``recall_at_5`` as the StackOverflow benchmark defines it, and ``user_recall_at_5``, the mean over users.
    """
    tallies: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(2))
    for logits_BK, labels_BK, users in _batches(model, dataset, user_column, collate, size):
        found_BK = torch.zeros_like(labels_BK)
        found_BK.scatter_(1, logits_BK.topk(min(RECALL_AT, labels_BK.size(1))).indices, 1.0)
        _tally_users(tallies, users, (found_BK * labels_BK, labels_BK))
    right, tags = np.stack(list(tallies.values())).T
    return {
        f"recall_at_{RECALL_AT}": float(right.sum() / max(1, tags.sum())),
        f"user_recall_at_{RECALL_AT}": float((right[tags > 0] / tags[tags > 0]).mean()) if tags.any() else 0.0,
    }
