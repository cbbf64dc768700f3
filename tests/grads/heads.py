"""Tiny models with the heads people finetune beside text classifiers and language models, and batches for them.

`HEADS` is a table of docs/support.md (`python -m tests.grads.support_table` writes it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from tests.grads.models import (
    _DECODER,
    _ENCODER,
    LENGTHS,
    NUM_RECORDS,
    NUM_TOKENS,
    VOCABULARY,
    Make,
    _made,
    lora,
)

NUM_LABELS, NUM_CHOICES = 3, 2
Batch = dict[str, torch.Tensor]
_IMAGES: dict[str, Any] = dict(
    image_size=8, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, num_labels=NUM_LABELS,
)  # fmt: skip


def _text() -> Batch:
    ids_BT = torch.randint(3, VOCABULARY, (NUM_RECORDS, NUM_TOKENS))
    mask_BT = (torch.arange(NUM_TOKENS) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT}


def _tags() -> Batch:
    text = _text()
    labels_BT = torch.randint(NUM_LABELS, text["input_ids"].shape).masked_fill(text["attention_mask"] == 0, -100)
    labels_BT[:, 0] = -100  # as sub-words and special tokens have
    return {**text, "labels": labels_BT}


def _spans() -> Batch:
    text, lengths_B = _text(), torch.tensor(LENGTHS)
    starts_B = torch.randint(0, NUM_TOKENS, (NUM_RECORDS,)) % lengths_B
    return {**text, "start_positions": starts_B, "end_positions": lengths_B - 1}


def _choices() -> Batch:
    rows = [_text() for _ in range(NUM_CHOICES)]
    together = {name: torch.stack([row[name] for row in rows], dim=1) for name in rows[0]}
    return {**together, "labels": torch.randint(NUM_CHOICES, (NUM_RECORDS,))}


def _several_labels() -> Batch:
    return {**_text(), "labels": torch.randint(2, (NUM_RECORDS, NUM_LABELS)).double()}


def _numbers() -> Batch:
    return {**_text(), "labels": torch.randn(NUM_RECORDS).double()}


def _pictures() -> Batch:
    pixels = torch.randn(NUM_RECORDS, 3, 8, 8).double()
    return {"pixel_values": pixels, "labels": torch.randint(NUM_LABELS, (NUM_RECORDS,))}


def _sounds() -> Batch:
    return {
        "input_values": torch.randn(NUM_RECORDS, 24, 16).double(),
        "labels": torch.randint(NUM_LABELS, (NUM_RECORDS,)),
    }


def _token_loss(outputs: Any, row: Batch) -> torch.Tensor | None:
    return None if (row["labels"] == -100).all() else F.cross_entropy(outputs.logits[0], row["labels"][0])


def _span_loss(outputs: Any, row: Batch) -> torch.Tensor:
    padding = row["attention_mask"] == 0
    ends = ((outputs.start_logits, row["start_positions"]), (outputs.end_logits, row["end_positions"]))
    return sum(F.cross_entropy(logits.masked_fill(padding, -1e300), at) for logits, at in ends) / 2  # type: ignore[return-value]


def _class_loss(outputs: Any, row: Batch) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, row["labels"])


def _labels_loss(outputs: Any, row: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs.logits, row["labels"])


def _number_loss(outputs: Any, row: Batch) -> torch.Tensor:
    return F.mse_loss(outputs.logits.squeeze(), row["labels"].squeeze())


@dataclasses.dataclass(frozen=True)
class Head:
    """A row of the table of heads.

    Attributes:
        label: model and head.
        full: makes the model, all of it trained.
        targets: layers for LoRA.
        batch: makes records.
        loss: of one record, from the model's outputs; None if it has no target.
        why: what is special.
    """

    label: str
    full: Make
    targets: list[str]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch], torch.Tensor | None]
    why: str = ""

    @property
    def with_lora(self) -> Make:
        return lora(self.full, self.targets, modules_to_save=None)

    def loss_of(self, model: nn.Module, row: Batch) -> torch.Tensor | None:
        targets = ("labels", "start_positions", "end_positions")
        return self.loss(model(**{name: x for name, x in row.items() if name not in targets}), row)


_ALONE = "class token and positions trained, a record at a time; Conv2d, too"
HEADS: dict[str, Head] = {
    "bert-tags": Head(
        "BERT, token classification", _made(tf.BertForTokenClassification, _ENCODER, num_labels=NUM_LABELS), ["query"],
        _tags, _token_loss,
    ),
    "llama-tags": Head(
        "Llama, token classification", _made(tf.LlamaForTokenClassification, _DECODER, num_labels=NUM_LABELS),
        ["q_proj"], _tags, _token_loss,
    ),
    "bert-spans": Head(
        "BERT, extractive question answering", _made(tf.BertForQuestionAnswering, _ENCODER), ["query"], _spans,
        _span_loss, "the windows of a document are clipped as one: `--privacy_unit user`",
    ),
    "bert-choices": Head(
        "BERT, multiple choice", _made(tf.BertForMultipleChoice, _ENCODER), ["query"], _choices, _class_loss,
        "the record is clipped, not the choice",
    ),
    "bert-labels": Head(
        "BERT, several labels",
        _made(tf.BertForSequenceClassification, _ENCODER, num_labels=NUM_LABELS,
              problem_type="multi_label_classification"),
        ["query"], _several_labels, _labels_loss,
    ),
    "bert-numbers": Head(
        "BERT, regression", _made(tf.BertForSequenceClassification, _ENCODER, num_labels=1), ["query"], _numbers,
        _number_loss,
    ),
    "vit": Head(
        "ViT, image classification", _made(tf.ViTForImageClassification, _IMAGES), ["q_proj"], _pictures,
        _class_loss, _ALONE,
    ),
    "deit": Head(
        "DeiT, image classification", _made(tf.DeiTForImageClassification, _IMAGES), ["q_proj"], _pictures,
        _class_loss, _ALONE,
    ),
    "beit": Head(
        "BEiT, image classification",
        _made(tf.BeitForImageClassification, _IMAGES, layer_scale_init_value=0.1, drop_path_rate=0.0,
              use_relative_position_bias=True),
        ["q_proj"], _pictures, _class_loss, "scales of layers and relative biases, too",
    ),
    "dinov2": Head(
        "DINOv2, image classification",
        _made(tf.Dinov2ForImageClassification, _IMAGES, mlp_ratio=2, layerscale_value=0.5), ["q_proj"],
        _pictures, _class_loss, _ALONE,
    ),
    "ast": Head(
        "AST, audio classification",
        _made(tf.ASTForAudioClassification, _IMAGES, num_mel_bins=16, max_length=24, frequency_stride=4,
              time_stride=4), ["q_proj"], _sounds, _class_loss, _ALONE,
    ),
}  # fmt: skip
