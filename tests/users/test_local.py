"""Local training: how far SGD on a user's records moves the weights, against loops."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hf_dpopt import DPConfigError
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.types import SPOILT
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.kept_state import refuse_spoilt
from hf_dpopt.users.local import LocalTraining, LocalUser, LocalUserBatch, _restoring, drop_diverged
from tests.helpers import tiny
from tests.reference import clipping as reference
from tests.users.test_training import _trainer

LOOSE = make_clipping("flat", 1e9)
SIZES, SEEDS = (5, 3, 1, 7), (11, 12, 13, 14)


def _model():
    return tiny.model(dropout=0.0).double()


def _moved(model, records, training, seed) -> dict:
    """Plain SGD on a copy of the model, with the order that the seed gives."""
    there = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in there.parameters() if p.requires_grad], lr=training.learning_rate)
    for some in training.batches(len(records), np.random.default_rng(seed)):
        optimizer.zero_grad()
        batch = tiny.collate([records[i] for i in some])
        rows = [reference.own_token_mean_loss(there, reference.rows(batch, b)) for b in range(len(some))]
        torch.stack(rows).mean().backward()
        optimizer.step()
    after = dict(there.named_parameters())
    return {n: p.detach() - after[n].detach() for n, p in model.named_parameters() if p.requires_grad}


def _sum(model, batch: LocalUserBatch, clipping=LOOSE) -> dict:
    engine, losses = make_engine(model, clipping), RecordLosses(model)
    sums = engine.empty_sum()
    for user in batch.physical(4, tiny.collate):
        user.add_to(sums, engine, losses)
    return sums.result()


def _users():
    records, ends = tiny.records(sum(SIZES)), np.cumsum(SIZES)
    return [records[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


TRAININGS = {
    "an epoch": LocalTraining(learning_rate=0.5, batch_size=2),
    "two epochs": LocalTraining(learning_rate=0.3, batch_size=4, epochs=2),
    "three steps": LocalTraining(learning_rate=0.5, batch_size=3, steps=3),
    "more steps than records": LocalTraining(learning_rate=0.2, batch_size=1, steps=9),
}


@pytest.mark.parametrize(
    "options, sizes",
    [
        ({"epochs": 2}, [3, 3, 1, 3, 3, 1]),
        ({"steps": 2}, [3, 3]),
        ({"steps": 4}, [3, 3, 1, 3]),
        ({"steps": 6}, [3, 3, 1, 3, 3, 1]),
        ({"batch_size": 9}, [7]),
    ],
)
def test_local_steps_are_as_many_as_asked_for_and_every_epoch_has_every_record(options, sizes):
    training = LocalTraining(**{"learning_rate": 1.0, "batch_size": 3, **options})
    batches = training.batches(7, np.random.default_rng(0))
    assert [len(batch) for batch in batches] == sizes
    seen = np.concatenate(batches)
    assert all(len(set(seen[i : i + 7])) == len(seen[i : i + 7]) for i in range(0, len(seen), 7))


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_users_move_the_weights_as_plain_sgd_does(training):
    model, users = _model(), _users()
    moves = [_moved(model, mine, training, seed) for mine, seed in zip(users, SEEDS, strict=True)]
    bound = sorted(reference.norm(move).item() for move in moves)[2]
    want = reference.sum_of_clipped(moves, bound)
    before = {n: p.clone() for n, p in model.named_parameters()}
    batch = LocalUserBatch([r for mine in users for r in mine], 1, SIZES, SEEDS, training)
    got = _sum(model, batch, make_clipping("flat", bound))
    assert reference.relative_error(got, want) < 1e-10
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


class Exploding:
    """``exp(w x) - y w``: one step from 0 with y = 91 ends where the loss of that record is infinite in float32."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)

    def __call__(self, batch):
        products_B = self.model(batch["x"]).squeeze(1)
        return products_B.exp() - batch["y"] * self.model.weight.sum()


def _collate_numbers(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "y")}


def test_what_a_user_gives_does_not_depend_on_who_is_trained_beside_them():
    losses = Exploding()
    engine = make_engine(losses.model, LOOSE)
    ends, goes_on = [{"x": [1.0], "y": 91.0}], [{"x": [0.1], "y": 1.0}] * 3
    sums = engine.empty_sum()
    training = LocalTraining(learning_rate=1.0, batch_size=2)
    batch = LocalUserBatch([*ends, *goes_on, *ends], 1, (1, 3, 1), (1, 2, 3), training)
    for users in batch.physical(9, _collate_numbers):
        users.add_to(sums, engine, losses)
    alone = engine.empty_sum()
    for user in LocalUserBatch(goes_on, 1, (3,), (2,), batch.training).physical(9, _collate_numbers):
        user.add_to(alone, engine, losses)
    moved = sums.result()["weight"] - alone.result()["weight"]
    assert moved.item() == pytest.approx(-180, rel=1e-5)


def test_a_user_who_diverges_gives_nothing():
    moves = {"a": torch.tensor([[1.0, 2.0], [101.0, 0.0], [0.0, float("nan")], [99.0, -99.0]]), "b": torch.ones(4, 3)}
    moves["a single number"] = torch.ones(4)
    found = drop_diverged(moves)
    assert found["a"][[0, 3]].tolist() == [[1, 2], [99, -99]] and found["b"][[0, 3]].sum() == 6
    assert found["a"][1:3].isnan().all() and found["b"][1:3].isnan().all()  # which no sum takes
    model = _model()
    training = LocalTraining(learning_rate=1e9, batch_size=2, steps=4)
    total = _sum(model, LocalUserBatch([*_users()[0], *_users()[1]], 1, (5, 3), (1, 2), training))
    assert not any(delta.any() for delta in total.values())


def test_dropout_is_the_users_own():
    """What a user gives does not depend on who else is in the round, and differs between users."""
    model = tiny.model(dropout=0.4).double().train()
    mine, training = _users()[0], LocalTraining(learning_rate=0.5, batch_size=5)
    alone = _sum(model, LocalUserBatch(mine, 1, (5,), (7,), training))
    engine, losses, sums = make_engine(model, LOOSE), RecordLosses(model), []
    for user in LocalUserBatch([*_users()[3], *mine], 1, (7, 5), (8, 7), training).physical(9, tiny.collate):
        sums.append(engine.empty_sum())
        user.add_to(sums[-1], engine, losses)
    assert reference.relative_error(sums[1].result(), alone) < 1e-12
    other = _sum(model, LocalUserBatch(mine, 1, (5,), (9,), training))
    assert reference.relative_error(other, alone) > 1e-3


def test_weights_come_back_when_a_local_step_fails():
    model = _model()
    engine, before = make_engine(model, LOOSE), {n: p.clone() for n, p in model.named_parameters()}
    losses, batch = RecordLosses(model), tiny.collate(_users()[0])

    def failing(given):
        failing.calls += 1
        if failing.calls == 2:
            raise RuntimeError("out of memory")
        return losses(given)

    failing.calls = 0
    user = LocalUser([batch, batch], LocalTraining(learning_rate=0.5), 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        user.add_to(engine.empty_sum(), engine, failing)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.slow
def test_one_local_step_on_all_records_is_the_mean_gradient_through_the_trainer(tmp_path):
    def run(folder, **changes):
        seen = tiny.Gradients()
        options = dict(expected_batch_size=20, sampling="fixed_order", records_per_user=50, max_steps=1)
        _trainer(tmp_path / folder, callbacks=[seen], **options, **changes).train()
        return seen.steps[0]

    gradient, whole = run("gradient", user_weighting="mean"), {"learning_rate": 1.0, "batch_size": 50}
    assert reference.relative_error(run("local", local_training=whole), gradient) < 1e-5


def test_weights_that_were_not_restored_are_not_saved() -> None:
    model = _model()
    parameters = dict(model.named_parameters())
    with _restoring(model, parameters, {}):
        pass
    refuse_spoilt(model)
    with _restoring(spoilt := _model(), {}, {}):
        setattr(spoilt, SPOILT, "weight")  # by a forward
    with pytest.raises(DPConfigError, match="^weight: "):
        refuse_spoilt(spoilt)
    with pytest.raises(RuntimeError), _restoring(model, parameters, {}) as start:  # as an interrupt between two copies
        start[next(iter(start))] = torch.zeros(7, 7, 7)
    with pytest.raises(DPConfigError, match="former values"):
        refuse_spoilt(model)
