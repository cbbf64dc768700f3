"""The reproduction of arXiv:2212.00309: its records, and its loop against `private_step`, on tiny data."""

from __future__ import annotations

import gzip
import json
import random

import pytest
import torch

from hf_dpopt.clipping import make_engine
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.run.keys import fixed_chain
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.step import private_step
from recipes.paper.dp2 import data, training
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
    "variant 1, as printed": (
        Method("dp2", [], preconditioner="dp2_rmsprop", options={"delay": 2, "variant": "algorithm2"}),
        DELAYED,
    ),
    "adadps": (Method("adadps", [], preconditioner="adadps"), {"rate": 1.0, "clip": 1.0, "eps": 1e-3}),
    "pda": (Method("pda", [], mirror=True), {"rate": 1.0, "clip": 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loop_is_private_step(case, task, tmp_path):
    """Same keys, same bits, for a run with a ledger, keys on disk and the step of the library."""
    method, hyper = CASES[case]
    plan = training.make(method, hyper, Setting(8, 7, noise_multiplier=0.5), len(task.train))
    chain = fixed_chain(KEY)
    keys = chain.sampling_key, chain.noise_key
    found = training.train_once(task, plan, method, hyper, keys, evaluate_every=7).model

    model = task.model()
    engine = make_engine(model, plan.clipper)
    config = training.dataclasses.replace(plan.config, unsafe_fixed_noise_key=KEY)
    plan = training.dataclasses.replace(plan, config=config)
    run = PrivateRun(plan, output_dir=tmp_path / "run", private_state_dir=tmp_path / "keys")
    public = training.public_gradients(task, model)
    run.start_preclip(engine, public=public)
    steps = [PublicMirrorDescent(public, num_steps=7)] if method.mirror else []
    optimizer = training.make_optimizer(method.optimizer, hyper, model.parameters())
    for step in range(1, 8):
        features, labels = task.train.batch(torch.tensor(run.draw(step)))
        batches = [{"features": features, "labels": labels}] if len(labels) else []
        private_step(
            engine, lambda batch: task.losses(model(batch["features"]), batch["labels"]), batches,
            run=run, step=step, after_noise=steps,
        )  # fmt: skip
        optimizer.step()
    run.close()
    assert found.weight.abs().max() > 0
    assert torch.equal(found.weight, model.weight) and torch.equal(found.bias, model.bias)
