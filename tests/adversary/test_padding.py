"""Padding that is guessed: targets padded by an undeclared token, and records that have nothing but padding.

The reference is the gradient of each record alone in its step, without padding, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset
from torch import nn

from hf_dpopt import DPConfigError, UnsupportedModuleError
from hf_dpopt.records.collation import length_of
from hf_dpopt.records.losses import token_mean
from tests.adversary.harness import CLIPPING_NORM, SLACK, assert_refused, clipped_sums, making, trainer, words
from tests.adversary.matrix import HEADS, stock
from tests.helpers import tiny

NUM, LONG = 40, 33  # records; the long one is not among those that are read before training
Rows = list[dict[str, Any]]


def _model(head: str, attention: str = "eager") -> torch.nn.Module:
    torch.manual_seed(0)
    model: Any = HEADS[head][0]()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # gradients that are clipped
    return model


def _rows(head: str) -> Rows:
    generator = torch.Generator().manual_seed(5)
    kind, made = HEADS[head][1], []
    for i in range(NUM):
        ids = torch.randint(3, tiny.VOCABULARY, (40 if i == LONG else 4,), generator=generator).tolist()
        labels = {"class": i % 2, "number": 10.5 + i, "tags": [j % 2 for j in range(len(ids))], "text": ids}[kind]
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return made


def _distance(together: dict, alone: Sequence[dict]) -> float:
    """Distance of a sum of several records from the sum of each alone, in clipping norms."""
    squares = [(together[name] - sum(one[name] for one in alone)).square().sum() for name in together]
    return float(torch.stack(squares).sum().sqrt()) / CLIPPING_NORM


# --- records that have nothing to attend to ----------------------------------------------------------------------------

EMPTY = [0, 7, 11]  # the first is among the records that are read before training
NOTHING: dict[str, Callable[[list[int]], dict[str, list[int]]]] = {
    "no mask": lambda ids: {"attention_mask": [0] * len(ids)},
    "padding alone": lambda ids: {"input_ids": [ids[0], 1, 1, 1], "attention_mask": [0, 1, 1, 1]},
}


@pytest.mark.parametrize(
    ("head", "attention", "nothing"),
    [
        ("classes", "eager", "no mask"), ("classes", "sdpa", "no mask"), ("regression", "eager", "no mask"),
        ("tokens", "eager", "no mask"), ("causal", "eager", "no mask"), ("last token", "eager", "no mask"),
        ("last token", "sdpa", "padding alone"), ("sequences", "eager", "no mask"), ("sequences", "sdpa", "no mask"),
    ],
)  # fmt: skip
def test_a_record_that_attends_to_nothing_is_empty(head, attention, nothing, tmp_path):
    """It would attend to padding, of which there is as much as the longest record of the batch has tokens."""
    rows = _rows(head)
    for i in EMPTY:
        rows[i] |= NOTHING[nothing](rows[i]["input_ids"])

    make = making(lambda: _model(head, attention), data_collator=stock(HEADS[head][1], "right"))
    together = clipped_sums(make, rows, [*EMPTY, LONG], tmp_path / "together")
    moved = _distance(together, [clipped_sums(make, rows, [LONG], tmp_path / "alone")])
    assert moved <= SLACK, f"records that attend to nothing add {moved:.3g} clipping norms"


def test_a_training_set_that_attends_to_nothing_is_refused(tmp_path):
    rows = [{**row, "attention_mask": [0] * len(row["input_ids"])} for row in _rows("classes")]
    make = making(lambda: _model("classes"), data_collator=stock("class", "right"))
    assert_refused(make, rows, tmp_path, "None of the records that were read can be used: .*masked as a whole")


def _counts_every_target(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Whatever the mask says; the padding of a collator has no target."""
    return token_mean(outputs.logits[:, :-1].clone(), labels[:, 1:])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_own_loss_that_counts_places_with_nothing_to_attend_to(attention, tmp_path):
    """A causal model's first places see nothing where the record masks them: eager attention is uniform over all."""
    rows = _rows("causal")
    rows[7]["attention_mask"] = [0, 0, 1, 1]
    model, collate = lambda: _model("causal", attention), stock("text", "right")
    make = making(model, data_collator=collate, per_example_loss_func=_counts_every_target)
    try:
        together = clipped_sums(make, rows, [7, LONG], tmp_path / "together")
    except DPConfigError as error:
        assert attention == "eager" and "masks its first tokens" in str(error)
        return
    moved = _distance(together, [clipped_sums(make, rows, [i], tmp_path / f"alone {i}") for i in (7, LONG)])
    assert moved <= SLACK, f"a record beside a longer one gives another gradient, by {moved:.3g} clipping norms"


# --- targets -------------------------------------------------------------------------------------------------------------


def _targets(i: int) -> list[int]:
    return [9] * 40 if i == LONG else [3 + i % 9, 4, 0]


DRAWN = [3, 7, LONG]


def _check_targets(rows: Rows, collate: Callable[[torch.nn.Module], Any], padding_id: int, folder: Path) -> None:
    def make(out: Path, data: Any) -> Any:
        model = _model("sequences")
        model.config.pad_token_id = padding_id
        return trainer(out, data, model=model, data_collator=collate(model), remove_unused_columns=False)

    together = clipped_sums(make, rows, DRAWN, folder / "together")
    moved = _distance(together, [clipped_sums(make, rows, [i], folder / f"alone {i}") for i in DRAWN])
    assert moved <= SLACK, f"records beside others give a sum that is {moved:.3g} clipping norms from theirs alone"


@pytest.mark.parametrize(("padded_by", "padding_id"), [(-100, 2), (0, 1), (1, 1), (1, 2), (2, 1)])
def test_targets_padded_by_any_token(padded_by, padding_id, tmp_path):
    """The tokenizer pads with 1; what the config says and what pads the labels may be something else."""
    rows = [{**row, "labels": _targets(i)} for i, row in enumerate(_rows("sequences"))]

    def collate(model: torch.nn.Module) -> Any:
        return tf.DataCollatorForSeq2Seq(words(), model=model, label_pad_token_id=padded_by)

    _check_targets(rows, collate, padding_id, tmp_path)


def test_targets_at_masked_places_of_the_decoder(tmp_path):
    """The first place of the decoder sees itself alone; masked, it attends to as many places as there are."""
    rows = [{**row, "labels": _targets(i)} for i, row in enumerate(_rows("sequences"))]

    def collate(some: Rows) -> dict[str, torch.Tensor]:  # of one record at a time
        ids, labels = (torch.tensor([row[name] for row in some]) for name in ("input_ids", "labels"))
        mask = torch.ones_like(labels)
        mask[:, 0] = 0
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
                "decoder_attention_mask": mask}  # fmt: skip

    def alone(some: Rows) -> dict[str, torch.Tensor]:
        return collate(some) if len(some) == 1 else tf.default_data_collator(_of_one_width(some, collate))

    _check_targets(rows, lambda model: alone, 1, tmp_path)


def _of_one_width(some: Rows, collate: Callable[[Rows], dict[str, torch.Tensor]]) -> Rows:
    each = [{name: value[0].tolist() for name, value in collate([row]).items()} for row in some]
    fill = {"input_ids": 1, "labels": -100}
    widths = {name: max(len(row[name]) for row in each) for name in each[0]}
    return [
        {name: value + [fill.get(name, 0)] * (widths[name] - len(value)) for name, value in row.items()}
        for row in each
    ]


class ByWidth(nn.Module):
    """Scales its output by the width of the batch in steps of eight tokens, as a model that pools in windows does."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        y = self.layer(*args, **kwargs)
        return y * (1 + y.size(1) // 8)


@pytest.mark.parametrize("keeps", [list, Dataset.from_list])
def test_choices_are_as_long_as_their_tokens(keeps, tmp_path):
    """Their number was taken for that: nothing was compared beside a shorter record, and this model trained."""
    tokenizer = tiny.byte_tokenizer()
    rows = [
        {"input_ids": [[5] * (4 + i), [6] * 3], "attention_mask": [[1] * (4 + i), [1] * 3], "label": i % 2}
        for i in range(24)
    ]
    model = tiny.made(tf.BertForMultipleChoice, vocab_size=len(tokenizer))
    model.bert.embeddings = ByWidth(model.bert.embeddings)
    collator = tf.DataCollatorForMultipleChoice(tokenizer)
    assert length_of(rows[9]) == 13
    refused = tiny.trainer(
        tmp_path / "out", model=model, train_dataset=keeps(rows), data_collator=collator,
        skip_self_check=False,
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModuleError, match="of records of the dataset is not the sum of what each gives alone"
    ):
        refused.train()
