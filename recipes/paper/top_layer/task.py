"""SST-2 through the last layer of a pretrained encoder: the states below it are computed once and kept in memory.

A run costs a sixth of one through all six layers, and adapters in one layer are adapters: the layer's own weights
stay as they are. GLUE's training file holds phrases, of which 5,000 choose learning rates and 5,000 are reported,
beside the 872 sentences of its validation file.

Shape legend: N = records, B = records of a batch, T = tokens, D = width of the encoder, L = all tokens of a part.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from recipes.paper.texts import sst2

MAX_TOKENS = 48
NUM_TUNING, NUM_TEST = 5000, 5000
AT_A_TIME = 32  # records of one pass


@dataclasses.dataclass(frozen=True)
class States:
    """Hidden states of records of different lengths, one after the other.

    Args:
        states_LD: bfloat16.
        offsets: where each record begins, and the end, (N + 1,).
        labels_N: class of each record.
    """

    states_LD: torch.Tensor
    offsets: torch.Tensor
    labels_N: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    def batches(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Padded states (B, T, D), mask (B, T) and labels (B,) of some records, those of like length together."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        rows = rows[lengths.argsort(stable=True)]
        return [self._padded(rows[i : i + AT_A_TIME]) for i in range(0, len(rows), AT_A_TIME)]

    def _padded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        begins, ends = self.offsets[rows], self.offsets[rows + 1]
        parts = [self.states_LD[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        states_BTD = nn.utils.rnn.pad_sequence(parts, batch_first=True).float()
        mask_BT = torch.arange(states_BTD.size(1)) < (ends - begins).unsqueeze(1)
        return states_BTD, mask_BT, self.labels_N[rows]


@dataclasses.dataclass(frozen=True)
class Task:
    """Records to train on, to choose by, and to report; `sentences` are GLUE's own held-out ones."""

    train: States
    tuning: States
    test: States
    sentences: States
    layer: nn.Module


@torch.no_grad()
def below_the_top(encoder: nn.Module, ids: list[list[int]], labels: list[int]) -> States:
    """States that enter the last layer of `encoder`, a BERT whose last layer was taken off."""
    order = np.argsort([len(some) for some in ids], kind="stable")
    kept: list[torch.Tensor] = [torch.empty(0)] * len(ids)
    for i in range(0, len(order), AT_A_TIME):
        rows = order[i : i + AT_A_TIME]
        words_BT = nn.utils.rnn.pad_sequence([torch.tensor(ids[row]) for row in rows], batch_first=True)
        mask_BT = nn.utils.rnn.pad_sequence([torch.ones(len(ids[row])) for row in rows], batch_first=True)
        states_BTD = encoder(input_ids=words_BT, attention_mask=mask_BT).last_hidden_state
        for row, states_TD in zip(rows, states_BTD, strict=True):
            kept[row] = states_TD[: len(ids[row])].bfloat16()
    offsets = torch.tensor([0, *np.cumsum([len(some) for some in ids]).tolist()])
    return States(torch.cat(kept), offsets, torch.tensor(labels))


def load_encoder(model: str) -> Any:
    """Load the BERT in the folder `model`."""
    return AutoModel.from_pretrained(model, add_pooling_layer=False, attn_implementation="eager").eval()


def make_states(data: Path, model: str) -> list[States]:
    """Compute the states of a task with the encoder in the folder `model`; a few minutes.

    Args:
        data: folder with train.tsv and dev.tsv of SST-2.
    """
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), load_encoder(model)
    encoder.encoder.layer = encoder.encoder.layer[:-1]

    def states(texts: list[str], labels: list[int]) -> States:
        ids = tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return below_the_top(encoder, ids, labels)

    texts, labels = sst2(data / "train.tsv")
    order = np.random.default_rng(0).permutation(len(texts))
    cuts = (order[NUM_TUNING + NUM_TEST :], order[:NUM_TUNING], order[NUM_TUNING : NUM_TUNING + NUM_TEST])
    parts = [states([texts[i] for i in part], [labels[i] for i in part]) for part in cuts]
    return [*parts, states(*sst2(data / "dev.tsv"))]


def kept_states(cache: Path, make: Callable[[], list[States]]) -> list[States]:
    """Return the states that `make` computes; a file keeps their tensors for the next call."""
    if not cache.exists():
        torch.save([vars(states) for states in make()], cache)
    return [States(**tensors) for tensors in torch.load(cache, weights_only=True)]


def kept_task(given: argparse.Namespace) -> Task:
    """Return the task of a command: its `data` through its `model`, kept in the file `states` (1 GB)."""
    model = str(given.model)
    states = kept_states(given.states, lambda: make_states(given.data, model))
    return Task(*states, load_encoder(model).encoder.layer[-1])
