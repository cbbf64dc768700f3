"""The reproduction of arXiv:2212.00309: its features, its loop against `private_step`, its table on tiny data."""

from __future__ import annotations

import gzip
import json
import math
import random

import numpy as np
import pytest
import torch

from hf_dpopt.clipping import make_engine
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.run.keys import fixed_chain
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.step import private_step
from recipes.glue_options import parse
from recipes.paper.dp2 import ag_news, data, explain, imdb, lora, training
from recipes.paper.dp2.training import Method, Setting

pytestmark = pytest.mark.slow

KEY = "5a" * 32
GOOD, BAD, OTHER = ("fine", "lovely", "great"), ("dull", "awful", "poor"), ("the", "film", "of", "a")


def review(label: int, rng: random.Random) -> str:
    return " ".join(rng.choices((BAD, GOOD)[label], k=2) + rng.choices(OTHER, k=rng.randint(3, 8)))


@pytest.fixture(scope="module")
def imdb_folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("imdb"), random.Random(0)
    sizes = {"train": 40, "test": data.NUM_PUBLIC + 750 + 60, "unsup": 30}
    for split, size in sizes.items():
        rows = [{"text": review(i % 2, rng), "label": i % 2} for i in range(size)]
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture(scope="module")
def task(imdb_folder):
    return data.imdb(imdb_folder)


# --- features ---


def test_words_are_counted_and_divided_by_the_length_of_the_text():
    numbers = data.vocabulary(["c b b a a a", "c b zebra"], size=3)
    assert numbers == {"a": 0, "b": 1, "c": 2}, "a and b three times, c twice, zebra once"
    texts = ["A, b! A?", "zebra c zebra zebra", ""]
    features, labels = data.bags(texts, [1, 0, 1], numbers.get, 3).batch(torch.tensor([0, 1, 2]))
    assert features.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3), 0], [0, 0, 0.25], [0, 0, 0]]
    assert labels.tolist() == [1, 0, 1]
    presence, _ = data.bags(texts, [1, 0, 1], numbers.get, 3, "presence").batch(torch.tensor([0, 1, 2]))
    assert presence.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_the_records_of_a_task_do_not_overlap_and_its_accuracy_is_that_of_the_dense_model(imdb_folder, task):
    held_out = [json.loads(line)["text"] for line in gzip.open(imdb_folder / "test.jsonl.gz", "rt")]
    parts = [task.public, task.tuning, task.test]
    assert [len(part) for part in parts] == [250, 750, 60] and len(held_out) == 1060
    joined = torch.cat([part.counts_NW for part in parts])
    numbers = data.vocabulary(json.loads(line)["text"] for line in gzip.open(imdb_folder / "unsup.jsonl.gz", "rt"))
    assert torch.equal(joined, data.bags(held_out, [0] * 1060, numbers.get, len(numbers)).counts_NW)
    model = task.model()
    with torch.no_grad():
        model.weight.copy_(torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(0)))
    torch.nn.init.constant_(model.bias, 0.0)
    features, labels = task.test.batch(torch.arange(60))
    sizes = model(features).flatten().unique()
    widest = int(sizes.diff()[10:-10].argmax()) + 10  # no record so near to the boundary that rounding decides
    torch.nn.init.constant_(model.bias, -float(sizes[widest : widest + 2].mean()))
    assert not torch.equal(model(features) > 0, model(features) > model.bias), "a bias that matters"
    expected = ((model(features)[:, 0] > 0).long() == labels).float().mean().item()
    assert task.accuracy(model, task.test) == pytest.approx(expected)


def test_news_are_hashed_and_shuffled(tmp_path):
    rows = [f"word{i} of news\t{data.AG_NEWS_CLASSES[i % 4]}" for i in range(400)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    task = data.ag_news(tmp_path, num_tuning=100)
    assert [len(part) for part in (task.train, task.public, task.tuning, task.test)] == [400, 250, 100, 50]
    assert task.model().weight.shape == (4, data.NUM_WORDS)
    assert task.train.labels_N.tolist() == [i % 4 for i in range(400)]
    assert task.public.labels_N.tolist() != [i % 4 for i in range(250)]
    assert (task.train.counts_NW.sum(dim=1) == 3).all()


# --- the loop ---

DELAYED = {"rate": 0.5, "rate_adaptive": 1.0, "clip": 0.2, "clip_adaptive": 1.0, "eps": 1e-3}
CASES = {
    "sgd": (Method("sgd", []), {"rate": 1.0, "clip": 0.2}),
    "adam": (Method("adam", [], "adam"), {"rate": 0.1, "clip": 0.2, "eps": 1e-8}),
    "dp2": (Method("dp2", [], preconditioner="dp2_yogi", options={"delay": 2}), DELAYED),
    "noise aware": (
        Method("dp2", [], preconditioner="dp2_rmsprop", options={"delay": 2, "unbiased": True}),
        DELAYED | {"eps": None},
    ),
    "variant 1": (
        Method("dp2", [], preconditioner="dp2_rmsprop", options={"delay": 2, "variant": "extra_query"}),
        DELAYED,
    ),
    "adadps": (Method("adadps", [], preconditioner="adadps"), {"rate": 1.0, "clip": 1.0, "eps": 1e-3}),
    "pda": (Method("pda", [], mirror=True), {"rate": 1.0, "clip": 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loop_is_private_step(case, task, tmp_path, monkeypatch):
    """Same keys, same bits, for a run with a ledger, keys on disk and the step of the library."""
    method, hyper = CASES[case]
    plan = training.make(method, hyper, Setting(8, 7, noise_multiplier=0.5), len(task.train))
    chain = fixed_chain(KEY)
    monkeypatch.setattr(training, "keys", lambda seed: (chain.sampling_key, chain.noise_key))
    found = training.train_once(task, plan, method, hyper, 0, evaluate_every=7).model

    model = task.model()
    engine = make_engine(model, plan.clipper)
    config = training.dataclasses.replace(plan.config, unsafe_fixed_noise_key=KEY)
    plan = training.dataclasses.replace(plan, config=config)
    run = PrivateRun(plan, output_dir=tmp_path / "run", private_state_dir=tmp_path / "keys")
    public = training.public_gradients(task, model)
    run.start_preclip(engine, public=public)
    steps = [PublicMirrorDescent(public, num_steps=7)] if method.mirror else []
    optimizer = training.make_optimizer(method, hyper, model.parameters())
    for step in range(1, 8):
        features, labels = task.train.batch(torch.tensor(run.draw(step)))
        batches = [{"features": features, "labels": labels}] if len(labels) else []
        private_step(
            engine, lambda batch: task.losses(model(batch["features"]), batch["labels"]), batches,
            run=run, step=step, chain=steps,
        )  # fmt: skip
        optimizer.step()
    run.close()
    assert found.weight.abs().max() > 0
    assert torch.equal(found.weight, model.weight) and torch.equal(found.bias, model.bias)


def test_each_phase_has_its_own_rate_and_clip_norm(task):
    method, hyper = CASES["dp2"]
    plan = training.make(method, hyper, Setting(8, 7, noise_multiplier=1.0), len(task.train))
    assert plan.config.clipping_norm == 0.2 and plan.preclip.clipping_norm == 1.0 and plan.preclip.eps == 1e-3
    assert plan.preclip.learning_rate_ratio * hyper["rate"] == hyper["rate_adaptive"] == 1.0
    assert training.make_optimizer(method, hyper, task.model().parameters()).defaults["lr"] == 0.5


def test_the_extra_query_costs_noise_and_not_epsilon(task):
    """At one epsilon each of its two queries has sqrt(2) of the noise; at one noise per query, a larger epsilon."""

    def plan(case: str, sigma: float):
        return training.make(*CASES[case], Setting(8, 7, noise_multiplier=sigma), len(task.train))

    one, two = plan("sgd", 1.0), plan("variant 1", 1.0)
    assert two.epsilon() == one.epsilon()
    assert two.noise_multiplier * two.sensitivity == pytest.approx(
        math.sqrt(2) * one.noise_multiplier * one.sensitivity
    )
    assert plan("variant 1", 2**-0.5).epsilon() > 1.3 * one.epsilon()


def test_factored_is_full_for_one_output_and_not_for_four(task):
    def trained(task, factored: bool):
        method = Method("dp2", [], preconditioner="dp2_rmsprop", options={"delay": 3, "factored": factored})
        plan = training.make(method, DELAYED, Setting(8, 9, noise_multiplier=0.5), len(task.train))
        return training.train_once(task, plan, method, DELAYED, 1, evaluate_every=9).model.weight

    torch.testing.assert_close(trained(task, True), trained(task, False), rtol=1e-4, atol=1e-6)
    four = training.dataclasses.replace(task, num_classes=4)
    assert not torch.allclose(trained(four, True), trained(four, False), rtol=0.1)


# --- runs that are kept, and the commands ---


def test_the_grids_are_what_a_plan_takes():
    for method in [*imdb.METHODS, *imdb.NO_BIAS, *imdb.PRESENCE, *ag_news.METHODS, *ag_news.NO_BIAS]:
        assert method.candidates()
        for hyper in method.candidates():
            training.make(method, hyper, Setting(8, 5000, noise_multiplier=1.0), 100)
    for delay in imdb.DELAYS:
        assert imdb.SETTING.num_steps % (2 * delay) == 0


def test_the_finetuning_command_is_one_that_glue_takes(tmp_path):
    for method in lora.METHODS:
        for hyper in method.candidates():
            _, data_args, training_args = parse(
                lora.flags(method, hyper, 0, tmp_path, tmp_path, str(tmp_path / "run"))
            )
            config = training_args.privacy_config(64)
            assert config.preconditioner == ("dp2_rmsprop" if method.name.startswith("DP2") else "none")
            assert data_args.max_seq_length == 32 and training_args.learning_rate == hyper["rate"]
            if method.name.startswith("DP2"):
                assert config.preconditioner_kwargs == {**hyper["options"], "delay": lora.DELAY}


def test_the_predicted_decrease_is_that_of_noisy_steps(task):
    """Against autograd, loops over records, and the mean loss after 4,000 noisy steps of the best length."""
    rng = np.random.default_rng(0)
    size = task.model().weight.numel()
    weights, scale = 0.1 * rng.normal(size=size), np.exp(rng.normal(size=size + 1))
    x, y = task.train.batch(torch.arange(len(task.train)))
    x, y, start = x.double(), y.double(), torch.from_numpy(weights)
    bias = explain.best_bias((x @ start).numpy(), y.numpy())
    assert abs(float((torch.sigmoid(x @ start + bias) - y).mean())) < 1e-12

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ w + bias, y)

    gradient, hessian = torch.func.grad(loss)(start), torch.func.hessian(loss)(start)
    inverse, stddev, clips = torch.from_numpy(1 / scale), 0.05, {"plain": 0.55, "divided": 1.0, "no bias": 0.1}
    one = torch.ones_like(inverse)
    with_bias = torch.cat([x, torch.ones(len(x), 1)], dim=1)

    def clipped(bound: float, factor: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The words' part of the mean of the clipped records."""
        grads = [(torch.sigmoid(a[:size] @ start + bias) - b) * a * factor for a, b in zip(features, y, strict=True)]
        return torch.stack([g * min(1, bound / g.norm().item()) for g in grads]).mean(dim=0)[:size]

    found = explain.decreases(task, weights, scale, clips=clips, stddev=stddev)
    assert 0.2 < found["clipped, plain"] < 0.8 and 0.2 < found["clipped, divided"] < 0.98
    plain, divided = clipped(0.55, one, with_bias), clipped(1.0, inverse, with_bias)
    words = inverse[:size]
    cases = {
        "plain": (plain, stddev * 0.55 * one[:size]),
        "divided": (divided, stddev * one[:size]),
        "divided, two queries": (divided, 2**0.5 * stddev * one[:size]),
        "noise first": (plain * words, stddev * 0.55 * words),
        "no bias": (clipped(0.1, one[:size], x), stddev * 0.1 * one[:size]),
        "without noise": (gradient, 0 * words),
    }
    for name, (signal, noise) in cases.items():
        curvature = signal @ hessian @ signal + (hessian.diagonal() * noise.square()).sum()
        slope = gradient @ signal
        assert found[name] == pytest.approx(float(slope**2 / (2 * curvature)), rel=1e-5), name
        eta = 0.02 * slope / curvature  # short steps, for which second order is exact enough
        z = torch.from_numpy(rng.normal(size=(4000, size)))
        after = torch.stack([loss(start - eta * (signal + noise * draw)) for draw in torch.cat([z, -z])]).mean()
        # of a step of a fraction c of the best length, c (2 - c) of the best decrease
        assert float(loss(start) - after) == pytest.approx(found[name] * 0.02 * 1.98, rel=0.03), name
    norms = with_bias.square() @ inverse.square()
    assert found["bias, divided"] == pytest.approx(float((inverse[-1] ** 2 / norms).mean()), rel=1e-5)
    assert found["bias, plain"] == pytest.approx(float((1 / with_bias.square().sum(dim=1)).mean()), rel=1e-5)
    errors = (torch.sigmoid(x @ start + bias) - y).abs()
    assert found["clipped, plain"] == pytest.approx(float((errors * with_bias.norm(dim=1) > 0.55).double().mean()))
