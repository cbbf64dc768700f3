"""`hyperparameter_search` of trainers as users make them; what a run that fails costs, and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dpopt import DPConfigError
from hf_dpopt.accounting.selection import RunCount
from hf_dpopt.report import read_report
from tests import tiny
from tests.tuning.test_tune import RATES, place_of


@pytest.fixture(autouse=True)
def two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunCount, "draw", lambda self, source: 2)


def searching(tmp_path: Path, **changes: Any) -> Any:
    options = {
        "noise_multiplier": None, "target_epsilon": 8.0, "tuned_runs": 3.0, "max_steps": 2, "recipe": "none",
        "eval_data_privacy": "public", "private_state_dir": str(tmp_path / "private"), "logging_steps": 1,
    }  # fmt: skip
    return tiny.trainer(tmp_path / "out", eval_dataset=tiny.records(16), **options | changes)


def charged(tmp_path: Path) -> int:
    return sum(path.read_text().count('"kind":"step"') for path in tmp_path.rglob("ledger.jsonl"))


def unlike() -> torch.nn.Module:
    """Another model at every call, as a head that is initialised by the seed of the run."""
    made = tiny.model()
    with torch.no_grad():
        made.classifier.weight.add_(torch.randn_like(made.classifier.weight))
    return made


class Init:
    """A `model_init` that counts its calls, and fails at those that are told."""

    def __init__(self, *fails: int):
        self.calls, self.fails = 0, fails

    def __call__(self) -> torch.nn.Module:
        self.calls += 1
        if self.calls in self.fails:
            raise OSError("the weights are not there")
        return tiny.model()


@pytest.mark.parametrize(
    "given",
    [{}, *({"model_init": init} for init in (lambda: tiny.model(), lambda trial: tiny.model(), unlike))],
    ids=["model", "model_init", "of a trial", "unlike"],
)
def test_a_search_releases_the_best_of_its_runs(given: Any, tmp_path: Path, capfd: Any) -> None:
    trainer = searching(tmp_path, **given)
    before = tiny.weights(tiny.model())
    best = trainer.hyperparameter_search(RATES, metric="eval_loss", direction="minimize")
    assert best.hyperparameters["learning_rate"] in RATES["learning_rate"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best.objective, rel=1e-5)
    released, found = load_file(tmp_path / "out" / "model.safetensors"), tiny.weights(trainer.model)
    assert all(torch.equal(value, released[name]) for name, value in found.items())
    assert any((before[name] != value).any() for name, value in found.items()) and charged(tmp_path) == 2
    facts = read_report(tmp_path / "out")
    assert facts.plan["tuned"]["mean"] == 3 and 7.9 < facts.epsilon <= 8
    console = "".join(capfd.readouterr())
    assert "learning_rate" not in console and "grad_norm" not in console
    left = {path.name for path in place_of(tmp_path).iterdir()}
    assert left == {"tuning.jsonl", "tuning.jsonl.lock", "tuning.lock"}


def test_a_run_that_fails_before_its_first_step_costs_nothing_and_says_why(tmp_path: Path) -> None:
    init = Init(2, 3)
    trainer = searching(tmp_path, model_init=init)
    for _ in range(2):
        with pytest.raises(DPConfigError, match="before its first step: OSError: the weights are not there.") as error:
            trainer.hyperparameter_search(RATES)
        assert isinstance(error.value.__cause__, OSError) and charged(tmp_path) == 0
    assert trainer.hyperparameter_search(RATES).objective is not None


def test_a_run_that_fails_between_its_ledger_and_its_first_step(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        fails = True

        def on_train_begin(self, *states: Any, **others: Any) -> None:
            if Stops.fails:
                raise OSError("the log is full")

    trainer = searching(tmp_path, callbacks=[Stops()])
    with pytest.raises(DPConfigError, match="before its first step: OSError: the log is full"):
        trainer.hyperparameter_search(RATES)
    assert charged(tmp_path) == 0
    Stops.fails = False
    assert trainer.hyperparameter_search(RATES).objective is not None
    assert charged(tmp_path) == 2, "of the run that is released"


def test_what_fails_later_is_told_to_nobody_but_the_private_log(tmp_path: Path, capfd: Any) -> None:
    def metrics(predictions: Any) -> Any:
        raise KeyError("no such label")

    trainer = searching(tmp_path, compute_metrics=metrics)
    with pytest.raises(DPConfigError, match="No run of the tuning gave a score") as error:
        trainer.hyperparameter_search(RATES)
    place = place_of(tmp_path)
    assert str(place) in str(error.value) and "label" not in str(error.value) + "".join(capfd.readouterr())
    logs = list(place.glob("run-*.log"))
    assert len(logs) == 2 and all("KeyError: 'no such label'" in log.read_text() for log in logs)


@pytest.mark.parametrize(
    "changes, call, match",
    [
        ({}, {"hp_space": RATES, "backend": "optuna"}, "takes no backend here.*optuna"),
        ({}, {"hp_space": RATES, "n_trials": 10}, "a number of runs that is known"),
        ({}, {"hp_space": lambda trial: {}}, "fixed beforehand"),
        ({}, {"hp_space": RATES, "direction": "best"}, "is no direction"),
        ({}, {"hp_space": RATES, "metric": "loss"}, "begins with eval_"),
        ({"eval_data_privacy": "undeclared"}, {"hp_space": RATES}, "Say whose they are"),
        ({"tuned_runs": None}, {"hp_space": RATES}, "tuned_runs=10"),
    ],
)
def test_searches_that_are_refused(tmp_path: Path, changes, call, match):
    with pytest.raises(DPConfigError, match=match):
        searching(tmp_path, **changes).hyperparameter_search(**call)
