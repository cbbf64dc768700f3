"""Files of `output_dir` that say less than the log does: no statement, budget or later run believes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer
from hf_dpopt.accounting import certificates
from tests.adversary.forging import records_of, write
from tests.adversary.test_evaluation_log import trainer as evaluator
from tests.adversary.test_forged_ledgers import NUM_STEPS, RAN, Scene, list_files, made, scene, train
from tests.helpers import tiny

__all__ = ["made", "scene"]  # fixtures


def _forget(out: Path, **header: Any) -> None:
    """Leave the first step in the ledger, and perhaps another header."""
    kept = [one for one in records_of(out) if one.get("step", 0) <= 1]
    write(out, [one | header if one["kind"] == "header" else one for one in kept])


def _idle(scene: Scene) -> DPTrainer:
    """A trainer that is made as that of the run, and trains nothing."""
    model, keys = tiny.model(dropout=0.0), str(scene.keys)
    return tiny.trainer(
        scene.out, model=model, private_state_dir=keys, max_steps=NUM_STEPS, learning_rate=1e-3, clipping_norm=0.1
    )


@pytest.mark.parametrize("header", [{}, {"run": "f" * 16}], ids=["own id", "another id"])
def test_a_trainer_that_publishes_states_what_the_log_charged(scene, header):
    _forget(scene.out, **header)
    publisher = _idle(scene)
    assert publisher.privacy_spent().num_steps == RAN
    publisher._release.write_report()
    assert json.loads((scene.out / "privacy/report.json").read_text())["steps_charged"] == RAN


@pytest.mark.parametrize("header", [{}, {"run": "f" * 16}], ids=["own id", "another id"])
def test_an_earlier_run_costs_what_its_log_charged_wherever_that_is(scene, header):
    _forget(scene.out, **header)
    with pytest.raises(DPConfigError, match="its keys were used for 3 steps that its ledger does not know"):
        tiny.trainer(scene.root / "new", earlier_runs=str(scene.out), private_state_dir=str(scene.keys))


def test_an_earlier_run_that_is_going_on_is_noticed_without_its_lock(tmp_path):
    """What it charges from then on would not be counted."""
    keys, refused = str(tmp_path / "keys"), []

    def begin_another(state: Any, model: Any) -> None:
        (tmp_path / "a/privacy/ledger.jsonl.lock").unlink(missing_ok=True)
        with pytest.raises(DPConfigError, match="is still going on"):
            tiny.trainer(tmp_path / "b", earlier_runs=str(tmp_path / "a"), private_state_dir=keys)
        refused.append(state.global_step)

    tiny.trainer(
        tmp_path / "a", callbacks=[tiny.At("step_end", begin_another)], max_steps=1, private_state_dir=keys
    ).train()
    assert refused == [1]


@pytest.mark.parametrize("how", ["kept", "edited", "deleted"])
@pytest.mark.parametrize("privacy", ["private", "public"])
def test_evaluations_of_an_earlier_process_are_stated(tmp_path, how, privacy):
    """Also where the process that goes on evaluates nothing."""
    first = evaluator(tmp_path, max_steps=2)
    first.train()
    told, budget = first.evaluate()["eval_epsilon"], first._evaluation.budget
    first.save_model()
    path = tmp_path / "run/privacy/report.json"
    report = json.loads(path.read_text())
    report["evaluations"] |= {"epsilon_spent": 0.001, "target_epsilon": 0.001, "num_charged": 1}
    if how == "edited":
        path.write_text(json.dumps(report))
    elif how == "deleted":
        path.unlink()
    others = {} if privacy == "private" else dict.fromkeys(["eval_target_epsilon", "eval_times"])
    last = evaluator(tmp_path, max_steps=3, eval_data_privacy=privacy, **others)
    last.train()
    found = json.loads(path.read_text())["evaluations"]
    assert found["delta"] == (budget.delta if privacy == "private" else last.plan.delta)
    spent = dp_accounting.get_epsilon_gaussian(budget.noise_multiplier, found["delta"])
    assert found["epsilon_spent"] == pytest.approx(spent, rel=1e-3) and found["num_charged"] == 1
    assert found["target_epsilon"] >= found["epsilon_spent"]
    assert privacy != "private" or found["epsilon_spent"] == pytest.approx(told)


@pytest.mark.parametrize("step", [2.0, 3, RAN + 1, 0, "4", True, None, [4], float("nan")])
def test_a_step_that_a_checkpoint_is_not_of_is_refused(scene, step):
    """Its state names the step that the run goes on after; the log stays readable."""
    folder = scene.out / f"checkpoint-{RAN}"
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
    list_files(folder)
    with pytest.raises(DPConfigError, match="trainer_state.json"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=str(folder))
    (folder / "privacy_ledger.json").unlink()
    made, again = train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)
    assert max(again) == NUM_STEPS and made.privacy_spent().num_steps == RAN + len(again)


@pytest.mark.parametrize("num_charged", [0, 1])
def test_no_delta_is_taken_from_a_ledger_without_its_log(tmp_path, num_charged):
    """Noise of a target_epsilon at a delta of 0.4 is next to none."""
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=2, private_state_dir=str(tmp_path / "keys"))
    chosen = tiny.trainer(tmp_path / "own", target_delta=None, **options)
    tiny.trainer(tmp_path / "of others", target_delta=0.4, allow_large_delta=True, **options).train()
    forged = records_of(tmp_path / "of others")
    forged[0]["run"] = "f" * 16
    write(tmp_path / "run", [one for one in forged if one.get("step", 0) <= num_charged])
    try:
        made = tiny.trainer(tmp_path / "run", target_delta=None, **options)
        made.train()
    except (DPBudgetExceeded, DPConfigError):
        return
    assert made.plan.delta == chosen.plan.delta and made.plan.noise_multiplier == chosen.plan.noise_multiplier


def test_no_proof_of_an_epsilon_is_taken_from_a_ledger_without_its_log(tmp_path, monkeypatch):
    """It is a few numbers, and samples that nobody drew fit to any."""
    options = dict(
        sampling="balls_in_bins", noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.2}, max_steps=8,
        private_state_dir=str(tmp_path / "keys"),
    )  # fmt: skip
    first = tiny.trainer(tmp_path / "run", callbacks=[tiny.StopAt(1)], **options)
    first.train()
    event = certificates.BallsInBinsDpEvent(
        first.plan.strategy, 0.5, first.plan.noise_steps, first.plan.sampler.steps_per_epoch
    )
    with monkeypatch.context() as patch:
        patch.setattr(certificates.Shares, "moments", lambda *samples, seed: (np.zeros(2), np.zeros(2)))
        proof = certificates.verify(event, 0.2, first.plan.delta, num_samples=10**8, attempts=certificates.ATTEMPTS)
    records = records_of(tmp_path / "run")
    records[0]["run"] = "f" * 16
    next(one["plan"] for one in records if one["kind"] == "plan")["certificate"] = proof.parameters()
    write(tmp_path / "run", records)
    assert tiny.trainer(tmp_path / "run", **options).plan.epsilon() >= first.plan.epsilon() > 1


@pytest.mark.parametrize("value", [None, {"a": 1}, 10**400, -1], ids=["none", "another mapping", "huge", "negative"])
@pytest.mark.parametrize(
    "name", ["noise_multiplier", "sampler", "noise_strategy", "noise_steps", "earlier_runs", "privacy_ledger"]
)
def test_a_plan_that_no_run_writes_is_refused_in_words(scene, name, value):
    """In a folder without its log, where it is read."""
    records = records_of(scene.out)
    next(one["plan"] for one in records if one["kind"] == "plan")[name] = value
    write(scene.out, records)
    try:
        made, again = train(scene.out, scene.root / "keys elsewhere", stop=NUM_STEPS, resume=True)
    except DPConfigError:
        return
    ran = sum(one["kind"] == "step" for one in records)
    assert made.privacy_spent().num_steps >= ran + len(again), "where it is not refused, all is charged"


@pytest.mark.parametrize(
    "change",
    [
        *({"noise_multiplier": value} for value in (float("inf"), 10**400, True, 1e-320, 1e308)),
        {"adjacency": "\ud800"},
        {"query": {"set": json.loads("[" * 900 + "]" * 900)}},
    ],
    ids=["infinite", "huge", "true", "tiny", "large", "adjacency", "deep"],
)
def test_an_evaluation_that_no_run_charges_is_refused_in_words(tmp_path, change):
    evaluator(tmp_path).evaluate()
    made = {"kind": "evaluation", "evaluation": "e" * 16, "noise_multiplier": 1.0, "query": {}}
    write(tmp_path / "run", [*records_of(tmp_path / "run"), made | {"adjacency": "add_or_remove_one"} | change])
    with pytest.raises(DPConfigError, match=r"ledger.jsonl"):
        evaluator(tmp_path).evaluate()
