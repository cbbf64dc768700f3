"""Users: the gradients of several rows add up before the clip, by every engine, against a loop over users."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.records.losses import RecordLosses
from tests.grads.models import LENGTHS, MODELS, NUM_TOKENS, batch_for
from tests.reference import clipping as reference

SIZES = {"equal": (2, 2, 2), "uneven": (3, 1, 2), "one user": (6,), "records": (1, 1, 1, 1, 1, 1)}
ROW_LENGTHS = [*LENGTHS, 5]


def _users(records: list[dict], sizes, weights_B) -> list[dict]:
    """The sum over the rows of each user, row by row."""
    users, first = [], 0
    for size in sizes:
        mine = zip(records[first : first + size], weights_B[first : first + size].tolist(), strict=True)
        users.append({})
        for grads, weight in mine:
            for name, g in grads.items():
                users[-1][name] = users[-1].get(name, 0) + weight * g
        first += size
    return users


def _clipped(users: list[dict], bound: float) -> dict:
    total: dict = {}
    for user in users:
        factor = min(1.0, bound / max(reference.norm(user).item(), 1e-300))
        for name, g in user.items():
            total[name] = total.get(name, 0) + factor * g
    return total


def _engine_sum(model, batch, clipping, engine, sizes, weights_B, scale=None) -> dict:
    made, losses = make_engine(model, clipping, engine), RecordLosses(model)
    sums = made.empty_sum(scale)
    made.add_clipped_sum(sums, lambda: losses(batch) * weights_B, len(ROW_LENGTHS), Units(sizes))
    return sums.result()


def _median(users) -> float:
    return sorted(reference.norm(user).item() for user in users)[len(users) // 2]


@pytest.mark.slow_but(84)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_users_are_clipped_as_a_loop_over_users_clips_them(name, sizes, engine):
    model = MODELS[name]().double()
    batch = batch_for(model, ROW_LENGTHS, NUM_TOKENS)
    # powers of 2: some norms round to float32 on their way back, and the loop multiplies behind them
    weights_B = 2.0 ** -torch.arange(len(ROW_LENGTHS), dtype=torch.float64)
    users = _users(reference.record_gradients(model, batch), sizes, weights_B)
    bound = _median(users)
    got = _engine_sum(model, batch, make_clipping("flat", bound), engine, sizes, weights_B)
    assert reference.relative_error(got, _clipped(users, bound)) <= 1e-10


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama-lora"])
def test_users_are_clipped_in_the_coordinates_of_a_scale(name, engine):
    model = MODELS[name]().double()
    batch, weights_B, sizes = batch_for(model, ROW_LENGTHS), torch.ones(6, dtype=torch.float64), SIZES["uneven"]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parts, weights = {}, {}
    for i, (n, p) in enumerate(parameters.items()):
        if p.dim() > 1 and i % 2:
            parts[n] = Factored(torch.rand(len(p)).double() + 0.1, torch.rand(p[0].numel()).double() + 0.1)
            weights[n] = torch.outer(parts[n].inverse_P, parts[n].inverse_Q).view(p.shape)
        else:
            parts[n] = Diagonal(torch.rand(p.shape).double() + 0.1)
            weights[n] = parts[n].inverse
    users = _users(reference.record_gradients(model, batch), sizes, weights_B)
    users = [{n: g * weights[n] for n, g in user.items()} for user in users]
    bound = _median(users)
    got = _engine_sum(model, batch, make_clipping("flat", bound), engine, sizes, weights_B, Scale(parts))
    assert reference.relative_error(got, _clipped(users, bound)) <= 1e-10


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_user_summed_in_parts_is_clipped_as_one(name, clipping):
    model = MODELS[name]().double()
    batch, weights_B = batch_for(model, ROW_LENGTHS), torch.ones(6, dtype=torch.float64)
    (user,) = _users(reference.record_gradients(model, batch), (6,), weights_B)
    rule = make_clipping(clipping, 0.3 * reference.norm(user).item())
    engine = make_engine(model, rule)
    sums = engine.empty_sum()
    seen = engine.add_clipped(sums, {n: g.unsqueeze(0) for n, g in user.items()})
    want = _engine_sum(model, batch, rule, "auto", (6,), weights_B)
    assert seen.num_records == 1 and seen.num_clipped == 1
    assert reference.relative_error(sums.result(), want) <= 1e-10


def test_a_user_without_finite_gradient_adds_nothing_and_is_counted():
    model = MODELS["bert"]().double()
    batch, weights_B = batch_for(model, ROW_LENGTHS), torch.ones(6, dtype=torch.float64)
    engine, losses = make_engine(model, make_clipping("flat", 1e3)), RecordLosses(model)
    broken_B = torch.tensor([1.0, 1, 1, float("nan"), 1, 1], dtype=torch.float64)
    sums = engine.empty_sum()
    seen = engine.add_clipped_sum(sums, lambda: losses(batch) * broken_B, 6, Units((3, 2, 1)))
    users = _users(reference.record_gradients(model, batch), (3, 2, 1), weights_B)
    assert (seen.num_records, seen.num_dropped) == (3, 1)
    assert reference.relative_error(sums.result(), _clipped([users[0], users[2]], 1e3)) <= 1e-10
    alone = engine.empty_sum()
    seen = engine.add_clipped(alone, {n: g.unsqueeze(0) * float("nan") for n, g in users[1].items()})
    assert seen.num_dropped == 1 and not any(total.any() for total in alone.result().values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_one_user_more_moves_the_sum_by_the_clipping_norm_at_most(name, engine):
    """Leave-one-user-out in float32, with a clip that every user meets."""
    model = MODELS[name]()
    batch, weights_B, sizes = batch_for(model, ROW_LENGTHS), torch.ones(6), SIZES["uneven"]
    users = _users(reference.record_gradients(model, batch), sizes, weights_B)
    bound = 0.1 * min(reference.norm(user).item() for user in users)
    clipping, losses = make_clipping("flat", bound), RecordLosses(model)
    whole = _engine_sum(model, batch, clipping, engine, sizes, weights_B)
    for u, size in enumerate(sizes):
        first = sum(sizes[:u])
        rest = {k: torch.cat([v[:first], v[first + size :]]) for k, v in batch.items()}
        made = make_engine(model, clipping, engine)
        sums = made.empty_sum()
        made.add_clipped_sum(sums, lambda rest=rest: losses(rest), 6 - size, Units(sizes[:u] + sizes[u + 1 :]))
        moved = reference.norm({n: whole[n].double() - g.double() for n, g in sums.result().items()}).item()
        assert 0.9 * bound < moved <= bound * (1 + 1e-5)
