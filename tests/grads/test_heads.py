"""Heads beside classifiers of text and language models: exact, bounded, also where a record has several rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.records.losses import RecordLosses
from tests.grads.heads import HEADS, Head
from tests.grads.models import NUM_RECORDS
from tests.reference import clipping as reference

WINDOWS = (2, 1, 2)  # rows of each document


def _model(head: Head, tuning: str) -> nn.Module:
    model = (head.full if tuning == "full" else head.with_lora)().double().eval()
    with torch.no_grad():  # many parameters begin at 0, where gradients of others vanish
        for p in model.parameters():
            if p.requires_grad and not p.any():
                p.normal_(std=0.1)
    return model


def _clipped(model, batch, norm, engine, sizes=()):
    made, losses = make_engine(model, make_clipping("flat", norm), engine), RecordLosses(model)
    sums = made.empty_sum()
    made.add_clipped_sum(
        sums, lambda: losses(batch), len(next(iter(batch.values()))), *([Units(sizes)] if sizes else [])
    )
    return sums.result()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", HEADS)
def test_the_clipped_sum_is_that_of_a_loop_and_no_record_moves_it_by_more(name, tuning, engine):
    head = HEADS[name]
    model, batch = _model(head, tuning), head.batch()
    for sizes in ((), WINDOWS):
        units = reference.unit_gradients(model, batch, loss=head.loss_of, sizes=sizes)
        norms = sorted(reference.norm(unit).item() for unit in units)
        for norm in (norms[len(norms) // 2], 0.1 * norms[0]):
            want = reference.sum_of_clipped(units, norm)
            assert reference.relative_error(_clipped(model, batch, norm, engine, sizes), want) < 1e-10
    every, norm = clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine), norm
    for b in range(NUM_RECORDS):
        rest = {key: torch.cat([x[:b], x[b + 1 :]]) for key, x in batch.items()}
        less = clipped_gradient_sum(model, rest, clipping_norm=norm, engine=engine)
        moved = reference.norm({n: every[n] - less[n] for n in every}).item()
        assert 0.9 * norm < moved <= norm * (1 + 1e-5)


class _Scales(nn.Module):
    """A module with children, a list of parameters and a number that its records share."""

    def __init__(self, inner: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.inner = nn.Linear(4, 4) if inner is None else inner
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * self.scales[0]  # also in place, as residual streams are
        x += self.scales[1] * shares.sum()
        out = self.inner(x, shares)[0] if isinstance(self.inner, _Scales) else self.inner(x)
        return self.dropout(out), shares


class _Nested(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), _Scales(_Scales(), dropout), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        shares = torch.arange(7, dtype=x.dtype)
        hidden = self.block(self.first(x), shares)[0]
        return self.last(self.block(hidden, shares)[0]).squeeze(-1)  # twice


@pytest.mark.parametrize("engine", ENGINES)
def test_modules_that_use_a_parameter_inside_of_each_other_and_twice(engine):
    model = _Nested().double()
    batch = {"x": torch.randn(3, 4).double(), "labels": torch.randn(3).double()}
    loss = lambda outputs, labels: (outputs - labels).square()  # noqa: E731
    units = reference.record_gradients(model, batch, lambda m, row: loss(m(row["x"]), row["labels"]).sum())
    norm = sorted(reference.norm(unit).item() for unit in units)[1]
    got = clipped_gradient_sum(model, batch, clipping_norm=norm, engine=engine, loss=loss)
    assert reference.relative_error(got, reference.sum_of_clipped(units, norm)) < 1e-10
    assert {id(p) for p in model.block.scales} <= {id(p) for p in model.parameters()}  # put back


def test_a_module_that_would_draw_anew_is_refused_with_what_to_freeze():
    with pytest.raises(UnsupportedModuleError, match="^block .*draws at random.*Set its dropout to 0, or freeze"):
        make_engine(_Nested(0.1), make_clipping("flat", 1.0))


class _Weighted(nn.Module):
    """Its layer has as many outputs as the batch has records."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(self.layer(x)).squeeze(-1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_records", [1, 2, 3])
def test_a_weight_that_is_computed_has_no_rows_of_records(num_records, engine):
    model = _Weighted().double()
    batch = {"x": torch.randn(num_records, 4).double(), "labels": torch.randn(num_records).double()}
    loss = lambda outputs, labels: (outputs - labels).square()  # noqa: E731
    want = reference.clipped_sum(model, batch, 0.7, loss=lambda m, row: loss(m(row["x"]), row["labels"]).sum())
    got = clipped_gradient_sum(model, batch, clipping_norm=0.7, engine=engine, loss=loss)
    assert reference.relative_error(got, want) < 1e-10
