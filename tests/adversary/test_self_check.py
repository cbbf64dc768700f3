"""What the start-up check has to stop, through the real trainer: the run is refused before its first step.

Each of these trained before, and one record moved the sum by more than its clipping norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.preclip import PRECLIPS
from tests.adversary.harness import SLACK, assert_refused, clipped_sums, influence, making, trainer
from tests.adversary.scan.classes import named_classes
from tests.adversary.scan.measure import _Subject
from tests.helpers import tiny
from tests.self_check.cases import quantising

MIXED = "differs from a loop|another record moves it|change with the padding"


class Spread(nn.Module):
    """Adds the others' features in training mode: a contrast over the batch, a batch statistic, a memory bank."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y + 20 * y.mean(dim=0, keepdim=True) if self.training else y


def _spread() -> nn.Module:
    model = tiny.model(dropout=0.0)
    layer = model.bert.encoder.layer[1]
    layer.intermediate = Spread(layer.intermediate)
    with torch.no_grad():
        model.classifier.weight.mul_(100)  # gradients that are clipped
    return model


CASES = {
    "mixing in training mode": (_spread, {}, MIXED),
    "quantised over the batch, bf16": (quantising, {"bf16": True}, MIXED),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_the_first_step(name, tmp_path):
    make_model, changes, words = CASES[name]
    make = making(make_model, clipping_norm=1e-2, **changes)
    assert_refused(make, tiny.records(4), tmp_path, match=words)


def test_without_the_check_the_promise_is_broken(tmp_path):
    """So the adversary is one: a record moves the sum by more than its clipped gradient."""
    assert influence(making(_spread, skip_self_check=True), tiny.records(6), 0, tmp_path) > 1 + SLACK


def test_dropout_keeps_the_promise_and_passes(tmp_path):
    """Masks are drawn for each record, so the check has nothing to say against them."""
    assert clipped_sums(making(lambda: tiny.model(dropout=0.2)), tiny.records(4), [0, 1, 2], tmp_path / "run")


# --- no false alarm ------------------------------------------------------------------------------------------------------

PRECLIPPED = {
    "quantile": {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 1.0}},
    "one_query": {"preconditioner": "one_query"},
    "dp2_rmsprop": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 1}},
    "dp2_adagrad": {"preconditioner": "dp2_adagrad", "preconditioner_kwargs": {"delay": 1, "factored": True}},
    "dp2_yogi": {"preconditioner": "dp2_yogi", "preconditioner_kwargs": {"delay": 1}},
    "adadps": {"preconditioner": "adadps", "public_dataset": tiny.records(64)},
    "subspace": {"preconditioner": "subspace", "public_dataset": tiny.records(64)},
}


def test_every_preconditioner_is_listed():
    assert PRECLIPPED.keys() == PRECLIPS.keys() - {"none"}


@pytest.mark.parametrize("name", PRECLIPPED)
def test_a_preconditioner_passes_in_float64(name, tmp_path):
    changes = {"max_steps": 2, "expected_batch_size": 8, **PRECLIPPED[name]}
    assert trainer(tmp_path, tiny.records(32), **changes).train().global_step == 2


LARGE = 1e5  # activations that cancel
ROOM = pytest.mark.parametrize("has_room", [True, False], ids=["float64 fits", "float64 does not fit"])


def _cancelling() -> nn.Module:
    """The same function as that of the tiny model, by way of large activations: deep models have such channels."""
    model = tiny.model(dropout=0.0).requires_grad_(False)
    model.classifier.requires_grad_(True)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            attention, dense = layer.attention.self, layer.attention.output.dense
            attention.value.bias.add_(LARGE)  # shares of attention add up to 1, but for rounding
            dense.bias.sub_(dense.weight.sum(dim=1) * LARGE)
    return model


def _in_bfloat16(model: nn.Module, monkeypatch: pytest.MonkeyPatch, has_room: bool) -> Any:
    if not has_room:
        monkeypatch.setattr("hf_dpopt.self_check.conditions.free_bytes", lambda device: 0)
    return making(lambda: model, bf16=True)


@ROOM
def test_large_activations_that_cancel_are_not_refused(has_room, tmp_path, monkeypatch):
    """What float32 leaves of them differs with the width of the batch by more than other models' sums do."""
    make = _in_bfloat16(_cancelling(), monkeypatch, has_room)
    assert clipped_sums(make, tiny.records(8), range(8), tmp_path)


@ROOM
def test_a_model_that_lets_padding_reach_some_records_is_refused(has_room, tmp_path, monkeypatch):
    """By a small part of their gradients, and no made-up record is like them."""
    model, rows = _cancelling(), [{**row, "input_ids": [3, *row["input_ids"]]} for row in tiny.records(8)]
    embeddings = model.bert.embeddings
    forward = embeddings.forward

    def leaking(input_ids=None, **others):
        own_B = (input_ids[:, 0] == 3) * 2e-2 * input_ids.size(1)
        hidden = forward(input_ids=input_ids, **others)
        return hidden + own_B.view(-1, 1, 1) * torch.linspace(-1, 1, hidden.size(-1)).to(hidden)

    embeddings.forward = leaking
    assert_refused(_in_bfloat16(model, monkeypatch, has_room), rows, tmp_path, match="records of the dataset")


def test_attention_in_both_directions_is_refused_where_padding_decides_it(tmp_path):
    """PaliGemma without token_type_ids: one record that is padded makes the attention of all others causal."""
    kind = PaliGemmaForConditionalGeneration
    subject: Any = _Subject(named_classes()[kind.__name__], kind, PaliGemmaConfig)
    assert subject.build()
    subject.choose_data()
    assert subject.private_run(lora=False).verdict == "exact"  # the scan gives them
    for row in subject.data.records:
        del row["token_type_ids"]
    with pytest.raises(
        UnsupportedModuleError, match="where no record of a batch is padded.*Give its batches token_type_ids"
    ):
        subject._influences(subject.fresh().to(subject.dtype), tmp_path)
