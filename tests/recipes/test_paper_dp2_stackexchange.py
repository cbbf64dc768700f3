"""DP^2 on posts of Stack Exchange: every method learns."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import random

import pytest

from recipes.paper.dp2 import stackexchange as task

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


@pytest.mark.parametrize("method", task.METHODS)
def test_every_method_learns_without_much_noise(method, tasks, monkeypatch):
    monkeypatch.setattr(task, "DELTA", 1e-3)
    made = task.METHODS[method]
    run = task.Run("frequencies, small bias", method, 500.0, *made.start, seed=0)
    run = dataclasses.replace(run, clip=1.0, rate=0.1 if made.optimizer != "sgd" else 10.0)
    results = task.train(tasks, run)
    assert results == task.train(tasks, run)  # seeds say all
    assert results["tuning"] > 0.6  # of three classes of the same size
