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
from tests import tiny
from tests.adversary.harness import assert_nothing_charged

WRONG = (math.nan, math.inf, -math.inf)


def _numbers(wrong: float, every: int = 2) -> list[dict[str, Any]]:
    """Records of a regression, of which every second has no finite label."""
    return [{**row, "label": wrong if i % every == 1 else i / 10} for i, row in enumerate(tiny.records())]


def _shares(wrong: float) -> list[dict[str, Any]]:
    return [{**row, "label": [0.0, wrong if i % 2 else 1.0]} for i, row in enumerate(tiny.records())]


class Lazy(torch.utils.data.Dataset):
    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def _as_arrays(rows: list[Any]) -> list[Any]:
    return [{**row, "label": np.float32(row["label"])} for row in rows]


def _as_tensors(rows: list[Any]) -> list[Any]:
    return [{**row, "label": torch.tensor(row["label"])} for row in rows]


HOLDERS = (list, tuple, Lazy, datasets.Dataset.from_list, _as_arrays, _as_tensors)


def _refused(tmp_path: Path, match: str, **changes: Any) -> None:
    with pytest.raises(DPConfigError, match=match):
        tiny.trainer(tmp_path / "out", skip_self_check=False, max_steps=2, **changes).train()
    assert_nothing_charged(tmp_path)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("holder", HOLDERS)
def test_labels_that_are_not_finite(wrong: float, holder: Any, tmp_path: Path) -> None:
    model = tiny.model(num_labels=1)
    _refused(tmp_path, "record 1: 'label' holds NaN or infinity", model=model, train_dataset=holder(_numbers(wrong)))


@pytest.mark.parametrize("holder", [list, Lazy, datasets.Dataset.from_list])
def test_shares_of_several_labels_that_are_not_finite(holder: Any, tmp_path: Path) -> None:
    model = tiny.model(problem_type="multi_label_classification")
    _refused(tmp_path, "'label' holds NaN", model=model, train_dataset=holder(_shares(math.nan)))


def test_one_label_among_many(tmp_path: Path) -> None:
    rows = _numbers(0.5)
    rows[37]["label"] = math.nan
    data = datasets.Dataset.from_list(rows)
    _refused(tmp_path, "record 37: 'label' holds NaN", model=tiny.model(num_labels=1), train_dataset=data)


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


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_that_classifies_without_a_padding_token(kind: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "gpt2": lambda: tf.GPT2ForSequenceClassification(
            tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64)
        ),
        "llama": lambda: tf.LlamaForSequenceClassification(
            tf.LlamaConfig(
                vocab_size=40,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                pad_token_id=None,
            )  # fmt: skip
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made[kind]()
    assert model.config.pad_token_id is None
    fix = r"model.config.pad_token_id = tokenizer.pad_token_id"
    _refused(tmp_path, f"fails on training records: ValueError: Cannot handle batch.*{fix}", model=model)
    model.config.pad_token_id = 0
    tiny.trainer(tmp_path / "again", model=model, max_steps=1).train()


def test_a_decoder_that_predicts_text_needs_none(tmp_path: Path) -> None:
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    rows = [{"input_ids": [3, 4, 5 + i % 9], "attention_mask": [1] * 3, "labels": [3, 4, 5]} for i in range(64)]
    collate = tf.default_data_collator
    tiny.trainer(tmp_path / "out", model=model, train_dataset=rows, data_collator=collate, max_steps=1).train()
