"""Finetuning of the top layer on states that are computed once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.types import Released
from recipes.paper import steps
from recipes.paper.top_layer import one_query, task, training
from recipes.paper.top_layer.training import Queries, Run, TopLayer

pytestmark = pytest.mark.slow

WIDTH, NUM = 8, 60


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def _ids():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, NUM)
    return [rng.integers(1, 50, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def made(encoder):
    layer = encoder.encoder.layer[-1]
    whole = encoder.encoder.layer
    encoder.encoder.layer = whole[:-1]
    ids = _ids()
    states = task.below_the_top(encoder, ids, [some[0] % 2 for some in ids])
    encoder.encoder.layer = whole
    return task.Task(states, states, states, states, layer)


def test_kept_states_give_what_the_whole_encoder_gives(encoder, made):
    model = TopLayer(made.layer, seed=3)  # adapters begin as nothing
    rows = torch.tensor([5, 1, 40, 7])
    (states_BTD, mask_BT, labels_B), *rest = made.train.batches(rows)
    assert not rest
    got = model(states_BTD, mask_BT)
    ids = _ids()
    order = sorted(rows.tolist(), key=lambda row: len(ids[row]))
    for logits, row, label in zip(got, order, labels_B, strict=True):
        whole = encoder(input_ids=torch.tensor([ids[row]])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(logits, model.head(whole), rtol=0.03, atol=3e-3)  # states are kept in bfloat16
        assert label == ids[row][0] % 2


def test_only_adapters_and_head_are_trained(made):
    names = [name for name, p in TopLayer(made.layer, 0).named_parameters() if p.requires_grad]
    assert {"head.weight", "head.bias"} < set(names)
    assert all("lora_" in name or name.startswith("head.") for name in names)


def test_clipped_sums_are_those_of_a_slow_loop(made):
    model = TopLayer(made.layer, 1)
    engine = make_engine(model, make_clipping("flat", 0.1))
    rows = torch.arange(45)  # more than one pass
    sums = steps.EngineSums(engine, lambda rows: training.parts(model, made.train, rows))(rows.numpy(), [None])
    want = {name: torch.zeros_like(p) for name, p in engine.parameters.items()}
    for row in rows:
        ((states, mask, label),) = made.train.batches(row.unsqueeze(0))
        loss = torch.nn.functional.cross_entropy(model(states, mask), label)
        gradients = torch.autograd.grad(loss, list(engine.parameters.values()))
        norm = sum(g.square().sum() for g in gradients).sqrt()
        for name, gradient in zip(want, gradients, strict=True):
            want[name] += gradient * min(1.0, 0.1 / float(norm))
    for name, value in sums.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-6)


def test_an_average_of_releases_makes_the_scale():
    releases, generator = steps.FromReleases(floor=2.0), torch.Generator().manual_seed(0)
    average = torch.zeros(5)
    for _ in range(steps.FIRST_DIVIDED):
        assert releases.scales() == (None,)
        value = torch.randn(5, generator=generator)
        releases.receive(Released({"w": value}))
        average = 0.95 * average + 0.05 * value.square()
    for num in (steps.FIRST_DIVIDED, steps.FIRST_DIVIDED + 1):
        want = steps.inverse_scale({"w": average / (1 - 0.95**num)}, 2.0)["w"]
        torch.testing.assert_close(releases.inverse["w"].float(), want, rtol=1e-5, atol=0)
        releases.receive(Released({"w": releases.inverse["w"].clone()}))  # a gradient of ones, divided by D
        average = 0.95 * average + 0.05


CASES = [
    *one_query.METHODS.values(),
    {"optimizer": "dp_sgd", "filter": "first_order_v1"},
    {"optimizer": "dp_adam_bc", "filter": "first_order_v1"},
]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_every_method_runs_and_seeds_say_all(made, given, monkeypatch):
    monkeypatch.setattr(training, "DELTA", 1e-3)
    given = {"optimizer": "dp_sgd_momentum", **given}
    run = Run(
        epsilon=300.0, rate=one_query.START.get(given["optimizer"], 0.05), seed=0, num_steps=12, batch=20, **given
    )
    result = training.train(made, Queries(), run)
    again = training.train(made, Queries(), run)
    assert {**result, "seconds": 0} == {**again, "seconds": 0}
    other = training.train(made, Queries(), dataclasses.replace(run, seed=1))
    assert result["noise"] == other["noise"] > 0
    assert 0 <= result["test"] <= 1


def test_the_query_is_asked_once_for_a_seed_and_a_clip(made, monkeypatch):
    asked = []
    monkeypatch.setattr(training, "parts", lambda *given: asked.append(given) or [])
    queries, run = Queries(), Run(epsilon=3.0, rate=1.0, seed=0, scale="query")
    engine = make_engine(TopLayer(made.layer, 0), make_clipping("flat", 0.1))
    first = queries.result(run, engine, made.train)
    noised = training.answer(run, first, NUM, np.random.default_rng(0))
    assert float(noised["head.bias"].abs().min()) > 0.0
    again = queries.result(run, engine, made.train)["head.bias"]
    assert float(again.abs().sum()) == 0.0  # the noise of one run is not that of the next
    queries.result(dataclasses.replace(run, seed=1), engine, made.train)
    assert len(asked) == 2
