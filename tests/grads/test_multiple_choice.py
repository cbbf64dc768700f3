"""Models that score several choices of a record: the record is clipped, not the choice."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import clipped_gradient_sum
from hf_dpopt.records.losses import RecordLosses
from tests.adversary import harness
from tests.helpers import tiny
from tests.reference import clipping as reference

NUM_RECORDS, NUM_CHOICES = 3, 4


def _bert() -> nn.Module:
    return tiny.made(tf.BertForMultipleChoice).double()


def _lora() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(_bert(), config).double()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


MODELS = {
    "BERT": _bert,
    "LoRA": _lora,
    "MPNet, a bias for the batch": lambda: tiny.made(tf.MPNetForMultipleChoice).double(),
    "ALBERT": lambda: tiny.made(tf.AlbertForMultipleChoice, embedding_size=8).double(),
}


def _records(num: int = NUM_RECORDS, num_choices: int = NUM_CHOICES) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    shape = (num, num_choices, 9)
    ids = torch.randint(3, tiny.VOCABULARY, shape, generator=generator)
    mask = torch.arange(9) < torch.randint(3, 10, shape[:2], generator=generator).unsqueeze(-1)
    labels = torch.randint(0, num_choices, (num,), generator=generator)
    return [{"input_ids": ids[i] * mask[i], "attention_mask": mask[i].long(), "labels": labels[i]} for i in range(num)]


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("model", MODELS)
def test_the_clipped_sum_is_that_of_a_loop_over_records(model, engine):
    made = MODELS[model]().eval()
    batch = {k: torch.stack([r[k] for r in _records()]) for k in ("input_ids", "attention_mask", "labels")}
    norm = 0.05
    got = clipped_gradient_sum(made, batch, clipping_norm=norm, engine=engine)
    want = reference.clipped_sum(made, batch, norm)
    assert reference.relative_error(got, want) < 1e-10


@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_a_record_moves_a_step_by_its_clip_at_most(tmp_path, num_choices):
    make = harness.making(_bert, data_collator=tf.default_data_collator, clipping_norm=1.0)
    harness.assert_kept(make, _records(6, num_choices), 2, tmp_path)


NUM, ODD = 200, 150  # the odd record lies where no sample before training looks


def _making(**changes: Any) -> harness.Make:
    return harness.making(_bert, data_collator=tf.DataCollatorForMultipleChoice(harness.words()), **changes)


def _one_more_choice(num: int, odd: int) -> list[dict[str, Any]]:
    """Records of three choices, as lists; one has four."""
    rows = []
    for i, record in enumerate(_records(num)):
        num_choices = 4 if i == odd else 3
        ids, mask = (record[k][:num_choices] for k in ("input_ids", "attention_mask"))
        lists = {"input_ids": ids.tolist(), "attention_mask": (mask | (torch.arange(9) == 0)).long().tolist()}
        rows.append({**lists, "label": int(record["labels"]) % num_choices})
    return rows


@pytest.mark.parametrize("record", [ODD, 7])
def test_the_first_record_does_not_decide_how_many_choices_the_others_have(tmp_path, record):
    """The collator of transformers takes the number of choices from the first record, and regroups those of the rest."""
    ratio = harness.influence(
        _making(clipping_norm=1.0), _one_more_choice(NUM, ODD), record, tmp_path, drawn=[ODD, 7, 3, 8, 9]
    )
    assert 1e-3 < ratio <= 1 + harness.SLACK


def test_a_user_one_of_whose_records_has_more_choices(tmp_path):
    rows = [{**row, "author": i // 4} for i, row in enumerate(_one_more_choice(NUM, ODD))]
    make = _making(privacy_unit="user", user_id_column="author", records_per_user=4)
    users = [ODD // 4, 0, 1, 2]
    ratio = harness.influence(make, rows, ODD // 4, tmp_path, drawn=users)
    assert 1e-3 < ratio <= 1 + harness.SLACK


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("label", [3, -1, -100, [3]])
def test_a_label_that_is_no_choice_reaches_no_forward(tmp_path, label, monkeypatch):
    """On a GPU it would end the process in the step that drew the record."""
    rows = _one_more_choice(NUM, NUM)
    if isinstance(label, list):  # one label in a list, as some preprocessing leaves it
        rows = [{**row, "label": [row["label"]]} for row in rows]
    rows[ODD]["label"] = label
    seen: list[torch.Tensor] = []
    losses = RecordLosses.__call__
    monkeypatch.setattr(
        RecordLosses, "__call__", lambda self, batch: seen.append(batch["labels"]) or losses(self, batch)
    )
    harness.assert_adds_nothing(_making(skip_self_check=True), rows, ODD, tmp_path, drawn=[ODD, 7, 3])
    assert seen and all(bool(((labels >= 0) & (labels < 3)).all()) for labels in seen)
