"""What `explain` says against what the engine does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hf_dpopt.clipping import explain, make_engine, unruled
from hf_dpopt.clipping.contributions import Dense, Outer
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.records.losses import RecordLosses
from tests.grads.models import FAMILIES, batch_for


class Swish(nn.Module):
    """A layer no rule knows: two parameters of unlike sizes."""

    def __init__(self):
        super().__init__()
        self.slope, self.matrix = nn.Parameter(torch.ones(1)), nn.Parameter(torch.eye(4))

    def forward(self, x):
        return (x @ self.matrix) * torch.sigmoid(self.slope * x)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "t5", "bert"])
def test_the_switch_it_names_is_where_the_engine_switches(family):
    model = FAMILIES[family].full()
    batch = batch_for(model)
    engine = make_engine(model, make_clipping("flat", 1.0))
    text = explain(engine)
    for name in engine.parameters:
        assert re.sub(r"\d+", "*", name) in text or name in text
    switches = {
        (layer, int(tokens)) for layer, tokens in re.findall(r"(\w+ \d+x\d+): Gram matrices below (\d+) tokens", text)
    }
    assert switches
    seen = set()

    def receive(name, contribution):
        p = engine.parameters[name]
        if isinstance(contribution, Outer):
            tokens, size = (
                contribution.left_BTP.size(1),
                contribution.left_BTP.size(2) + contribution.right_BTQ.size(2),
            )
            assert p.numel() > tokens * size
            assert any(layer.endswith(f" {p.size(0)}x{p.size(1)}") and tokens < at for layer, at in switches), name
            seen.add(name)
        elif isinstance(contribution, Dense) and p.dim() == 2:
            seen.add(name)

    losses = RecordLosses(model)
    with engine.capture.recording(len(batch["input_ids"]), receive):
        losses(batch).sum().backward()
    assert seen


def test_tied_weights_are_pointed_out():
    model = FAMILIES["gpt2"].full()
    lines = explain(make_engine(model, make_clipping("flat", 1.0))).splitlines()
    assert sum("used more than once" in line for line in lines) == 2
    assert all("wte" in line for line in lines if "used more than once" in line)


def test_layers_without_a_rule_are_named():
    model = FAMILIES["bert"].full()
    assert unruled(make_engine(model, make_clipping("flat", 1.0))) == []
    model.classifier = nn.Sequential(Swish())
    engine = make_engine(model, make_clipping("flat", 1.0))
    assert unruled(engine) == ["classifier.0 (Swish)"]
    assert "classifier.*.matrix: Swish 4x4: no rule" in explain(engine).replace("classifier.0", "classifier.*")
