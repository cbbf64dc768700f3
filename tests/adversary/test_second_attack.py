"""What a second reader of the data's path found: padding beyond the positions, narrow floats, targets, panics."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers as tf

from tests.adversary.harness import (
    Lazy,
    assert_adds_nothing,
    assert_kept,
    influence,
    making,
    masked,
    raising,
    trainer,
    words,
)
from tests.adversary.matrix import HEADS
from tests.helpers import tiny

NUM, BAD = 200, 150  # not among the records that are looked at before training
DRAWN = [1, 5, 7, BAD, 160, 161]


def bart(kind: type, **changes: Any) -> Any:
    return tiny.made(kind, max_position_embeddings=12, pad_token_id=1, bos_token_id=0, **changes)


@pytest.mark.parametrize("stored", [False, True])
def test_padding_to_a_multiple_beyond_the_positions(stored, tmp_path):
    """A record of 58 tokens in a model of 60 positions is padded to 64: it must neither fail nor fail the others."""
    made = masked(NUM)
    made[BAD] = {"input_ids": [5] * 58, "attention_mask": [1] * 58, "label": 1}
    collate = tf.DataCollatorWithPadding(words(), pad_to_multiple_of=8)
    make = making(lambda: tiny.model(dropout=0.0, max_position_embeddings=60), data_collator=collate)
    data = datasets.Dataset.from_list(made) if stored else Lazy(made)
    ratio = influence(make, data, BAD, tmp_path, drawn=DRAWN)
    assert 1e-3 < ratio <= 1 + 1e-5


def test_a_first_label_of_few_digits_rounds_no_other(tmp_path):
    made = [{**row, "label": np.float32(70000.0 + i)} for i, row in enumerate(masked(8))]
    made[0]["label"] = np.float16(1.0)
    made = [{**row, "input_ids": row["input_ids"][:1] * 4, "attention_mask": [1] * 4} for row in made]
    make = making(lambda: tiny.model(dropout=0.0, num_labels=1), data_collator=tf.default_data_collator)
    assert_kept(make, made, 0, tmp_path, without=made[1:])


def test_more_targets_than_tokens_shift_nobody(tmp_path):
    """An own collator that cuts the tokens and not the labels."""
    generator = torch.Generator().manual_seed(4)
    made = [{"ids": torch.randint(3, 40, (8,), generator=generator).tolist()} for _ in range(NUM)]
    made[BAD]["ids"] = made[BAD]["ids"] * 2

    def collate(some):
        ids = [row["ids"][:10] for row in some]
        width, wide = max(map(len, ids)), max(len(row["ids"]) for row in some)
        return {
            "input_ids": torch.tensor([i + [0] * (width - len(i)) for i in ids]),
            "attention_mask": torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i in ids]),
            "labels": torch.tensor([row["ids"] + [-100] * (wide - len(row["ids"])) for row in some]),
        }

    assert_adds_nothing(making(HEADS["causal"][0], data_collator=collate), Lazy(made), BAD, tmp_path, drawn=DRAWN)


def _with_targets(make_model, side, **padding):
    def make(out, data):
        torch.manual_seed(0)
        model = make_model()
        collate = tf.DataCollatorForSeq2Seq(words(side), model=model, **padding)
        return trainer(out, data, model=model, data_collator=collate, remove_unused_columns=False)

    return make


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_targets_shift_nobody(side, tmp_path):
    made = [{"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [3 + i % 9, 4, 0]} for i in range(NUM)]
    made[BAD]["labels"] = [9] * 40
    make = _with_targets(HEADS["sequences"][0], side)
    assert_kept(make, Lazy(made), BAD, tmp_path, drawn=DRAWN)


def test_targets_padded_to_a_multiple_beyond_the_positions(tmp_path):
    """Ten targets in a decoder of 12 positions are padded to 16: the record contributes, and fails nobody."""
    made = [{"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [3 + i % 9, 4, 2]} for i in range(NUM)]
    made[BAD]["labels"] = [9] * 9 + [2]
    make = _with_targets(lambda: bart(tf.BartForConditionalGeneration), "right", pad_to_multiple_of=8)
    assert 1e-3 < influence(make, Lazy(made), BAD, tmp_path, drawn=DRAWN) <= 1 + 1e-5


def test_a_collator_that_makes_two_rows_of_a_record(tmp_path):
    """One that cuts long texts into rows meets its first long text in a step: the record is left out."""
    made = masked(NUM)
    made[BAD] = {"input_ids": [5] * 20, "attention_mask": [1] * 20, "label": 1}

    def collate(some):
        return tiny.collate(
            [
                {**row, "input_ids": row["input_ids"][i : i + 12]}
                for row in some
                for i in range(0, len(row["input_ids"]), 12)
            ]
        )

    assert_adds_nothing(making(data_collator=collate), Lazy(made), BAD, tmp_path, drawn=DRAWN)


def test_labels_that_are_no_targets_of_the_decoder_are_not_trimmed(tmp_path):
    """A loss of one's own over five answers, most of them missing: trimmed labels would broadcast against five."""
    made = [{"input_ids": [5, 6, 7, 2], "labels": [i % 2, -100, -100, -100, -100]} for i in range(NUM)]
    made[BAD]["labels"] = [1, 0, 1, 0, 1]

    def loss(outputs, y):
        z = outputs.logits
        each = torch.nn.functional.softplus(z) - z * y.clamp(min=0)
        return (each * (y != -100)).sum(1) / (y != -100).sum(1)

    def collate(some):
        ids = torch.tensor([row["input_ids"] for row in some])
        labels = torch.tensor([row["labels"] for row in some])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def model():
        return bart(tf.BartForSequenceClassification, num_labels=5)

    make = making(model, data_collator=collate, per_example_loss_func=loss)
    assert 1e-3 < influence(make, Lazy(made), BAD, tmp_path, drawn=DRAWN) <= 1 + 1e-5


class Unreadable(Mapping):
    def __getitem__(self, name: str) -> Any:
        raise ValueError("torn")

    def __iter__(self) -> Any:
        return iter(["input_ids", "label"])

    def __len__(self) -> int:
        return 2


class Panic(BaseException):
    """As tokenizers raise when their Rust part panics."""


BAD_RECORDS = {
    "a panic": raising(Panic("stride must be strictly less than max_len")),
    "a long name": raising(OSError(errno.ENAMETOOLONG, "File name too long")),
    "no codec": raising(ModuleNotFoundError("No module named 'pillow_heif'")),
    "torn": Unreadable,
}


@pytest.mark.parametrize("bad", BAD_RECORDS)
def test_a_record_stops_no_step(bad, tmp_path):
    assert influence(trainer, Lazy(tiny.records(NUM), BAD_RECORDS[bad], BAD), BAD, tmp_path, drawn=DRAWN) == 0


def test_an_interrupt_does(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        influence(trainer, Lazy(tiny.records(NUM), raising(KeyboardInterrupt()), BAD), BAD, tmp_path, drawn=DRAWN)
