"""A preconditioner from one query: what is asked, what it costs, what D is made of it, and that it is asked once."""

from __future__ import annotations

import json
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import norm

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan, private_step
from hf_dpopt.accounting import epsilon
from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.squared_sum import COLUMNS, ROWS, SquaredSum, squared_sensitivity
from hf_dpopt.clipping.units import Units
from hf_dpopt.plan.record import earlier_runs_of
from hf_dpopt.preclip import OneQuery
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.keys import opening_key
from hf_dpopt.run.ledger import LEDGER
from tests.helpers import tiny
from tests.preclip.loop import CLIP_SGD, EXPECTED, NUM_RECORDS, Loop, gradient, plan
from tests.preclip.loop import model as loop_model
from tests.reference import clipping as reference

ASKED = "one_query"


# --- sums of squares -------------------------------------------------------------------------------------------------


def _tiny_model(tied: bool = False) -> torch.nn.Module:
    model = tiny.model(dropout=0.0)
    if tied:  # one table for words and positions: a parameter of two uses
        embeddings = model.bert.embeddings
        embeddings.position_embeddings.weight = embeddings.word_embeddings.weight
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("sizes", "tied"), [((1,) * 8, False), ((2, 1, 3, 2), False), ((1,) * 8, True)])
def test_squares_are_those_of_gradients_clipped_one_by_one(engine, by_rows, sizes, tied):
    model, batch = _tiny_model(tied), tiny.collate(tiny.records(8))
    clipper = plan(3, clipping_norm=0.5).clipper
    units = reference.unit_gradients(model, batch, sizes=sizes)
    clipped = [reference.sum_of_clipped([{n: g.double() for n, g in unit.items()}], 0.5) for unit in units]
    made = make_engine(model, clipper, engine)
    sums, losses = SquaredSum(made.parameters, by_rows=by_rows), RecordLosses(model)
    for _ in range(2):  # the second batch adds to what is there; a two-pass engine has learned by then
        made.add_clipped_sum(sums, lambda: losses(batch), 8, None if sizes == (1,) * 8 else Units(sizes))
    got = sums.result()
    for name in clipped[0]:
        squares = 2 * torch.stack([unit[name].square() for unit in clipped]).sum(dim=0)
        if by_rows and squares.dim() > 1:
            pairs = [(got[name + ROWS], squares.flatten(1).sum(1)), (got[name + COLUMNS], squares.flatten(1).sum(0))]
        else:
            pairs = [(got[name], squares)]
        for found, exact in pairs:
            assert (found.double() - exact).abs().max() <= 1e-4 * exact.abs().max() + 1e-12


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_unit_moves_the_squares_by_their_sensitivity_at_most(by_rows):
    """Largest where the gradient has one coordinate; and no record of a model comes near."""
    bound = squared_sensitivity(0.5, by_rows=by_rows)
    p = {"w": torch.nn.Parameter(torch.zeros(4, 3)), "b": torch.nn.Parameter(torch.zeros(4))}
    engine_sums = SquaredSum(p, by_rows=by_rows)
    one = torch.zeros(1, 4, 3)
    one[0, 2, 1] = 0.5
    engine_sums._add_squares(engine_sums._totals_of("w"), one, torch.ones(1))
    worst = math.sqrt(sum(v.double().square().sum().item() for v in engine_sums.result().values()))
    assert worst == pytest.approx(bound)
    model, batch = _tiny_model(), tiny.collate(tiny.records(8))
    made = make_engine(model, plan(3, clipping_norm=0.5).clipper)
    for b in range(8):
        sums = SquaredSum(made.parameters, by_rows=by_rows)
        made.add_clipped_sum(sums, lambda b=b: RecordLosses(model)({k: v[b : b + 1] for k, v in batch.items()}), 1)
        moved = math.sqrt(sum(v.double().square().sum().item() for v in sums.result().values()))
        assert 0 < moved <= bound * (1 + 1e-5)


def test_rounding_over_many_units_moves_less_than_one_unit_may():
    """One record less shifts all batches after it; in float32 that moved the sum of 800,000 records by 126 squares."""
    p, at_once, num = {"w": torch.nn.Parameter(torch.zeros(1, 64))}, 64, 2**17
    rng = np.random.default_rng(0)
    records = torch.tensor(rng.random((num, 64)) / 8, dtype=torch.float32)
    records[: num // 2, 0] = 1.0  # a coordinate whose total grows large first

    def total(first: int) -> torch.Tensor:
        sums = SquaredSum(p, by_rows=False)
        (made,) = sums._totals_of("w")
        for begin in range(first, num, at_once):
            sums._add_squares([made], records[begin : begin + at_once, None, :], torch.ones(at_once)[: num - begin])
        return sums.result()["w"]

    moved = (total(0) - total(1)).double()
    assert (moved - records[0].double().square()).abs().max() < 1e-9
    assert total(0).dtype == torch.float64


# --- what it costs ---------------------------------------------------------------------------------------------------


def _plan(num_steps=6, spec=None, **changes):
    return plan(num_steps, spec or OneQuery(query_noise=4.0), **changes)


def _with_a_query(event, noise, adjacency, delta=1e-3):
    """Epsilon of an event and of one Gaussian mechanism of that noise."""
    both = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(noise), event])
    return epsilon(both, delta, adjacency).epsilon


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_epsilon_is_that_of_the_steps_and_one_gaussian(adjacency):
    options = {"adjacency": adjacency, **({"sampling": "fixed_order"} if adjacency == "replace_one" else {})}
    made, plain = _plan(**options), plan(6, **options)
    factor = 2.0 if adjacency == "replace_one" else 1.0
    assert made.epsilon() == pytest.approx(_with_a_query(plain.event, 4.0 * factor, adjacency), rel=1e-6)
    assert made.epsilon() > plain.epsilon() and made.sensitivity == plain.sensitivity
    assert made.epsilon(0) == 0.0


def test_every_chain_asked_it():
    made = _plan(sampling="fixed_order", adjacency="zero_out")
    plain = plan(6, sampling="fixed_order", adjacency="zero_out")
    assert made.epsilon((6,)) == made.epsilon() and made.epsilon((3, 3)) > made.epsilon()
    for chains in ((3, 3), (1, 1)):
        want = _with_a_query(plain.event_after(chains), 4.0 / math.sqrt(2), "zero_out")
        assert made.epsilon(chains) >= want * (1 - 1e-9)


def test_a_budget_holds_the_query_too():
    spent = _plan(spec=OneQuery(query_noise=4.0), target_epsilon=4.0, noise_multiplier=None)
    alone = plan(6, target_epsilon=4.0, noise_multiplier=None)
    assert 3.9 < spent.epsilon() <= 4.0 and spent.noise_multiplier > alone.noise_multiplier
    with pytest.raises(DPConfigError, match="Use more query_noise"):
        _plan(spec=OneQuery(query_noise=0.3), target_epsilon=4.0, noise_multiplier=None)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order", "cyclic_poisson", "balls_in_bins"])
def test_it_goes_with_correlated_noise_of_every_sampler(sampling):
    mechanism = {
        "poisson": {}, "fixed_order": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1}},
        "cyclic_poisson": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 2}},
        "balls_in_bins": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1}},
    }[sampling]  # fmt: skip
    common = dict(
        sampling=sampling, adjacency="zero_out" if sampling != "poisson" else "add_or_remove_one", **mechanism
    )
    made, plain = _plan(target_epsilon=4.0, noise_multiplier=None, **common), plan(6, noise_multiplier=1.0, **common)
    assert made.epsilon() <= 4.0 and made.certificate is None
    assert made.strategy == plain.strategy and made.config.noise_at_changes == "auto"  # D stays, so nothing is crossed
    event = plan(6, noise_multiplier=made.noise_multiplier, amplification_samples=0, **common).event
    assert made.epsilon() >= _with_a_query(event, 4.0, made.adjacency) * (1 - 1e-6)


def test_a_later_run_pays_for_the_query_of_an_earlier_one():
    made, plain = _plan(), plan(6)
    for charged in ((6,), (6, 2)):
        (run,) = earlier_runs_of(json.loads(json.dumps(made.record.to_json())), charged, "ab", where="x")
        (without,) = earlier_runs_of(json.loads(json.dumps(plain.record.to_json())), charged, "ab", where="x")
        assert run == type(run).from_json(json.loads(json.dumps(run.to_json())))
        found = epsilon(run.event, 1e-3, "add_or_remove_one").epsilon
        want = _with_a_query(without.event, 4.0 / math.sqrt(len(charged)), "add_or_remove_one")
        assert found == pytest.approx(want, rel=1e-6)


# --- the query of a run ----------------------------------------------------------------------------------------------


class AskingLoop(Loop):
    """A loop that passes all of its records for the query."""

    def everything(self):
        for first in range(0, NUM_RECORDS, 7):
            part = slice(first, first + 7)
            yield {"x": self.x[part], "labels": self.y[part]}

    def step(self, t, **options):
        rows = self.run.draw(t)
        batches = [{"x": self.x[rows], "labels": self.y[rows]}]
        private_step(self.engine, self.losses, batches, run=self.run, step=t, everything=self.everything(), **options)
        self.optimizer.step()


def _moments():
    """Mean squared clipped gradients at the initial weights, by hand."""
    weights = [w.detach() for w in loop_model().parameters()]
    total = [torch.zeros_like(w) for w in weights]
    for b in range(NUM_RECORDS):
        g = gradient(weights, b)
        factor = min(1.0, CLIP_SGD / torch.cat([x.flatten() for x in g]).norm().item())
        total = [t + (x * factor).square() / NUM_RECORDS for t, x in zip(total, g, strict=True)]
    return total


@pytest.mark.parametrize("by_rows", [False, True])
def test_it_asks_for_the_second_moment_of_all_records_and_divides_by_its_root(tmp_path, by_rows):
    spec = OneQuery(floor=1.5, by_rows=by_rows)
    loop = AskingLoop(tmp_path, _plan(spec=spec, noise_multiplier=0.0))
    loop.step(1)
    weight, bias = _moments()
    rms = math.sqrt((weight.sum() + bias.sum()).item() / (weight.numel() + bias.numel()))
    inverse = loop.preclip.inverse()
    want_bias = 2.5 * rms / (bias.sqrt() + 1.5 * rms)
    torch.testing.assert_close(inverse["bias"].inverse.double(), want_bias, rtol=1e-4, atol=0)
    if by_rows:
        rows, columns = weight.mean(1).sqrt() + 1.5 * rms, weight.mean(0).sqrt() + 1.5 * rms
        want = 2.5 * rms * (weight.mean().sqrt() + 1.5 * rms) / torch.outer(rows, columns)
        torch.testing.assert_close(inverse["weight"].matrix(weight.float()).double(), want, rtol=1e-4, atol=0)
    else:
        want = 2.5 * rms / (weight.sqrt() + 1.5 * rms)
        torch.testing.assert_close(inverse["weight"].inverse.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_noise_of_the_query_is_what_was_paid_for(tmp_path, by_rows, adjacency):
    spec, differences = OneQuery(query_noise=4.0, by_rows=by_rows), []
    options = {"adjacency": adjacency, **({"sampling": "fixed_order"} if adjacency == "replace_one" else {})}
    exact = AskingLoop(tmp_path / "exact", _plan(spec=spec, noise_multiplier=0.0, **options))
    exact.step(1)
    for seed in range(30):
        loop = AskingLoop(tmp_path / str(seed), _plan(spec=spec, **options))
        loop.step(1)
        differences += [loop.preclip._moments[n] - exact.preclip._moments[n] for n in exact.preclip._moments]
    values = torch.cat([d.flatten() for d in differences]).double().numpy()
    moves = 2.0 if adjacency == "replace_one" else 1.0
    stddev = 4.0 * moves * squared_sensitivity(CLIP_SGD, by_rows=by_rows) / NUM_RECORDS
    z = norm.isf(1e-6 / 2)
    assert abs(np.square(values / stddev).mean() - 1) < z * math.sqrt(2 / len(values))
    # noise of its own for every number of every run; in float32 a few draws are equal by chance
    assert len(np.unique(values)) > len(values) - 8


def test_the_noise_of_the_query_is_not_that_of_the_steps(tmp_path):
    """Drawn under the key of the steps, it would be their first draws: both could be subtracted from each other."""
    pairs = []
    for seed in range(12):
        spec = OneQuery(query_noise=4.0, by_rows=False)
        made = _plan(spec=spec, sampling="fixed_order", adjacency="zero_out", noise_mechanism="nu_dpftrl",
                     noise_kwargs={"nu": 0.1})  # fmt: skip
        loop = AskingLoop(tmp_path / str(seed), made)
        loop.everything = list  # the answer is noise alone
        loop.step(1)
        assert opening_key(loop.run.chain.noise_key) != loop.run.chain.noise_key
        asked = torch.cat([loop.preclip._moments[name].flatten() for name in ("weight", "bias")])
        pairs.append(torch.stack([asked.double(), torch.cat([x.flatten() for x in loop.noise[0][0]])]))
    both = torch.cat(pairs, dim=1)
    assert abs(torch.corrcoef(both)[0, 1].item()) < norm.isf(1e-6 / 2) / math.sqrt(both.shape[1])


def test_it_is_charged_before_a_record_is_looked_at_and_once(tmp_path):
    loop = AskingLoop(tmp_path, _plan())
    seen = []

    def spying():
        seen.append(list(loop.run.charged))
        yield from AskingLoop.everything(loop)

    loop.everything = spying
    loop.step(1)
    assert seen == [[1]] and loop.run.charged == [1]
    loop.step(2)
    assert seen == [[1]] and loop.run.charged == [2]
    with pytest.raises(DPConfigError, match="asked once"):
        loop.run.begin_opening(3, loop.engine)
    assert loop.run.charged == [2]
    events = [json.loads(line) for line in (tmp_path / "out" / LEDGER).read_text().splitlines()]
    assert any('"opening_noise": 4.0' in json.dumps(event) for event in events)


def test_without_all_records_nothing_is_charged(tmp_path):
    loop = AskingLoop(tmp_path, _plan())
    with pytest.raises(DPConfigError, match="everything="):
        private_step(loop.engine, loop.losses, [], run=loop.run, step=1)
    assert loop.run.charged == [0]
    with pytest.raises(DPConfigError, match="No query was opened"):
        loop.run.release({}, 1, is_opening=True)
    loop.run.begin_opening(1, loop.engine)
    with pytest.raises(DPConfigError, match="are float64"):
        loop.run.release({"weight": torch.zeros(3)}, 1, is_opening=True)


def test_another_clip_is_refused_before_it_is_charged(tmp_path):
    loop = AskingLoop(tmp_path, _plan())
    other = make_engine(loop_model(), plan(3, clipping_norm=9.0).clipper)
    with pytest.raises(DPConfigError, match="engine clips by"):
        loop.run.begin_opening(1, other)
    assert loop.run.charged == [0]


def test_a_query_that_died_is_not_repeated_under_its_key(tmp_path):
    """Killed in the middle, the run starts over under another key, and both queries are charged."""
    loop = AskingLoop(tmp_path, _plan())

    def dies():
        yield next(AskingLoop.everything(loop))
        raise KeyboardInterrupt

    loop.everything = dies
    with pytest.raises(KeyboardInterrupt):
        loop.step(1)
    with pytest.raises(DPConfigError, match="asked once"):
        AskingLoop.step(loop, 1)
    loop.run.close()
    again = AskingLoop(tmp_path, _plan())
    again.step(1)
    assert again.run.charged == [1, 1] and again.run.chain.chain_id != loop.run.chain.chain_id
    want = _with_a_query(plan(6).event_after((1, 1)), 4.0 / math.sqrt(2), "add_or_remove_one")
    assert again.run.spent().epsilon >= want * (1 - 1e-6)


# --- through the trainer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [False, True])
def test_every_unit_is_asked_once(tmp_path, users, monkeypatch):
    from hf_dpopt.run import step as module

    seen = []
    true = module.add_batch

    def counting(sums, engine, losses, batch, **options):
        made = true(sums, engine, losses, batch, **options)
        if isinstance(sums, SquaredSum):
            seen.append(made.num_records)
        return made

    monkeypatch.setattr(module, "add_batch", counting)
    changes = dict(privacy_unit="user", records_per_user=3, user_id_column="author") if users else {}
    trainer = tiny.trainer(
        tmp_path / "out", model=tiny.model(dropout=0.0), preconditioner=ASKED, max_steps=2, expected_batch_size=8,
        train_dataset=[{**r, **({"author": i % 20} if users else {})} for i, r in enumerate(tiny.records(64))],
        noise_multiplier=1.0, **changes,
    )  # fmt: skip
    trainer.train()
    assert sum(seen) == (20 if users else 64)
    text = (tmp_path / "out" / "privacy" / "statement.md").read_text()
    assert "query over all" in text


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "no noise": (dict(query_noise=0.0), {}, "query_noise"),
    "next to no noise": (dict(query_noise=0.01), {}, "Use 0.1 or more"),
    "no floor": (dict(floor=0.0), {}, "floor"),
    "layers": ({}, dict(clipping="per_layer"), "Use clipping='flat'"),
    "records of users": (
        {},
        dict(privacy_unit="user", records_per_user=2, sampling="capped_poisson"),
        "Sample users",
    ),
    "local training": (
        {},
        dict(privacy_unit="user", records_per_user=2, local_training={"learning_rate": 0.1}),
        "Leave local_training out",
    ),
    "words": (dict(by_rows="yes"), {}, "by_rows=.*True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused(case):
    options, changes, message = REFUSED[case]
    with pytest.raises(DPConfigError, match=message):
        config = PrivacyConfig(
            noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=EXPECTED, preconditioner=ASKED,
            preconditioner_kwargs=options, **changes,
        )  # fmt: skip
        make_plan(config, num_examples=NUM_RECORDS, num_steps=4)
