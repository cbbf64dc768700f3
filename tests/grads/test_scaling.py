"""Clipping in preconditioned coordinates: ``sum_b clip(g_b / D)`` by every engine, against a loop over records."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.losses import RecordLosses
from tests.grads.models import MODELS, NUM_RECORDS, batch_for
from tests.reference import clipping as reference


def _engine_sum(model, batch, scale, clipping, engine) -> dict[str, torch.Tensor]:
    made = make_engine(model, clipping, engine)
    sums = made.empty_sum(scale)
    losses = RecordLosses(model)
    made.add_clipped_sum(sums, lambda: losses(batch), NUM_RECORDS)
    return sums.result()


def test_a_factor_is_a_clip_norm_of_its_own():
    model = MODELS["bert"]().double()
    batch = batch_for(model)
    clipping = make_clipping("flat", 1.0)
    got = _engine_sum(model, batch, Scale(factor=1 / 0.01), clipping, "book_keeping")
    want = reference.clipped_sum(model, batch, 0.01)
    assert reference.relative_error({n: 0.01 * g for n, g in got.items()}, want) <= 1e-10


def test_nothing_is_added_to_a_sum_that_was_taken():
    model = MODELS["bert"]()
    batch, losses = batch_for(model), RecordLosses(model)
    made = make_engine(model, make_clipping("flat", 1.0))
    sums = made.empty_sum(Scale(factor=2.0))
    made.add_clipped_sum(sums, lambda: losses(batch), NUM_RECORDS)
    first = {n: g.clone() for n, g in sums.result().items()}
    assert all(torch.equal(first[n], g) for n, g in sums.result().items())  # asking twice does not scale twice
    with pytest.raises(AssertionError, match="was taken"):
        made.add_clipped_sum(sums, lambda: losses(batch), NUM_RECORDS)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Diagonal(torch.ones(3)), "w"),
        (Diagonal(torch.zeros(4, 2)), "w"),
        (Diagonal(torch.full((4, 2), math.inf)), "w"),
        (Factored(torch.ones(4), torch.tensor([1.0, -1.0])), "w"),
        (Factored(torch.ones(2), torch.ones(4)), "w"),
        (Diagonal(torch.ones(4, 2)), "unknown"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(part, name):
    with pytest.raises(DPConfigError, match="Leave it out|Give D in the parameter's shape"):
        Scale({name: part}).check({"w": torch.zeros(4, 2)})


def _tokens_of_a_layer(size: float, small: float):
    """3 x 5 - 15 x 1 is 0 in the norm of every coordinate; a sum of rounded products over a tiny D would be anything."""
    layer = nn.Linear(48, 64, bias=False)
    x, c = torch.zeros(1, 4, 48), torch.zeros(1, 4, 64)
    x[0, 0], x[0, 1], c[0, 0], c[0, 1] = 5 * size, size, 3, -15
    x[0, 2, 0] = c[0, 2, 0] = 1e-3  # what the norm is of
    divisor = torch.full((64, 48), small)
    divisor[0, 0] = 1.0
    return layer, x, c, Diagonal(1 / divisor), Factored(torch.full((64,), 1 / small), torch.ones(48))


def _tokens_of_one_row(size: float, small: float):
    table, ids, c = nn.Embedding(50, 64), torch.tensor([[7, 7, 7, 9]]), torch.zeros(1, 4, 64)
    c[0, 0], c[0, 1], c[0, 2], c[0, 3, 0] = 300.1 * size, 1200.7 * size, -1500.8 * size, 1.7
    divisor = torch.full((50,), small)
    divisor[9] = 1.0
    return table, ids, c, Diagonal((1 / divisor).unsqueeze(1).repeat(1, 64)), Factored(1 / divisor, torch.ones(64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("small", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("kind", ["none", "full", "factored"])
@pytest.mark.parametrize("tokens", [_tokens_of_a_layer, _tokens_of_one_row])
def test_what_rounding_leaves_of_tokens_that_cancel_stays_within_the_clip(tokens, kind, size, small, engine):
    model, inputs, c, full, factored = tokens(size, small)
    scale = None if kind == "none" else Scale({"weight": full if kind == "full" else factored})
    made = make_engine(model, make_clipping("flat", 1.0), engine)
    sums = made.empty_sum(scale)
    made.add_clipped_sum(sums, lambda: (model(inputs) * c).sum(dim=(1, 2)), 1)
    assert sums.result()["weight"].double().norm() <= 1 + 1e-6
