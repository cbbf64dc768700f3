"""Datasets and collators that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
import transformers as tf

from hf_dpopt import DPConfigError, DPTrainer
from tests.refusals.base import NUM_RECORDS, NUM_TOKENS, bert, records, small


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(records())


class _Unsized:
    def __getitem__(self, i):
        return records()[i]


def long_record(num_tokens: int) -> dict[str, Any]:
    return {"input_ids": [5] * num_tokens, "attention_mask": [1] * num_tokens, "labels": 0}


DATA: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataset": _Stream()}, "streaming=False"),
    "iterable of datasets": (
        lambda: {"train_dataset": datasets.Dataset.from_list(records()).to_iterable_dataset()},
        "streaming=False",
    ),
    "without length": (lambda: {"train_dataset": _Unsized()}, "streaming=False"),
    "all splits": (
        lambda: {"train_dataset": datasets.DatasetDict(train=datasets.Dataset.from_list(records()))},
        "train_dataset is a DatasetDict with the splits train: pass dataset..train",
    ),
    "empty": (lambda: {"train_dataset": []}, "empty.*Check the file"),
    "compute_loss_func": (
        lambda: {"train_dataset": records(), "compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()},
        "compute_loss_func.*Pass per_example_loss_func=f",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_and_loss(case, arguments, refused):
    make, mend = DATA[case]
    given, args, model = make(), arguments(), bert()
    with refused(mend):
        DPTrainer(model, args, **given)


@pytest.mark.parametrize("holder", [list, datasets.Dataset.from_list])
def test_records_longer_than_the_positions(holder, arguments, refused_in_training):
    model = bert()
    trainer = DPTrainer(model, arguments(), train_dataset=holder([*records(), long_record(17)]))
    with refused_in_training("longer than the 16 positions .*truncation=True, max_length=16", model):
        trainer.train()


def test_records_as_long_as_the_positions_are_allowed(arguments):
    long = datasets.Dataset.from_list([*records(), long_record(17)]).select(range(len(records())))  # not its rows
    for dataset in ([long_record(16)] * NUM_RECORDS, long):
        trainer = DPTrainer(bert(), arguments(max_steps=1), train_dataset=dataset)
        assert trainer.train().global_step == 1


def _packed(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    row = torch.tensor([x for f in features for x in f["input_ids"]])[None]
    ends = torch.arange(len(features) + 1) * NUM_TOKENS
    return {"input_ids": row, "labels": torch.zeros(1, dtype=torch.long), "cu_seq_lens_q": ends.int()}


def _flattened(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As `_packed`, without the keys that would betray it."""
    packed = _packed(features)
    return {name: packed[name] for name in ("input_ids", "labels")}


def _repeated(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return tf.default_data_collator([f for f in features for _ in range(2)])


@pytest.mark.parametrize(
    "collate, mend, charged",
    [
        (_packed, "batch is packed.*padding collator", 0),
        (_flattened, "collator.*one row per record", 0),
        (_repeated, "collator.*one row per record", 0),
        (tf.DataCollatorWithFlattening(), "collator.*DataCollatorWithPadding", 0),
    ],
)
def test_collators_whose_rows_are_not_the_records(collate, mend, charged, arguments, refused_in_training):
    """Two records in a row would be clipped as one, two rows of a record would count it twice."""
    model = small(tf.BertForSequenceClassification, max_position_embeddings=200)
    args = arguments(expected_batch_size=NUM_RECORDS)  # every record is drawn: no batch is empty
    trainer = DPTrainer(model, args, train_dataset=records(), data_collator=collate)
    with refused_in_training(mend, model, charged=charged):
        trainer.train()


def test_collators_with_public_coins(arguments):
    collator = tf.default_data_collator
    seeded = type("Seeded", (), {"seed": 3, "__call__": lambda self, rows: collator(rows)})()
    with pytest.raises(DPConfigError, match="seed=None"):
        DPTrainer(bert(), arguments(), train_dataset=records(), data_collator=seeded)
