"""Collators that let a record reach the row of another: types, centring, packing, padding on the wrong side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hf_dpopt.records.collation import KNOWN, Collation, Padding, is_known
from hf_dpopt.records.form import Form
from tests import tiny
from tests.adversary.harness import assert_kept, assert_kept_or_refused, assert_refused, influence, trainer

NUM, WIDTH = 8, 6


def regression() -> torch.nn.Module:
    return tiny.model(dropout=0.0, num_labels=1)


def of_one_length(label: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, tiny.VOCABULARY, (NUM, WIDTH), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * WIDTH, "label": label(i)} for i, row in enumerate(ids)]


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3], ids=["in front", "in the middle"])
def test_an_integer_label_does_not_truncate_the_fractions_of_others(first, tmp_path):
    """`default_data_collator` takes the type of all labels from the first record."""
    rows = of_one_length(lambda i: 40.0 + i + 0.5)
    rows[first]["label"] = 41

    def make(output_dir, dataset):
        return trainer(output_dir, dataset, model=regression(), data_collator=tf.default_data_collator)

    assert_kept(make, rows, first, tmp_path)


def test_integers_are_numbers_where_numbers_are_predicted(tmp_path):
    """All integers: the same sum as of the same numbers written as floats."""

    def make(output_dir, dataset):
        return trainer(output_dir, dataset, model=regression(), data_collator=tf.default_data_collator)

    assert_kept(make, of_one_length(lambda i: i), 2, tmp_path)


def test_the_form_of_a_record_is_its_own():
    form = Form.of({"input_ids": [1, 2], "label": 1}, float_labels=True)
    assert form.fitted({"input_ids": [3], "label": 2, "more": 1}) == {"input_ids": [3], "label": 2.0}
    for wrong in (
        {"input_ids": [3]}, {"input_ids": [3], "label": None}, {"input_ids": [1.5], "label": 1}, {"input_ids": 3, "label": 1},
        {"input_ids": [[3]], "label": 1}, {"input_ids": [3, None], "label": 1}, {"input_ids": [3], "label": [1]}, 7,
    ):  # fmt: skip
        assert form.fitted(wrong) is None, wrong


def test_arrays_and_tensors_become_what_the_first_record_has():
    """`DataCollatorForSeq2Seq` adds padding to a list by `+`, which means another thing for an array."""
    form = Form.of({"labels": [1, 2], "x": np.zeros(2, np.float32), "n": 3})
    got = form.fitted({"labels": np.array([3, 4]), "x": [1, 2], "n": torch.tensor(5)})
    assert got["labels"] == [3, 4] and type(got["labels"]) is list
    assert got["x"].dtype == np.float32 and got["x"].tolist() == [1.0, 2.0]
    assert type(got["n"]) is int
    as_tensor = Form.of({"labels": torch.tensor([1], dtype=torch.int32)}).fitted({"labels": [2**40]})
    assert as_tensor["labels"].tolist() == [2**40]


# --- collators that mix ------------------------------------------------------------------------------------------------


def _centring(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = tf.default_data_collator(rows)
    batch["labels"] = batch["labels"] - batch["labels"].mean()
    return batch


def _scaling(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = tf.default_data_collator(rows)
    batch["labels"] = batch["labels"] / batch["labels"].abs().max()
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


@pytest.mark.parametrize("collate", [_centring, _scaling, _with_a_negative, _Subclass(tokenizer=None)])
def test_a_collator_that_mixes_records_is_refused(collate, tmp_path):
    def make(output_dir, dataset):
        return trainer(output_dir, dataset, model=regression(), data_collator=collate)

    assert_refused(make, of_one_length(lambda i: 30.0 * i), tmp_path, "The collator mixes records: '.*' of a training")


def test_a_collator_that_mixes_seldom_sees_single_records(tmp_path):
    """Nothing of it shows in the records that are tried before training; in a step it meets one record at a time."""
    rows = of_one_length(lambda i: 30.0 * i)

    def seldom(some: list[dict]) -> dict:
        return _centring(some) if any(row["label"] == 210.0 for row in some) and len(some) > 4 else tf.default_data_collator(some)  # fmt: skip

    def make(output_dir, dataset):
        return trainer(output_dir, dataset, model=regression(), data_collator=seldom)

    assert_kept(make, rows, NUM - 1, tmp_path)


def test_random_collators_are_no_mixing(tmp_path):
    """A mask that is drawn differs from call to call; that is not the neighbour's doing."""

    def masking(rows: list[dict]) -> dict:
        batch = tiny.collate(rows)
        drawn = torch.rand(batch["input_ids"].shape) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 1)}

    assert 0 < influence(lambda out, data: trainer(out, data, data_collator=masking), tiny.records(NUM), 1, tmp_path)


# --- padding -----------------------------------------------------------------------------------------------------------


def _words(padding_side: str, padding: str) -> Any:
    vocabulary = {"<eos>": 0, "<pad>": 1, "<other>": 2, **{f"w{i}": i for i in range(3, tiny.VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<other>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side=padding_side, pad_token=padding, eos_token="<eos>"
    )


def _gpt2(padding_id: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=tiny.VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=padding_id, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return tf.GPT2ForSequenceClassification(config)


def equal_at_the_start() -> list[dict[str, Any]]:
    """Records of one length, but for one that lies where no first look falls."""
    rows = [{"input_ids": row["input_ids"], "label": i % 2} for i, row in enumerate(of_one_length(lambda i: 0))]
    rows[5]["input_ids"] = rows[5]["input_ids"] * 5
    return rows


def _stock(tokenizer: Any) -> Any:
    return tf.DataCollatorWithPadding(tokenizer)


def _own(tokenizer: Any) -> Any:
    return lambda rows: (
        dict(tokenizer.pad([{"input_ids": r["input_ids"]} for r in rows], return_tensors="pt"))
        | {"labels": torch.tensor([r["label"] for r in rows])}
    )


@pytest.mark.parametrize("place", ["data_collator", "processing_class", "function"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("agrees", [True, False], ids=["same id", "other id"])
def test_padding_wherever_the_tokenizer_sits(place, side, agrees, tmp_path):
    """GPT-2 counts positions from the first column, and takes the last token that is not its padding token."""
    tokenizer = _words(side, "<pad>")

    def make(output_dir, dataset):
        where = {
            "data_collator": {"data_collator": _stock(tokenizer)},
            "processing_class": {"data_collator": None, "processing_class": tokenizer},
            "function": {"data_collator": _own(tokenizer)},
        }[place]
        return trainer(output_dir, dataset, model=_gpt2(1 if agrees else 0), **where)

    refusal = assert_kept_or_refused(make, equal_at_the_start(), 5, tmp_path)
    if place == "function" or (side == "right" and (agrees or place == "processing_class")):
        # rows that are joined here are padded as the model expects; the Trainer tells the model of its own tokenizer
        assert not refusal
    else:
        assert "padding" in refusal, refusal


# --- joining -----------------------------------------------------------------------------------------------------------


def test_known_collators_are_those_that_were_read():
    import importlib

    for module, names in KNOWN.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            assert is_known(found) or isinstance(found, type)
    assert is_known(tf.DataCollatorWithPadding(tokenizer=None)) and not is_known(_Subclass(tokenizer=None))
    assert not is_known(tiny.collate)


def test_rows_are_joined_as_a_padding_collator_would():
    rows = tiny.records(6)
    (part,) = Collation(tiny.collate, padding=Padding(0)).parts(rows)
    want = tiny.collate(rows)
    assert part.places == tuple(range(6)) and part.batch.keys() == want.keys()
    assert all(torch.equal(part.batch[key], want[key]) for key in want)


def test_targets_of_another_length_are_padded_apart():
    def pairs(rows: list[dict]) -> dict:
        (row,) = rows
        source, target = torch.tensor([row["s"]]), torch.tensor([row["t"]])
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}

    (part,) = Collation(pairs, padding=Padding(9)).parts([{"s": [1, 2, 3], "t": [4]}, {"s": [5], "t": [6, 7, 8]}])
    assert part.batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert part.batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert part.batch["labels"].tolist() == [[4, -100, -100], [6, 7, 8]]


def test_what_padding_cannot_make_alike_stays_apart():
    def pictures(rows: list[dict]) -> dict:
        (row,) = rows
        return {"pixels": torch.zeros(1, *row["size"]), "name": [row["name"]]}

    rows = [{"size": (2, 2), "name": "a"}, {"size": (3, 3), "name": "b"}, {"size": (2, 2), "name": "c"}]
    parts = Collation(pictures).parts(rows)
    assert [part.places for part in parts] == [(0, 2), (1,)]
    assert parts[0].batch["name"] == ["a", "c"]
