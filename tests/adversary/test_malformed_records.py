"""Malformed records: told before training to whoever holds the data, left out without a word in a step."""

from __future__ import annotations

import errno
import io
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

from hf_dpopt import DPStorageError
from hf_dpopt.records.losses import RecordLosses
from tests.adversary import harness
from tests.adversary.harness import Lazy, assert_refused, clipped_sums, influence, making, raising
from tests.adversary.test_own_losses import by_record
from tests.helpers import tiny
from tests.reference import clipping as reference

NUM = 90  # more than are looked at before training, where a dataset makes its records when asked
BAD = 50  # not among those

MALFORMED: dict[str, dict[str, Any]] = {
    "token id too large": {"input_ids": [5, tiny.VOCABULARY]},
    "token id negative": {"input_ids": [5, -7]},
    "label outside": {"label": 2},
    "label negative": {"label": -1},
    "float class label": {"label": 1.0},
    "label missing": {"label": None},
    "ids missing": {"input_ids": None},
    "ids are text": {"input_ids": "text"},
    "ids are floats": {"input_ids": [5.0, 6.0]},
    "nested": {"input_ids": [[5, 6]]},
    "ragged": {"input_ids": [[5, 6], [7]]},
    "holds none": {"input_ids": [5, None]},
    "too long": {"input_ids": [5] * 601},
    "mask of another length": {"input_ids": [5, 6, 7], "attention_mask": [1, 1]},
}
EMPTY = {"input_ids": []}


def rows(change: dict[str, Any] | None) -> list[dict[str, Any]]:
    made = harness.masked(NUM)
    if change:
        changed = {**made[BAD], **change}
        if "attention_mask" not in change and isinstance(changed["input_ids"], list):
            changed["attention_mask"] = [1] * len(changed["input_ids"])
        made[BAD] = {name: value for name, value in changed.items() if value is not None}
    return made


def _masked(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in some)
    return {
        name: torch.tensor([list(row[name]) + [0] * (width - len(row[name])) for row in some])
        for name in ("input_ids", "attention_mask")
    } | {"labels": torch.tensor([row["label"] for row in some])}


COLLATORS = {"own": lambda: _masked, "known": lambda: tf.DataCollatorWithPadding(harness.words())}


def _with(collator: str):
    return making(lambda: tiny.model(dropout=0.0, pad_token_id=1), data_collator=COLLATORS[collator]())


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_record_of_a_list_is_told_before_training(kind, tmp_path):
    assert_refused(_with("own"), rows(MALFORMED[kind]), tmp_path, r"[Tt]raining record.*(Correct|Cut)")


@pytest.mark.slow_but(8)
@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("kind", [*MALFORMED, "empty"])
def test_a_malformed_record_of_a_step_adds_nothing(kind, collator, tmp_path):
    """The dataset makes its records when they are asked for, so the record is met in the step that drew it: the sum is
    that of the others, and the run goes on."""
    data = Lazy(rows(MALFORMED.get(kind, EMPTY)))
    assert influence(_with(collator), data, BAD, tmp_path, drawn=[1, 7, BAD, 60, 61]) <= 1e-9


@pytest.mark.parametrize("collator", COLLATORS)
def test_values_out_of_range_reach_no_forward(collator, tmp_path, monkeypatch):
    """On a GPU they would end the process in the step that drew the record."""
    data, losses, seen = Lazy(rows(MALFORMED["token id too large"])), RecordLosses.__call__, []

    def spy(self: RecordLosses, batch: dict[str, Any]) -> torch.Tensor:
        seen.append(batch["input_ids"])
        return losses(self, batch)

    monkeypatch.setattr(RecordLosses, "__call__", spy)
    clipped_sums(_with(collator), data, [1, 7, BAD, 60, 61], tmp_path)
    assert seen and all(int(ids.max()) < tiny.VOCABULARY for ids in seen)


def test_a_record_that_cannot_be_read_adds_nothing(tmp_path):
    data = Lazy(rows(None), raising(KeyError("the picture is damaged")), BAD)
    assert influence(_with("own"), data, BAD, tmp_path, drawn=[1, BAD, 60]) == 0


def test_a_picture_that_cannot_be_decoded_adds_nothing(tmp_path):
    """Stored columns are read together, and one damaged file must not stop them all."""

    def png(i: int) -> bytes:
        content = io.BytesIO()
        Image.new("RGB", (8, 8), (i, 0, 0)).save(content, "PNG")
        return content.getvalue()

    pictures = [{"bytes": png(i) if i != BAD else b"no picture", "path": None} for i in range(NUM)]
    data = datasets.Dataset.from_dict(
        {"image": pictures, "label": [i % 2 for i in range(NUM)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )

    def collate(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = [torch.from_numpy(np.array(row["image"])).permute(2, 0, 1).double() for row in some]
        return {"pixel_values": torch.stack(pixels) / 255, "labels": torch.tensor([row["label"] for row in some])}

    def model():
        made = tiny.made(tf.ViTForImageClassification, image_size=8, patch_size=4)
        made.vit.embeddings.requires_grad_(False)
        return made

    make = making(model, data_collator=collate, per_example_loss_func=by_record)
    assert influence(make, data, BAD, tmp_path, drawn=[1, BAD, 60]) == 0


def test_what_the_machine_does_is_no_record(tmp_path):
    """A disk that is gone is not hidden: it would leave noise alone."""

    gone = Lazy(rows(None), raising(OSError(errno.EIO, "the disk is gone")), BAD)
    with pytest.raises(DPStorageError, match=r"^a file could not be read or written \(the disk is gone\)"):
        clipped_sums(_with("own"), gone, [1, BAD], tmp_path)


class _ChoosyForSequenceClassification(tf.BertForSequenceClassification):
    """Fails on one word, as BART's head does on records with another number of end tokens."""

    def forward(self, input_ids=None, attention_mask=None, **inputs):
        if (input_ids == 39).any():
            raise ValueError("there is no 39")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


def _named(some: list[dict[str, Any]]) -> dict[str, Any]:
    return _masked(some) | {"name": [f"w{row['input_ids'][0]}" for row in some]}


def odd_ones(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
    """The loss of records whose name, a text of the batch, is an odd word; 0 of the others."""
    return torch.stack([
        loss * (int(name[1:]) % 2)
        for loss, name in zip(by_record(outputs, labels), inputs["name"], strict=False)
    ])  # fmt: skip


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("loss", [None, odd_ones])
def test_a_record_on_which_the_model_fails_adds_nothing(engine, loss, tmp_path):
    """Nor does it give the others the texts of the first of them, where a loss reads some."""
    made = [{**row, "input_ids": [min(i, 38) for i in row["input_ids"]]} for row in rows({"input_ids": [3, 4]})]
    bad = [{**row, "input_ids": [38, 39]} if i == BAD else row for i, row in enumerate(made)]
    assert {row["input_ids"][0] % 2 for row in made} == {0, 1}

    def model():
        return _ChoosyForSequenceClassification(tiny.model(dropout=0.0).config)

    make = making(
        model, data_collator=_masked if loss is None else _named, clipping_engine=engine, skip_self_check=True,
        per_example_loss_func=loss,
    )  # fmt: skip
    drawn = [1, 7, BAD, 60, 61, 62]
    got = clipped_sums(make, Lazy(bad), drawn, tmp_path / "with")
    want = clipped_sums(make, Lazy(bad), [i for i in drawn if i != BAD], tmp_path / "without")
    assert any(total.any() for total in want.values())
    assert reference.relative_error(got, want) < 1e-9


def without_38(outputs: Any, labels: torch.Tensor, inputs: Any) -> torch.Tensor:
    return by_record(outputs, labels)[inputs["input_ids"][:, 0] != 38]


def test_a_record_that_a_loss_leaves_out_stops_no_step(tmp_path):
    """The losses of its batch are one too few."""
    bad = [{**row, "input_ids": [min(i, 37) for i in row["input_ids"]]} for row in rows(None)]
    bad[BAD] = {**bad[BAD], "input_ids": [38, 5], "attention_mask": [1, 1]}
    make = making(data_collator=_masked, per_example_loss_func=without_38)
    got = clipped_sums(make, Lazy(bad), [1, 7, BAD, 60], tmp_path / "with")
    want = clipped_sums(make, Lazy(bad), [1, 7, 60], tmp_path / "without")
    assert reference.relative_error(got, want) < 1e-9
    none = clipped_sums(make, Lazy(bad), [BAD], tmp_path / "alone")
    assert not any(total.any() for total in none.values())


def test_a_model_that_fails_on_every_record_is_told_before_training(tmp_path):
    class NeverForSequenceClassification(tf.BertForSequenceClassification):
        def forward(self, input_ids=None, **inputs):
            raise ValueError("there is no input")

    make = making(lambda: NeverForSequenceClassification(tiny.model().config), data_collator=_masked)
    assert_refused(make, rows(None), tmp_path, "fails on training records: ValueError: there is no input")


# --- stored columns ----------------------------------------------------------------------------------------------------

STORED = {
    "token id too large": ("'input_ids' holds 40, which is outside 0 to 39, the model's vocabulary"),
    "token id negative": "'input_ids' holds -7",
    "label outside": "'label' holds 2, which is outside 0 to 1, the labels of the model",
    "label missing": "'label' is missing",
    "holds none": "'input_ids' holds a missing value",
    "mask of another length": "'attention_mask' has 2 values for the 3 tokens",
}


@pytest.mark.parametrize("kind", STORED)
def test_stored_columns_are_read_whole(kind, tmp_path):
    made = datasets.Dataset.from_list(rows(MALFORMED[kind]))
    assert_refused(_with("own"), made, tmp_path, f"Training record {BAD}: {STORED[kind]}")


def test_missing_values_of_other_columns_are_told(tmp_path):
    """`default_data_collator` would leave the column out of every batch that such a record comes first in."""
    made = rows(None)
    made[BAD] = {**made[BAD], "token_type_ids": None}
    data = datasets.Dataset.from_list([{"token_type_ids": [0] * len(row["input_ids"]), **row} for row in made])
    assert_refused(_with("own"), data, tmp_path, "'token_type_ids' (of the training set has|is) missing")


def test_stored_float_classes(tmp_path):
    made = datasets.Dataset.from_list([{**row, "label": float(row["label"])} for row in rows(None)])
    assert_refused(_with("own"), made, tmp_path, "holds a fraction or a float, and the model has classes")
