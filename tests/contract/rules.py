"""What every clipping rule has to keep: sums, norms and clipping as a loop over records finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dpopt import clipped_gradient_sum
from hf_dpopt.clipping.rules import fallback, rule_for
from tests.reference import clipping as reference

NUM_RECORDS, CLIPPING_NORM = 4, 0.3


class Case:
    """A layer between two linear ones, and inputs that reach it.

    Args:
        layer: freshly made, in float64.
        inputs: of the whole model, (records, ...).
        into: from the inputs to what the layer takes; a linear layer on the last dimension by default.
    """

    def __init__(self, layer: nn.Module, inputs: torch.Tensor, into: nn.Module | None = None):
        self.layer, self.inputs, self.into = layer.double(), inputs, into


class _Model(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        width = case.inputs.size(-1)
        self.into = case.into if case.into is not None else nn.Linear(width, width).double()
        self.layer = case.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.into(x)).flatten(1)


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs * torch.linspace(-1, 2, outputs.size(1)).to(outputs)).sum(dim=1).sin() + 0 * labels


def _of_record(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    return _loss(model(row["x"]), row["labels"]).sum()


def check_rule(make: Callable[[], Case]) -> None:
    """Both engines, with all parameters and with each one alone, to 1e-9 in float64; and no record depends on others.

    Args:
        make: a case; called anew for each way.
    """
    names = [name for name, _ in make().layer.named_parameters()]
    assert rule_for(make().layer) is not fallback.forward, "the layer has no rule: the fallback runs it"
    for frozen in ([], *([name] for name in names if len(names) > 1)):
        for engine in ("book_keeping", "two_pass"):
            torch.manual_seed(3)
            case = make()
            model, inputs = _Model(case), case.inputs
            for name in frozen:
                model.layer.get_parameter(name).requires_grad_(False)
            labels = torch.zeros(len(inputs), dtype=torch.float64)
            batch: dict[str, Any] = {"x": inputs, "labels": labels}
            got = clipped_gradient_sum(model, batch, clipping_norm=CLIPPING_NORM, engine=engine, loss=_loss)
            want = reference.clipped_sum(model, batch, CLIPPING_NORM, loss=_of_record)
            assert got.keys() == want.keys()
            for name in want:
                torch.testing.assert_close(got[name].double(), want[name], rtol=1e-8, atol=1e-10)
