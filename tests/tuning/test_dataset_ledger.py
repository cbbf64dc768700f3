"""The ledger of a dataset: what all runs on the same people cost, and that the one too many is not started."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from hf_dpopt import DPBudgetExceeded
from hf_dpopt.accounting import epsilon
from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.accounting.filter import Charge, RenyiFilter, best_order, charge_of
from hf_dpopt.cli.folders import show_ledger
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.dataset_ledger import DatasetLedger, Reservation, reserve
from hf_dpopt.run.ledger import Ledger
from tests.helpers import tiny

GAUSSIAN = GaussianDpEvent(2.0)


def reservation(event=GAUSSIAN, **changes) -> Reservation:
    return Reservation(**{"event": event, "adjacency": "zero_out", "unit": "example", "delta": 1e-5, **changes})


# --- the filter ---


def test_divergences_add_up_as_by_hand():
    """T Gaussians of noise s have divergence T a / (2 s^2) of order a; epsilon by Prop. 12 of arXiv:2004.00010."""
    for order in (1.5, 3.0, 12.0):
        charge = charge_of(GAUSSIAN, "zero_out", order)
        assert charge == Charge(pytest.approx(order / 8), 0.0)
        spent = RenyiFilter(8.0, 1e-5, order).spent([charge] * 3)
        by_hand = 3 * order / 8 + math.log(1 - 1 / order) - math.log(0.99e-5 * order) / (order - 1)
        assert spent == pytest.approx(by_hand)


def test_the_filter_stops_before_the_budget_and_claims_no_less_than_an_exact_composition():
    order = best_order(GAUSSIAN, "zero_out", 8.0, 1e-5)
    rule, charges = RenyiFilter(8.0, 1e-5, order), []
    while rule.admits([*charges, charge_of(GAUSSIAN, "zero_out", order)]):
        charges.append(charge_of(GAUSSIAN, "zero_out", order))
    exact = [epsilon(SelfComposedDpEvent(GAUSSIAN, n), 1e-5, "zero_out").epsilon for n in (len(charges), 40)]
    assert len(charges) >= 3 and exact[0] <= rule.spent(charges) <= 8 < exact[1]
    assert rule.spent([*charges, charges[0]]) > 8


def test_caps_on_batches_have_a_share_of_delta_of_their_own():
    capped = SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(1000, 0.05, 80, 1.0), 10)
    poisson = SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.0)), 10)
    found, plain = (charge_of(event, "zero_out", 8.0) for event in (capped, poisson))
    assert found.divergence == plain.divergence and plain.exposure == 0 < found.exposure
    rule = RenyiFilter(8.0, 1e-5, 8.0)
    assert rule.admits([found]) == (found.exposure <= 1e-7)
    assert not rule.admits([Charge(0.0, 1.01e-7)])


def test_a_tuning_is_one_charge():
    tuned = charge_of(RunCount(mean=10.0).event(GAUSSIAN), "zero_out", 5.0)
    assert charge_of(GAUSSIAN, "zero_out", 5.0).divergence < tuned.divergence < math.inf


@pytest.mark.parametrize("event, adjacency", [(GAUSSIAN, "replace_one"), (GaussianDpEvent(0.0), "zero_out")])
def test_what_has_no_divergence_is_refused(event, adjacency):
    with pytest.raises(DPConfigError, match="has no Renyi analysis"):
        charge_of(event, adjacency, 4.0)


# --- the file ---


def test_runs_add_up_until_the_budget_is_spent(tmp_path: Path):
    path, entries = tmp_path / "people.jsonl", []
    with pytest.raises(DPBudgetExceeded, match="above the budget of 6 for these people.*It was not started"):
        for number in range(20):
            reserve(path, reservation(), budget=None if entries else 6.0, entry=f"run {number}")
            entries.append(f"run {number}")
    ledger = DatasetLedger.read(path)
    assert [*ledger.entries] == entries and len(entries) >= 2
    assert ledger.spent <= 6 and 0 <= ledger.left < ledger.share(charge_of(GAUSSIAN, "zero_out", ledger.filter.order))


def test_a_run_that_goes_on_is_charged_once_and_never_less(tmp_path: Path):
    path = tmp_path / "people.jsonl"
    spent = reserve(path, reservation(), budget=8.0, entry="run").spent
    assert reserve(path, reservation(), budget=8.0, entry="run").spent == spent
    assert reserve(path, reservation(GaussianDpEvent(9.0)), budget=None, entry="run").spent == spent
    assert DatasetLedger.read(path).spent == spent
    reserve(path, reservation(SelfComposedDpEvent(GAUSSIAN, 2)), budget=None, entry="run")
    ledger = DatasetLedger.read(path)
    assert len(ledger.entries) == 1 and ledger.spent > spent


@pytest.mark.parametrize(
    "changes, budget, match",
    [
        ({"adjacency": "add_or_remove_one"}, None, "their costs do not add up"),
        ({"unit": "user by author"}, None, "their costs do not add up"),
        ({}, 9.0, "is not the budget of"),
    ],
)
def test_other_promises_are_refused(tmp_path: Path, changes, budget, match):
    path = tmp_path / "people.jsonl"
    reserve(path, reservation(), budget=8.0, entry="one")
    before = path.read_bytes()
    with pytest.raises(DPConfigError, match=match):
        reserve(path, reservation(**changes), budget=budget, entry="other")
    assert path.read_bytes() == before


def test_a_ledger_begins_with_a_budget_that_admits_its_first_run(tmp_path: Path):
    path = tmp_path / "people.jsonl"
    with pytest.raises(DPConfigError, match="Add --privacy_ledger_epsilon 16"):
        reserve(path, reservation(), budget=None, entry="run")
    with pytest.raises(DPBudgetExceeded, match="does not even admit this run"):
        reserve(path, reservation(), budget=0.5, entry="run")
    assert not path.exists()


def test_an_edited_ledger_is_refused_and_a_torn_line_is_not_counted(tmp_path: Path):
    path = tmp_path / "people.jsonl"
    for entry in ("one", "two"):
        reserve(path, reservation(), budget=None if path.exists() else 8.0, entry=entry)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # a kill in the middle of a write
    assert len(DatasetLedger.read(path).entries) == 1
    reserve(path, reservation(), budget=None, entry="three")
    assert len(DatasetLedger.read(path).entries) == 2
    path.write_bytes(whole.rstrip(b"\n"))  # an editor took the last newline
    reserve(path, reservation(), budget=None, entry="three")
    assert len(DatasetLedger.read(path).entries) == 3
    path.write_bytes(whole.replace(b'"what":"training"', b'"what":"trainings"'))
    with pytest.raises(DPConfigError, match="it was edited"):
        reserve(path, reservation(), budget=None, entry="four")
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(DPConfigError, match="lines were removed"):
        DatasetLedger.read(path)


def _reserve_five(path: str, name: str) -> None:
    for number in range(5):
        reserve(path, reservation(GaussianDpEvent(20.0)), budget=8.0, entry=f"{name} {number}")


def test_runs_that_begin_at_once_are_all_counted(tmp_path: Path):
    path = tmp_path / "people.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_reserve_five, args=(str(path), name)) for name in ("one", "two")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(DatasetLedger.read(path).entries) == 10


# --- the trainer ---


def run(tmp_path: Path, name: str, **changes):
    private = str(tmp_path / f"keys-{name}")
    options = {"noise_multiplier": 1.5, "privacy_ledger": str(tmp_path / "people.jsonl"), "max_steps": 3}
    return tiny.trainer(tmp_path / name, private_state_dir=private, **{**options, **changes})


def test_a_trainer_is_charged_before_its_first_step_and_stopped_when_nothing_is_left(tmp_path: Path, capsys):
    first = run(tmp_path, "first", privacy_ledger_epsilon=6.0)
    first.train()
    ledger = DatasetLedger.read(tmp_path / "people.jsonl")
    (entry,) = ledger.entries
    found = Ledger.find(tmp_path / "first")
    assert found.plan["privacy_ledger"] == {"name": ledger.name, "entry": entry} and entry == found.run
    own = charge_of(first.plan.event_after((3,)), "add_or_remove_one", ledger.filter.order)
    assert ledger.entries[entry].charge.divergence == pytest.approx(own.divergence)
    statement = (tmp_path / "first" / "privacy" / "statement.md").read_text()
    assert f"`{ledger.name}`, entry `{entry}`; 1 runs have spent epsilon" in statement
    facts = json.loads((tmp_path / "first" / "privacy" / "report.json").read_text())["plan"]["privacy_ledger"]
    assert facts["digest"] == ledger.digest and facts["spent"] == ledger.spent
    with pytest.raises(DPBudgetExceeded, match="above the budget of 6 for these people"):
        run(tmp_path, "second", max_steps=300).train()
    assert Ledger.find(tmp_path / "second").num_charged == 0
    capsys.readouterr()
    show_ledger(tmp_path / "people.jsonl", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["spent"] == ledger.spent and [one["entry"] for one in shown["runs"]] == [entry]


def test_a_folder_is_not_a_ledger_and_the_file_is_named(tmp_path):
    with pytest.raises(DPConfigError, match="is a folder. Give the file that runs were given as privacy_ledger"):
        show_ledger(tmp_path, as_json=False)


def test_a_resumed_run_keeps_its_entry_and_its_ledger(tmp_path: Path):
    options = {"privacy_ledger_epsilon": 12.0, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    run(tmp_path, "one", **options).train()
    with pytest.raises(DPConfigError, match="and no privacy_ledger is named"):
        run(tmp_path, "one", **options | {"privacy_ledger": None, "privacy_ledger_epsilon": None}).train()
    spent = DatasetLedger.read(tmp_path / "people.jsonl").spent
    run(tmp_path, "one", **options | {"max_steps": 5}).train(resume_from_checkpoint=True)
    ledger = DatasetLedger.read(tmp_path / "people.jsonl")
    assert len(ledger.entries) == 1 and ledger.spent > spent


def test_a_budget_without_a_ledger_is_refused(tmp_path: Path):
    with pytest.raises(DPConfigError, match="Add --privacy_ledger FILE"):
        run(tmp_path, "one", privacy_ledger=None, privacy_ledger_epsilon=8.0).train()
