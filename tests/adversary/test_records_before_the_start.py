"""Records that every step would drop without a word, and models that fail on a batch: refused before the start."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers as tf

from hf_dpopt import DPConfigError
from tests.adversary.harness import Lazy, assert_nothing_charged
from tests.helpers import tiny


def _numbers(wrong: float, every: int = 2) -> list[dict[str, Any]]:
    """Records of a regression, of which every second has no finite label."""
    return [{**row, "label": wrong if i % every == 1 else i / 10} for i, row in enumerate(tiny.records())]


def _shares(wrong: float) -> list[dict[str, Any]]:
    return [{**row, "label": [0.0, wrong if i % 2 else 1.0]} for i, row in enumerate(tiny.records())]


def _as_arrays(rows: list[Any]) -> list[Any]:
    return [{**row, "label": np.float32(row["label"])} for row in rows]


def _as_tensors(rows: list[Any]) -> list[Any]:
    return [{**row, "label": torch.tensor(row["label"])} for row in rows]


HOLDERS = (list, tuple, Lazy, datasets.Dataset.from_list, _as_arrays, _as_tensors)


def _refused(tmp_path: Path, match: str, **changes: Any) -> None:
    with pytest.raises(DPConfigError, match=match):
        tiny.trainer(tmp_path / "out", skip_self_check=False, max_steps=2, **changes).train()
    assert_nothing_charged(tmp_path)


ONE = [row if i != 37 else {**row, "label": math.nan} for i, row in enumerate(_numbers(0.5))]
LABELS = [
    *((holder, _numbers(wrong), "record 1") for holder in HOLDERS for wrong in (math.nan, math.inf, -math.inf)),
    *((holder, _shares(math.nan), "") for holder in (list, Lazy, datasets.Dataset.from_list)),
    (datasets.Dataset.from_list, ONE, "record 37"),
]


@pytest.mark.parametrize(("holder", "rows", "told"), LABELS)
def test_labels_that_are_not_finite(holder: Any, rows: list[Any], told: str, tmp_path: Path) -> None:
    several = (
        {"problem_type": "multi_label_classification"} if isinstance(rows[0]["label"], list) else {"num_labels": 1}
    )
    _refused(tmp_path, f"{told}.*'label' holds NaN", model=tiny.model(**several), train_dataset=holder(rows))


class FromVectors(torch.nn.Module):
    """A model without tokens, whose features may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.config = tf.PretrainedConfig(num_labels=1)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return tf.modeling_outputs.SequenceClassifierOutput(logits=self.layer(x))


def test_features_that_are_not_finite(tmp_path: Path) -> None:
    rows = [{"x": [math.nan if i % 2 else 1.0, 2.0, 3.0], "labels": float(i)} for i in range(64)]
    loss = lambda outputs, labels: (outputs.logits.squeeze(-1) - labels).square()  # noqa: E731
    collate = tf.default_data_collator
    _refused(
        tmp_path, r"losses of \d of 8 training records are NaN", model=FromVectors(), train_dataset=Lazy(rows),
        data_collator=collate, per_example_loss_func=loss,
    )  # fmt: skip


def test_a_loss_of_the_user_may_read_nan_as_missing(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        known = ~labels.isnan()
        return torch.where(known, (outputs.logits.squeeze(-1) - labels.nan_to_num()).square(), 0.0)

    made = tiny.trainer(
        tmp_path / "out", model=tiny.model(num_labels=1), train_dataset=_numbers(math.nan),
        per_example_loss_func=loss, max_steps=1,
    )  # fmt: skip
    assert made.train().global_step == 1


@pytest.mark.parametrize("kind", [tf.GPT2ForSequenceClassification, tf.LlamaForSequenceClassification])
def test_a_decoder_that_classifies_without_a_padding_token(kind: type, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.made(kind, pad_token_id=None)
    assert model.config.pad_token_id is None
    fix = r"model.config.pad_token_id = tokenizer.pad_token_id"
    _refused(tmp_path, f"fails on training records: ValueError: Cannot handle batch.*{fix}", model=model)
    model.config.pad_token_id = 0
    assert tiny.trainer(tmp_path / "again", model=model, max_steps=1).train().global_step == 1


def test_a_decoder_that_predicts_text_needs_none(tmp_path: Path) -> None:
    model = tiny.made(tf.GPT2LMHeadModel)
    rows = [{"input_ids": [3, 4, 5 + i % 9], "attention_mask": [1] * 3, "labels": [3, 4, 5]} for i in range(64)]
    collate = tf.default_data_collator
    made = tiny.trainer(tmp_path / "out", model=model, train_dataset=rows, data_collator=collate, max_steps=1)
    assert made.train().global_step == 1
