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

KINDS = ("diagonal", "factored", "mixed")


def _positive(*shape: int) -> torch.Tensor:
    """Over six orders of magnitude, as second moments are."""
    return 10.0 ** (6 * torch.rand(*shape, dtype=torch.float64) - 3)


def _scale(parameters, kind: str, factor: float = 0.5) -> tuple[Scale, dict[str, torch.Tensor]]:
    """A scale, and the D it stands for in the shape of each parameter."""
    parts, divisors = {}, {}
    for i, (name, p) in enumerate(parameters.items()):
        divisors[name] = torch.ones(p.shape, dtype=torch.float64)
        if kind == "mixed" and i % 3 == 2:
            continue  # left as it is
        if p.dim() > 1 and (kind == "factored" or (kind == "mixed" and i % 3 == 1)):
            rows, columns = _positive(p.shape[0]), _positive(p[0].numel())
            parts[name] = Factored(1 / rows, 1 / columns)
            divisors[name] = torch.outer(rows, columns).view(p.shape)
        else:
            divisors[name] = _positive(*p.shape)
            parts[name] = Diagonal(1 / divisors[name])
    return Scale(parts, factor), {name: d / factor for name, d in divisors.items()}


def _divided(grads: dict[str, torch.Tensor], divisors) -> dict[str, torch.Tensor]:
    return {name: g.double() / divisors[name] for name, g in grads.items()}


def _slow_sum(model, batch, divisors, clipping) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    records = [_divided(g, divisors) for g in reference.record_gradients(model, batch)]
    groups = {clipping.group(name) for name in divisors}
    for record in records:
        squares = {
            group: torch.stack([g.square().sum() for n, g in record.items() if clipping.group(n) == group]).sum()
            for group in groups
        }
        if clipping.name == "per_layer":
            bound = {group: clipping.clipping_norm / math.sqrt(len(groups)) for group in groups}
        else:
            bound = dict.fromkeys(groups, clipping.clipping_norm)
        for name, g in record.items():
            group = clipping.group(name)
            factor = min(1.0, bound[group] / max(squares[group].sqrt().item(), 1e-300))
            total[name] = total.get(name, 0) + factor * g
    return total


def _engine_sum(model, batch, scale, clipping, engine) -> dict[str, torch.Tensor]:
    made = make_engine(model, clipping, engine)
    sums = made.empty_sum(scale)
    losses = RecordLosses(model)
    made.add_clipped_sum(sums, lambda: losses(batch), NUM_RECORDS)
    return sums.result()


def _median(model, batch, divisors) -> float:
    return sorted(
        reference.norm(_divided(g, divisors)).item() for g in reference.record_gradients(model, batch)
    )[NUM_RECORDS // 2]  # fmt: skip


@pytest.mark.slow_but(56)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_clip_acts_in_the_coordinates_of_the_scale(name, kind, engine):
    model = MODELS[name]().double()
    batch = batch_for(model)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    scale, divisors = _scale(parameters, kind)
    clipping = make_clipping("flat", _median(model, batch, divisors))
    want = _slow_sum(model, batch, divisors, clipping)
    assert reference.relative_error(_engine_sum(model, batch, scale, clipping, engine), want) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_per_layer_clipping_in_the_coordinates_of_the_scale(name, kind):
    model = MODELS[name]().double()
    batch = batch_for(model)
    scale, divisors = _scale({n: p for n, p in model.named_parameters() if p.requires_grad}, kind)
    clipping = make_clipping("per_layer", _median(model, batch, divisors))
    want = _slow_sum(model, batch, divisors, clipping)
    assert reference.relative_error(_engine_sum(model, batch, scale, clipping, "book_keeping"), want) <= 1e-10


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_one_record_more_moves_the_scaled_sum_by_the_clipping_norm_at_most(name, kind, engine):
    """Leave-one-out in preconditioned coordinates, in float32, with a clip that every record meets."""
    model = MODELS[name]()
    batch = batch_for(model)
    scale, divisors = _scale({n: p for n, p in model.named_parameters() if p.requires_grad}, kind)
    scale = Scale({n: _in_float32(part) for n, part in scale.parts.items()}, scale.factor)
    clipping = make_clipping("flat", 0.1 * _median(model, batch, divisors))
    whole = _engine_sum(model, batch, scale, clipping, engine)
    moved = []
    for b in range(NUM_RECORDS):
        rest = {k: torch.cat([v[:b], v[b + 1 :]]) for k, v in batch.items()}
        made, losses = make_engine(model, clipping, engine), RecordLosses(model)
        sums = made.empty_sum(scale)
        made.add_clipped_sum(sums, lambda losses=losses, rest=rest: losses(rest), NUM_RECORDS - 1)
        moved.append(reference.norm({n: whole[n] - total for n, total in sums.result().items()}).item())
    assert max(moved) <= clipping.sensitivity("add_or_remove_one") * (1 + 1e-4)
    assert max(moved) >= 0.99 * clipping.clipping_norm  # and it is reached: every record with a gradient is clipped


def _in_float32(part):
    if isinstance(part, Diagonal):
        return Diagonal(part.inverse.float())
    return Factored(part.inverse_P.float(), part.inverse_Q.float())


def test_a_factor_is_a_clip_norm_of_its_own():
    model = MODELS["bert"]().double()
    batch = batch_for(model)
    clipping = make_clipping("flat", 1.0)
    got = _engine_sum(model, batch, Scale(factor=1 / 0.01), clipping, "book_keeping")
    want = reference.clipped_sum(model, batch, 0.01)
    assert reference.relative_error({n: 0.01 * g for n, g in got.items()}, want) <= 1e-10


def test_a_record_that_is_not_finite_adds_nothing_under_a_scale():
    model = MODELS["bert"]().double()
    batch = batch_for(model)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for kind in KINDS:
        scale, divisors = _scale(parameters, kind)
        clipping = make_clipping("flat", _median(model, batch, divisors))
        made, losses = make_engine(model, clipping), RecordLosses(model)
        sums = made.empty_sum(scale)
        spoiled = torch.ones(NUM_RECORDS, dtype=torch.float64)
        spoiled[1] = math.nan
        seen = made.add_clipped_sum(sums, lambda losses=losses, f=spoiled: losses(batch) * f, NUM_RECORDS)
        others = {k: torch.cat([v[:1], v[2:]]) for k, v in batch.items()}
        assert seen.num_dropped == 1
        assert reference.relative_error(sums.result(), _slow_sum(model, others, divisors, clipping)) <= 1e-10


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


class _Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 64, bias=False)


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("small", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("kind", ["none", "full", "factored"])
def test_what_rounding_leaves_of_tokens_that_cancel_stays_within_the_clip(kind, size, small, engine):
    """3 x 5 - 15 x 1 is 0 in the norm of every coordinate; a sum of rounded products over a tiny D would be anything."""
    model = _Linear()
    x, c = torch.zeros(1, 4, 48), torch.zeros(1, 4, 64)
    x[0, 0], x[0, 1], c[0, 0], c[0, 1] = 5 * size, size, 3, -15
    x[0, 2, 0] = c[0, 2, 0] = 1e-3  # what the norm is of
    divisor = torch.full((64, 48), small)
    divisor[0, 0] = 1.0
    scale = {
        "none": None,
        "full": Scale({"layer.weight": Diagonal(1 / divisor)}),
        "factored": Scale({"layer.weight": Factored(torch.full((64,), 1 / small), torch.ones(48))}),
    }[kind]
    made = make_engine(model, make_clipping("flat", 1.0), engine)
    sums = made.empty_sum(scale)
    made.add_clipped_sum(sums, lambda: (model.layer(x) * c).sum(dim=(1, 2)), 1)
    assert sums.result()["layer.weight"].double().norm() <= 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("small", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("kind", ["full", "factored"])
def test_tokens_of_one_row_that_cancel_stay_within_the_clip(kind, small, engine):
    model = _Table()
    ids, c = torch.tensor([[7, 7, 7, 9]]), torch.zeros(1, 4, 64)
    c[0, 0], c[0, 1], c[0, 2], c[0, 3, 0] = 300.1, 1200.7, -1500.8, 1.7
    divisor = torch.full((50,), small)
    divisor[9] = 1.0
    part = (
        Diagonal((1 / divisor).unsqueeze(1).expand(50, 64).clone())
        if kind == "full"
        else Factored(1 / divisor, torch.ones(64))
    )
    made = make_engine(model, make_clipping("flat", 1.0), engine)
    sums = made.empty_sum(Scale({"table.weight": part}))
    made.add_clipped_sum(sums, lambda: (model.table(ids) * c).sum(dim=(1, 2)), 1)
    assert sums.result()["table.weight"].double().norm() <= 1 + 1e-6
