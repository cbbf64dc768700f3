"""Layers without a rule: whatever a forward does with a record, no step ends in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from tests.reference import clipping as reference


class _Doubled(torch.autograd.Function):
    """A Function in the old style, which torch.func cannot transform."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Branching(nn.Module):
    """Records that begin with a large number go through unchanged, without a look at the weights."""

    def __init__(self, ignores_input: bool = False):
        super().__init__()
        self.weight, self.ignores_input = nn.Parameter(torch.randn(4)), ignores_input

    def forward(self, x):
        skipped = [torch.zeros_like(row) if self.ignores_input else row for row in x]
        rows = [_Doubled.apply(row * self.weight) if row[0] < 1 else skipped[i] for i, row in enumerate(x)]
        return torch.stack(rows)


class Model(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), layer, nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return self.last(self.layer(self.first(x))).squeeze(-1)


def _loss(outputs, labels):
    return (outputs - labels).square()


def _batch(offsets: list[float]) -> dict[str, torch.Tensor]:
    x = torch.randn(len(offsets), 4).double() * 0.1
    return {"x": x, "labels": torch.tensor(offsets).double()}


def _model(layer: nn.Module) -> Model:
    model = Model(layer).double()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.first.bias.zero_()
    return model


def _by_hand(model: nn.Module, batch: dict[str, torch.Tensor], norm: float) -> dict[str, torch.Tensor]:
    return reference.clipped_sum(
        model, batch, norm, loss=lambda model, row: _loss(model(row["x"]), row["labels"]).sum()
    )


class Scaled(nn.Module):
    """Takes a number beside the records."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, scale=None):
        return torch.stack([_Doubled.apply(row * self.weight) * (1.0 if scale is None else scale) for row in x])


class WithScale(Model):
    def forward(self, x, labels=None):
        return self.last(self.layer(self.first(x), scale=torch.tensor(0.5).double())).squeeze(-1)


def test_a_tensor_without_dimensions_belongs_to_every_record():
    model = WithScale(Scaled()).double()
    batch = _batch([3.0, 5.0, -2.0])
    got = clipped_gradient_sum(model, batch, clipping_norm=0.7, loss=_loss)
    assert reference.relative_error(got, _by_hand(model, batch, 0.7)) < 1e-9


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("ignores_input", [False, True])
@pytest.mark.parametrize("skipped", [[], [1], [0, 1, 2]])
def test_branches_that_depend_on_the_record(engine, ignores_input, skipped):
    model, batch = _model(Branching(ignores_input)), _batch([3.0, 5.0, -2.0])
    for b in skipped:
        batch["x"][b, 0] = 5.0
    got = clipped_gradient_sum(model, batch, clipping_norm=0.7, engine=engine, loss=_loss)
    want = _by_hand(model, batch, 0.7)
    assert reference.relative_error(got, want) < 1e-9


def test_a_layer_with_weight_norm_runs_as_one():
    """Its weight is made of two tensors by a module below it, which sees no record."""
    model, batch = _model(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), _batch([3.0, 5.0, -2.0])
    assert {"layer.bias", "layer.parametrizations.weight.original0"} < dict(model.named_parameters()).keys()
    got = clipped_gradient_sum(model, batch, clipping_norm=0.7, loss=_loss)
    assert reference.relative_error(got, _by_hand(model, batch, 0.7)) < 1e-9


@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre"])
def test_hooks_of_a_layer_without_a_rule_act_once(when):
    model, batch = _model(Scaled()), _batch([3.0, 5.0, -2.0])

    def doubled(module, given, made=None):
        return 2 * made if when == "forward" else (2 * given[0],)

    getattr(model.layer, f"register_{when}_hook")(doubled)
    got = clipped_gradient_sum(model, batch, clipping_norm=0.7, loss=_loss)
    assert reference.relative_error(got, _by_hand(model, batch, 0.7)) < 1e-9


class Holder:
    """An object that holds records in one way or another."""

    def __init__(self, held):
        self.held = held


HELD = {
    "itself": (lambda x: x, lambda held: held),
    "in a list": (lambda x: [x], lambda held: held[0]),
    "in a dict": (lambda x: {"x": x}, lambda held: held["x"]),
    "in another object": (lambda x: Holder([x]), lambda held: held.held[0]),
}


class Beside(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.weight, self.take = nn.Parameter(torch.randn(4)), take

    def forward(self, x, holder):
        return _Doubled.apply(x * self.weight) * self.take(holder.held)[: len(x)]


class WithHolder(Model):
    def forward(self, x, labels=None):
        x = self.first(x)
        return self.last(self.layer(x, Holder(self.put(x.detach())))).squeeze(-1)


@pytest.mark.parametrize("how", HELD)
def test_records_inside_of_an_object_are_refused(how):
    put, take = HELD[how]
    model = WithHolder(Beside(take)).double()
    model.put = put
    with pytest.raises(UnsupportedModuleError, match="has tensors inside of a Holder"):
        clipped_gradient_sum(model, _batch([3.0, 5.0, -2.0]), clipping_norm=0.7, loss=_loss)


class Placed(nn.Module):
    """Adds positions, (T, D), which are the same for all records."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, positions):
        return _Doubled.apply((x + positions) * self.weight)


class WithPositions(Model):
    def forward(self, x, labels=None):
        positions = torch.arange(20.0).view(5, 4).double()
        return self.last(self.layer(x, positions)).mean(dim=(1, 2))


@pytest.mark.parametrize("num_before", [3, 1])
def test_positions_are_no_records_in_a_batch_of_as_many(num_before):
    model = WithPositions(Placed()).double()
    engine = make_engine(model, make_clipping("flat", 0.7))
    for num in (num_before, 5):
        batch = {"x": torch.randn(num, 5, 4).double(), "labels": torch.arange(num).double()}
        sums = engine.empty_sum()
        engine.add_clipped_sum(sums, lambda: _loss(model(batch["x"]), batch["labels"]), num)  # noqa: B023
    assert reference.relative_error(sums.result(), _by_hand(model, batch, 0.7)) < 1e-9
