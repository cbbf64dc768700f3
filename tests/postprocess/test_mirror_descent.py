"""PDA-DPMD's first-order form: shares by hand, gradients by a plain backward, resume."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.public import PublicGradients
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny


def _public(model, num=8, batch_size=8) -> PublicGradients:
    return PublicGradients(model, RecordLosses(model), tiny.records(num), tiny.collate, batch_size=batch_size)


@pytest.mark.parametrize(
    "schedule, want",
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [1.0, math.cos(math.pi / 8), math.sqrt(0.5), math.sin(math.pi / 8), 0.0, 0.0]),
    ],
)
def test_each_step_mixes_in_its_share(schedule, want):
    model = tiny.model(dropout=0.4).double().train()
    mirror = PublicMirrorDescent(_public(model), num_steps=4, schedule=schedule)
    model.eval()
    loss = model(**tiny.collate(tiny.records(8))).loss  # a mean over records: one label each
    slow = dict(
        zip([n for n, _ in model.named_parameters()], torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )
    model.train()
    for share in want:
        released = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        got = mirror({n: g.detach().clone() for n, g in released.items()})
        for name in released:
            torch.testing.assert_close(
                got[name], share * released[name] + (1 - share) * slow[name], rtol=1e-9, atol=1e-12
            )


def test_refusals():
    public = _public(tiny.model())
    with pytest.raises(DPConfigError, match="'cosine', 'linear'"):
        PublicMirrorDescent(public, num_steps=4, schedule="step")
    with pytest.raises(DPConfigError, match="num_steps=0"):
        PublicMirrorDescent(public, num_steps=0)
