"""Federated next words: the task keeps users apart, a run is what it says, the command writes table and plot."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.workload import workload_of
from hf_dpopt.noise import momentum_workload
from recipes.paper.federated import task, training

pytestmark = pytest.mark.slow

SMALL = task.Size(vocabulary=30, width=32, layers=1, max_words=6)
WORDS = "the cat sat on a mat and ran to see old dog".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 users who train, 4 of whom also wrote in dev; 3 of dev alone, 3 of test alone, one of dev and test."""
    made = tmp_path_factory.mktemp("irc")
    rng = np.random.default_rng(0)
    rows = [(f"t{u}", "train") for u in range(24) for _ in range(1 + u % 4)]
    rows += [(f"t{u}", "dev") for u in range(4)] + [(f"d{u}", "dev") for u in range(3) for _ in range(4)]
    rows += [(f"e{u}", "test") for u in range(3) for _ in range(4)] + [("both", "dev"), ("both", "test")]
    with gzip.open(made / "messages.jsonl.gz", "wt", encoding="utf-8") as file:
        for user, split in rows:
            start = int(rng.integers(len(WORDS)))
            text = " ".join([*(WORDS + WORDS)[start : start + 4], "zebra"])
            file.write(json.dumps({"user": user, "time": "", "split": split, "text": text}) + "\n")
    with (made / "public.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(50):
            start = int(rng.integers(len(WORDS)))
            file.write(json.dumps({"text": " ".join((WORDS + WORDS)[start : start + 4])}) + "\n")
    return made


@pytest.fixture(scope="module")
def words(folder: Path) -> task.Task:
    return task.read_task(folder, folder / "public.jsonl", SMALL)


def short_run(**changes: Any) -> training.Run:
    values = dict(
        mechanism="BLT", epsilon=8.0, rate=0.5, seed=0, num_rounds=8, users=6, clipping_norm=1.0, local_rate=0.5,
        local_batch=2,
    )  # fmt: skip
    return training.Run(**{**values, **changes})


def test_evaluation_users_never_train_and_choose_no_rate(words: task.Task) -> None:
    users = {name: set(getattr(words, name)["user"]) for name in ("train", "validation", "test")}
    assert users["train"] == {f"t{u}" for u in range(24)} and words.num_users == 24
    assert users["validation"] == {"d0", "d1", "d2"} and users["test"] == {"e0", "e1", "e2"}
    assert len(words.validation) == len(words.test) == 12 and words.num_words == 4 + len(WORDS)


@pytest.mark.parametrize("mechanism", training.MECHANISMS)
def test_a_run_is_what_it_says(words: task.Task, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum and cool-down, for which the noise is tuned; users a whole pass apart; the budget."""
    made: list[Any] = []
    real = training.DPTrainer
    monkeypatch.setattr(training, "DPTrainer", lambda **given: made.append(real(**given)) or made[-1])
    result = training.train(short_run(mechanism=mechanism), words)
    (trainer,) = made
    assert trainer.plan.unit == "user" and trainer.plan.num_examples == 24
    assert result["epsilon_spent"] <= 8.0 and [step for step, _ in result["curve"]] == list(range(1, 9))
    assert trainer.optimizer.optimizer.param_groups[0]["momentum"] == 0.95
    workload = workload_of(TrainerInputs(args=trainer.args), 8)
    assert workload.coefs == momentum_workload(8, 0.95).coefs and not workload.adaptive
    assert workload.step_sizes is not None
    assert workload.step_sizes[:7] == (1.0,) * 7 and workload.step_sizes[7] < 0.6
    if mechanism == "DP-SGD":
        assert trainer.plan.sampler.name == "poisson" and result["adjacency"] == "add_or_remove_one"
    else:
        assert trainer.plan.sampler.name == "fixed_order" and trainer.plan.sampler.participation(8).min_sep == 4


def test_without_noise_it_learns(words: task.Task) -> None:
    result = training.train(
        short_run(epsilon=None, mechanism="DP-SGD", num_rounds=60, rate=0.3, users=12, clipping_norm=5.0), words
    )
    assert result["epsilon_spent"] is None and result["noise_multiplier"] == 0
    assert (
        result["test"]["accuracy"] > 0.5 > 0.3 > result["before"]["accuracy"]
    )  # the next word is certain; 0.8 is usual
