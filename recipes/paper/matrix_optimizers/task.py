"""Tasks with matrices to train, small enough for hundreds of runs: states below them are computed once.

* ``lora``: adapters in the last layer of a pretrained encoder, SST-2.
* ``full``: that whole layer, with the same states.
* ``topics``: a hidden layer and a head on the mean of the encoder's last states, AG News.
* ``phrases``: the same on the mean of the states below the last layer, SST-2.

10,000 records to train on, 2,000 that choose learning rates, 4,000 that are reported. Phrases of GLUE's training
file are split at random; topics are chosen by and reported on AG News' test file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

from recipes.paper.top_layer.task import States, Task, below_the_top, kept_states, load_encoder, read

NUM_TRAIN, NUM_TUNING, NUM_TEST = 10_000, 2000, 4000
MAX_TOKENS = 32
TASKS = ("topics", "phrases", "lora", "full")
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
CLASSES = {"lora": 2, "full": 2, "topics": 4, "phrases": 2}


def read_topics(path: Path) -> tuple[list[str], list[int]]:
    """Texts and labels of a file of AG News: text, tab, class, no header."""
    pairs = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [text for text, _ in pairs], [TOPICS.index(name) for _, name in pairs]


def means(records: States) -> States:
    """Records of one state each: the mean over their tokens."""
    lengths = records.offsets.diff().tolist()
    mean_ND = torch.stack([part.float().mean(0) for part in records.states_LD.split(lengths)])
    return States(mean_ND.bfloat16(), torch.arange(len(records) + 1), records.labels_N)


@torch.autocast("cpu", torch.bfloat16)
def make_states(sst2: Path, ag_news: Path, model: str) -> list[States]:
    """Compute the states of phrases, then of topics, with the encoder in the folder `model`; minutes."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), load_encoder(model)
    whole = encoder.encoder.layer

    def states(texts: list[str], labels: list[int], rows: np.ndarray) -> States:
        ids = tokenizer([texts[i] for i in rows], truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return below_the_top(encoder, ids, [labels[i] for i in rows])

    rng, held_out = np.random.default_rng(0), NUM_TUNING + NUM_TEST
    texts, labels = read_topics(ag_news / "test.tsv")
    rows = rng.permutation(len(texts))[:held_out]
    topics = [means(states(texts, labels, part)) for part in (rows[:NUM_TUNING], rows[NUM_TUNING:])]
    texts, labels = read_topics(ag_news / "train.tsv")
    topics = [means(states(texts, labels, np.arange(len(texts))[:NUM_TRAIN])), *topics]
    encoder.encoder.layer = whole[:-1]
    texts, labels = read(sst2 / "train.tsv")
    rows = rng.permutation(len(texts))[: held_out + NUM_TRAIN]
    cuts = (rows[held_out:], rows[:NUM_TUNING], rows[NUM_TUNING:held_out])
    return [*(states(texts, labels, part) for part in cuts), *topics]


def kept_tasks(sst2: Path, ag_news: Path, model: str, cache: Path) -> dict[str, Task]:
    """Return the tasks; a file keeps their states for the next call."""
    states = kept_states(cache, lambda: make_states(sst2, ag_news, model))
    phrases, topics, layer = states[:3], states[3:], load_encoder(model).encoder.layer[-1]
    parts = [means(records) for records in phrases]
    return {
        "lora": Task(*phrases, phrases[1], layer),
        "full": Task(*phrases, phrases[1], layer),
        "topics": Task(*topics, topics[1], nn.Identity()),
        "phrases": Task(*parts, parts[1], nn.Identity()),
    }
