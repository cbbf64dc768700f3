"""Collators that let a record reach the row of another: types, centring, packing, padding on the wrong side."""

from __future__ import annotations

import types
from typing import Any

import datasets
import pytest
import torch
import transformers as tf

from hf_dpopt.records.collation import Collation, is_known
from hf_dpopt.records.limits import Limits
from tests.adversary.harness import (
    assert_kept,
    assert_kept_or_refused,
    assert_refused,
    influence,
    making,
    masked,
    words,
)
from tests.helpers import tiny

NUM, WIDTH = 8, 6


PREDICTED = 100.5  # between a fraction and what is left of it as an integer, which turns every gradient around


def regression() -> torch.nn.Module:
    model = tiny.model(dropout=0.0, num_labels=1)
    torch.nn.init.constant_(model.classifier.bias, PREDICTED)
    return model


def of_one_length(label: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, tiny.VOCABULARY, (NUM, WIDTH), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * WIDTH, "label": label(i)} for i, row in enumerate(ids)]


# --- types -----------------------------------------------------------------------------------------------------------


def test_an_integer_label_of_an_object_does_not_truncate_the_fractions_of_others():
    """The stock collator takes `vars` of records that are no mappings; 25 clips were measured."""
    rows = [types.SimpleNamespace(input_ids=[5, i], label=label) for i, label in enumerate((101, 0.45, 0.7))]
    parts = Collation.of(tf.default_data_collator).parts(rows)
    labels = {i: value for part in parts for i, value in zip(part.places, part.batch["labels"].tolist(), strict=True)}
    assert labels == pytest.approx({0: 101, 1: 0.45, 2: 0.7})


MASKS = {
    "whole": [1, 1, 1, 1], "begins masked": [0, 0, 1, 1], "ends masked": [1, 1, 0, 0], "a hole": [1, 0, 0, 1],
    "both ends masked": [0, 1, 1, 0], "one token": [0, 0, 0, 1],
}  # fmt: skip
SPOILERS = {
    "nothing to attend to": {"input_ids": [9, 9], "attention_mask": [0, 0], "labels": 1},
    "a token outside": {"input_ids": [9, 10**6], "attention_mask": [1, 1], "labels": 1},
    "too long": {"input_ids": [9] * 40, "attention_mask": [1] * 40, "labels": 1},
    "a mask of another length": {"input_ids": [9, 9], "attention_mask": [1] * 5, "labels": 1},
    "an object": {"input_ids": [9, None], "attention_mask": [1, 1], "labels": 1},
    "an object behind the mask": {"input_ids": [9, None], "attention_mask": [1, 0], "labels": 1},
}


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("end", [[7, 8], [None, None]], ids=["text", "padding"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_record_that_cannot_be_used_changes_no_row(spoiler, end, padding_side):
    """Masked tokens of the others were cut beside it: places of text moved, and 53 clips were measured."""
    tokenizer = words()
    tokenizer.padding_side, pad = padding_side, tokenizer.pad_token_id
    limits = Limits.of(tiny.made(tf.GPT2ForSequenceClassification, n_positions=32, pad_token_id=pad), "custom")
    collation = Collation(tf.DataCollatorWithPadding(tokenizer), limits=limits, padding_id=pad)
    end = [pad if token is None else token for token in end]
    rows = [{"input_ids": [5, 6, *end], "attention_mask": mask, "labels": 0} for mask in MASKS.values()]
    rows += [{"input_ids": [5, 6, 7, 8, 9], "attention_mask": [1] * 5, "labels": 0}]

    def seen(records: list[Any]) -> dict[int, Any]:
        """Tokens from the first that is attended to, or a masked one of the record, to the last that counts."""
        found = {}
        for part in collation.parts(records):
            for place, ids, mask in zip(
                part.places, part.batch["input_ids"], part.batch["attention_mask"], strict=True
            ):
                pairs = list(zip(ids.tolist(), mask.tolist(), strict=True))
                while pairs and pairs[-1] == (pad, 0):
                    pairs.pop()
                while padding_side == "left" and pairs and pairs[0] == (pad, 0):
                    pairs.pop(0)
                found[place] = pairs
        return found

    alone, beside = seen(rows), seen([*rows, SPOILERS[spoiler]])
    assert alone.keys() == set(range(len(rows))) and beside == alone


def test_choices_that_are_too_long_take_no_other_record_along(tmp_path):
    """The forward of all failed, and each alone was as wide as all: 8 clips were measured."""

    def collate(rows):
        width = max(len(choice) for row in rows for choice in row["input_ids"])
        padded = [[choice + [0] * (width - len(choice)) for choice in row["input_ids"]] for row in rows]
        ids = torch.tensor(padded)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.zeros(len(rows)).long()}

    def released(length: int) -> torch.Tensor:
        seen = tiny.Gradients()
        rows = [{"input_ids": [[5] * 20, [7] * 20], "label": 0} for _ in range(40)]
        rows[4] = {"input_ids": [[5] * length, [7] * 20], "label": 0}
        tiny.trainer(
            tmp_path / str(length), model=tiny.made(tf.BertForMultipleChoice), train_dataset=rows, data_collator=collate,
            callbacks=[seen], clipping_norm=0.01, max_steps=1, expected_batch_size=40, per_device_train_batch_size=8,
            sampling="fixed_order", adjacency="zero_out", noise_multiplier=0.0, learning_rate=0.0,
        ).train()  # fmt: skip
        return torch.cat([gradient.flatten() * 40 for gradient in seen.steps[0].values()])

    assert (released(20) - released(70)).norm() <= 0.01 * (1 + 1e-4)


def test_positions_that_are_counted_over_a_batch_do_not_reach_other_records():
    """TRL's collator adds up the lengths of a column `seq_lengths`: a record with one more shifts those after it."""
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    collate = trl.DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": lengths} for lengths in ([0, 3], [3])]
    (part,) = Collation.of(collate).parts(rows)
    (alone,) = Collation.of(collate).parts(rows[1:])
    assert part.batch["position_ids"][1].tolist() == alone.batch["position_ids"][0].tolist() == [0, 1, 2]
    assert is_known(trl.DataCollatorForLanguageModeling(pad_token_id=0))


@pytest.mark.parametrize("first", [0, 3], ids=["in front", "in the middle"])
def test_an_integer_label_does_not_truncate_the_fractions_of_others(first, tmp_path):
    """`default_data_collator` takes the type of all labels from the first record."""
    rows = of_one_length(lambda i: PREDICTED + 0.45)
    rows[first]["label"] = 101
    assert_kept(making(regression, data_collator=tf.default_data_collator), rows, first, tmp_path)


def test_integers_are_numbers_where_numbers_are_predicted(tmp_path):
    """All integers: the same sum as of the same numbers written as floats."""
    make = making(regression, data_collator=tf.default_data_collator)
    assert_kept(make, of_one_length(lambda i: i), 2, tmp_path)


# --- collators that mix ------------------------------------------------------------------------------------------------


def _centring(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = tf.default_data_collator(rows)
    batch["labels"] = batch["labels"] - batch["labels"].mean()
    return batch


def _with_a_negative(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = tf.default_data_collator(rows)
    batch["input_ids"] = torch.cat([batch["input_ids"], batch["input_ids"].roll(1, 0)], dim=1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


class _Subclass(tf.DataCollatorWithPadding):
    """Looks like a known collator, and is none."""

    def __call__(self, features: list[dict]) -> dict:
        return _centring(features)


@pytest.mark.parametrize("collate", [_centring, _with_a_negative, _Subclass(tokenizer=None)])
def test_a_collator_that_mixes_records_is_refused(collate, tmp_path):
    make = making(regression, data_collator=collate)
    assert_refused(make, of_one_length(lambda i: 30.0 * i), tmp_path, "The collator mixes records: '.*' of a training")


def test_a_collator_that_mixes_seldom_sees_single_records(tmp_path):
    """Nothing of it shows in the records that are tried before training; in a step it meets one record at a time."""
    rows = of_one_length(lambda i: 30.0 * i)

    def seldom(some: list[dict]) -> dict:
        return _centring(some) if any(row["label"] == 210.0 for row in some) and len(some) > 4 else tf.default_data_collator(some)  # fmt: skip

    assert_kept(making(regression, data_collator=seldom), rows, NUM - 1, tmp_path)


def test_random_collators_are_no_mixing(tmp_path):
    """A mask that is drawn differs from call to call; that is not the neighbour's doing."""

    def masking(rows: list[dict]) -> dict:
        batch = tiny.collate(rows)
        drawn = torch.rand(batch["input_ids"].shape) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 1)}

    assert 0 < influence(making(data_collator=masking), tiny.records(NUM), 1, tmp_path)


# --- padding -----------------------------------------------------------------------------------------------------------


def equal_at_the_start() -> list[dict[str, Any]]:
    """Records of one length, but for one that lies where no first look falls."""
    rows = [{"input_ids": row["input_ids"], "label": i % 2} for i, row in enumerate(of_one_length(lambda i: 0))]
    rows[5]["input_ids"] = rows[5]["input_ids"] * 5
    return rows


def _own(tokenizer: Any) -> Any:
    return lambda rows: (
        dict(tokenizer.pad([{"input_ids": r["input_ids"]} for r in rows], return_tensors="pt"))
        | {"labels": torch.tensor([r["label"] for r in rows])}
    )


@pytest.mark.slow_but(6)
@pytest.mark.parametrize("place", ["data_collator", "processing_class", "function"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("agrees", [True, False], ids=["same id", "other id"])
def test_padding_wherever_the_tokenizer_sits(place, side, agrees, tmp_path):
    """GPT-2 counts positions from the first column, and takes the last token that is not its padding token."""
    tokenizer = words(side)
    where = {
        "data_collator": {"data_collator": tf.DataCollatorWithPadding(tokenizer)},
        "processing_class": {"data_collator": None, "processing_class": tokenizer},
        "function": {"data_collator": _own(tokenizer)},
    }[place]
    make = making(lambda: tiny.made(tf.GPT2ForSequenceClassification, pad_token_id=1 if agrees else 0), **where)
    refusal = assert_kept_or_refused(make, datasets.Dataset.from_list(equal_at_the_start()), 5, tmp_path)
    if place == "function" or (side == "right" and (agrees or place == "processing_class")):
        # rows that are joined here are padded as the model expects; the Trainer tells the model of its own tokenizer
        assert not refusal
    else:
        assert "padding" in refusal, refusal


# --- padding that the model does not know ---------------------------------------------------------------------------


def test_a_config_that_names_no_token_of_the_model_is_not_padded_with_it(tmp_path):
    """A collator of one's own: rows are joined here, with the model's padding if its table has that token."""
    model = tiny.model(dropout=0.0)
    model.config.pad_token_id = 10**6
    assert 1e-3 < influence(making(lambda: model), tiny.records(NUM), 0, tmp_path) <= 1 + 1e-5


def test_a_tokenizer_that_pads_with_a_new_token_is_refused(tmp_path):
    """Every padded record would be left out of its step."""
    tokenizer = words()
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id >= tiny.VOCABULARY
    make = making(data_collator=tf.DataCollatorWithPadding(tokenizer))
    assert_refused(
        make,
        datasets.Dataset.from_list(masked(NUM)),
        tmp_path,
        match="padding token .* outside 0 to 39, .*resize_token_embeddings",
    )
