"""DP^2 on posts of Stack Exchange: records, plans, methods, the climb and the table."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import random

import numpy as np
import pytest

from recipes.paper.dp2 import stackexchange as task
from recipes.paper.runs import KeptRuns

pytestmark = pytest.mark.slow

NUM = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Posts whose words say what they are; titles would say it too."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("posts")
    with gzip.open(path / "posts.jsonl.gz", "wt", encoding="utf-8") as file:
        for i in range(NUM):
            site, kind = task.CLASSES[i % 3].split(", ")
            words = [f"{site}{kind}{rng.randrange(5)}" for _ in range(6)] + [f"post{i}"]
            title = f"title{i}" if kind == "question" else ""
            row = {"site": f"{site}.stackexchange.com", "kind": kind, "title": title, "text": " ".join(words), "id": i}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def small(monkeypatch):
    """A task of a second: 200 training records, 12 steps."""
    for name, value in {"NUM_TUNING": 40, "NUM_TEST": 40, "NUM_PUBLIC": 20, "NUM_WORDS": 64, "BATCH": 40,
                        "NUM_STEPS": 12, "DELAY": 3, "CHOOSE": range(11, 13)}.items():  # fmt: skip
        monkeypatch.setattr(task, name, value)
    task.plan_of.cache_clear()
    yield
    task.plan_of.cache_clear()


@pytest.fixture
def tasks(small, folder):
    return functools.cache(functools.partial(task.make_task, folder))


def test_records_do_not_overlap_and_hold_no_titles(folder, small, monkeypatch):
    texts, labels = task.posts(folder)
    assert not any("title" in text for text in texts) and set(labels) == {0, 1, 2}
    monkeypatch.setattr(task, "NUM_WORDS", 5000)
    made = task.make_task(folder, task.PAPERS)
    parts = (made.train, made.public, made.tuning, made.test)
    assert [len(part) for part in parts] == [200, 20, 40, 40]
    rows = {tuple(row) for part in parts for row in part.x_NW.toarray()}
    assert len(rows) == NUM  # each post, which has a word of its own, is in one part


@pytest.mark.parametrize("name", task.FEATURES)
def test_features(name, folder, small):
    """Frequencies add up to 1 in each record; the bias is the last feature."""
    x_NW, bias = task.make_task(folder, name).train.x_NW.toarray(), task.FEATURES[name].bias
    assert x_NW.shape[1] == 64 + (bias > 0) and (x_NW[:, 64:] == bias).all()
    np.testing.assert_allclose(x_NW[:, :64].sum(axis=1), 1.0, rtol=1e-6)


def test_a_plan_keeps_its_budget_and_the_query_is_paid_for(small):
    plain, asked = task.plan_of(200, 3.0, None), task.plan_of(200, 3.0, 2.0)
    for plan in (plain, asked):
        assert 2.9 < plan.epsilon() <= 3.0
    assert asked.noise_multiplier > 1.02 * plain.noise_multiplier


@pytest.mark.parametrize("method", task.METHODS)
def test_every_method_learns_without_much_noise(method, tasks, monkeypatch):
    monkeypatch.setattr(task, "DELTA", 1e-3)
    made = task.METHODS[method]
    run = task.Run("frequencies, small bias", method, 500.0, *made.start, seed=0)
    run = dataclasses.replace(run, clip=1.0, rate=0.1 if made.optimizer != "sgd" else 10.0)
    results = task.train(tasks, run)
    assert results == task.train(tasks, run)  # seeds say all
    assert results["tuning"] > 0.6  # of three classes of the same size


def test_rows_of_one_seed_see_the_same_batches_and_other_noise(tasks, monkeypatch):
    drawn = []

    class Spy(task.PrivateGradients):
        def __init__(self, *given, keys, **named):
            drawn.append(keys)
            super().__init__(*given, keys=keys, **named)

    monkeypatch.setattr(task, "PrivateGradients", Spy)
    for method in ("DP-SGD", "one query"):
        task.train(tasks, task.Run(task.PAPERS, method, 500.0, *task.METHODS[method].start, seed=3))
    (batches, noise), (same, other) = drawn
    assert batches == same and noise != other


def test_the_table_compares_pairs(tmp_path, monkeypatch):
    """Accuracies that are known: DP2 is 2 points above DP-SGD on each seed, whatever the seed adds."""

    def train(run):
        lead = {"DP-SGD": 0.0, "DP2-RMSProp": 0.02}.get(run.method, 0.01) + 0.1 * ("small" in run.task)
        peak = -abs(np.log2(run.rate)) / 100 - abs(np.log(run.clip)) / 100
        return {"tuning": 0.5 + lead + peak, "test": 0.5 + lead + 0.03 * run.seed}

    rows, cells = task.table(KeptRuns(tmp_path / "runs.jsonl", train, lambda run, line: ""))
    assert len(rows) == sum(len(kind.epsilons) * len(kind.methods or task.METHODS) for kind in task.FEATURES.values())
    for row in rows:
        lead, half = row["over DP-SGD"]
        assert lead == pytest.approx({"DP-SGD": 0.0, "DP2-RMSProp": 2.0}.get(row["method"], 1.0)) and half < 1e-6
        assert row["stddev"] == pytest.approx(3.0 * np.std(range(5), ddof=1))
    best = task.with_best_features(rows, cells)
    assert len(best) == len(task.EPSILONS) * len(task.METHODS)
    for row in best:
        assert row["features"] == ("frequencies, small bias" if row["method"] in task.SOME else task.PAPERS)


def test_the_explanation_measures_what_it_says(tasks):
    sparse = task.sparsity(tasks("frequencies, no bias"))
    assert sparse["share of the bias in the squared norm"] == 0.0
    with_bias = task.sparsity(tasks("frequencies, bias"))
    squares_N = np.square(tasks("frequencies, no bias").train.x_NW.toarray()).sum(axis=1)
    assert with_bias["share of the bias in the squared norm"] == pytest.approx((1 / (1 + squares_N)).mean())
    posts = tasks(task.PAPERS)
    assert task.without_privacy(posts, posts.train, num_steps=60) > 90.0
    run = task.Run(task.PAPERS, "DP2-RMSProp", 500.0, 8.0, 0.3, 1.0, 300.0, 1.0, 0)
    refreshes = task.hidden_moments(tasks, run)
    assert [row["step"] for row in refreshes] == [3, 9]
    assert all(0 <= row["above the noise"] <= row["coordinates"] == 64 * len(task.CLASSES) for row in refreshes)
