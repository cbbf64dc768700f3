"""The ledger of a dataset charges every copy of a run, whatever its output_dir says, and a continued run only once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, DPTrainer
from hf_dpopt.accounting.filter import RenyiFilter, charge_of
from hf_dpopt.cli.app import app
from tests.adversary import forging
from tests.adversary.forging import records_of, write

SAVED_AT, NUM_STEPS, BUDGET = 2, 4, 40.0


@pytest.fixture(autouse=True)
def _private_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every output_dir has its default private folder."""
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "private"))


def train(out: Path, *, stop: int = NUM_STEPS, resume: bool = False, **changes: Any) -> DPTrainer:
    """Train a run that is charged to `people.jsonl` beside its folder."""
    options = dict(
        max_steps=NUM_STEPS, save_steps=SAVED_AT, noise_multiplier=1.5, privacy_ledger_epsilon=BUDGET,
        privacy_ledger=str(out.parent / "people.jsonl"),
    )  # fmt: skip
    return forging.train(out, stop=stop, resume=resume, **options | changes)[0]


def dataset_ledger(folder: Path) -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["ledger", str(folder / "people.jsonl"), "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def epsilon_of(made: DPTrainer, ledger: dict[str, Any], *runs: tuple[int, ...]) -> float:
    """Epsilon of runs with so many steps in each of their chains, by the rule of the ledger."""
    rule = RenyiFilter(ledger["epsilon"], ledger["delta"], ledger["order"])
    return rule.spent([charge_of(made.plan.event_after(run), made.plan.adjacency, rule.order) for run in runs])


def copy(out: Path, name: str) -> Path:
    shutil.copytree(out, out.parent / name)
    return out.parent / name


def test_copies_that_are_trained_are_all_charged(tmp_path):
    """Copies draw other noise for the same people: what they cost adds up."""
    out = tmp_path / "out"
    train(out, stop=SAVED_AT)
    copies = [copy(out, f"copy-{i}") for i in range(3)]
    for one in [out, *copies]:
        made = train(one, resume=True)
    ledger = dataset_ledger(tmp_path)
    truth = epsilon_of(made, ledger, (NUM_STEPS, *[NUM_STEPS - SAVED_AT] * len(copies)))
    assert ledger["spent"] == pytest.approx(truth) and len(ledger["runs"]) == 1, "copies share the log of the run"


@pytest.mark.parametrize("is_charged", [True, False])
def test_a_run_whose_keys_are_gone_is_charged_again(tmp_path, is_charged):
    """Nothing proves that it is the run that was charged, and not a copy; where none was, it pays for all its steps."""
    out, before = tmp_path / "out", (SAVED_AT, NUM_STEPS - SAVED_AT)
    train(out, stop=SAVED_AT, **{} if is_charged else {"privacy_ledger": None, "privacy_ledger_epsilon": None})
    shutil.rmtree(tmp_path / "private")
    made = train(out, resume=True)
    ledger = dataset_ledger(tmp_path)
    truth = epsilon_of(made, ledger, *[(NUM_STEPS,)] * is_charged, before)
    assert len(ledger["runs"]) == 1 + is_charged and ledger["spent"] == pytest.approx(truth)


def test_the_id_of_a_run_that_was_charged_makes_nothing_cheaper(tmp_path):
    """Who can write to `output_dir` names another run there, which has paid: the steps there are not its steps."""
    out = tmp_path / "out"
    train(out, stop=SAVED_AT, privacy_ledger=None, privacy_ledger_epsilon=None)
    train(tmp_path / "other")
    shutil.rmtree(tmp_path / "private")
    header, *rest = records_of(out)
    write(out, [header | {"run": records_of(tmp_path / "other")[0]["run"]}, *rest])
    made = train(out)
    ledger = dataset_ledger(tmp_path)
    assert ledger["spent"] == pytest.approx(epsilon_of(made, ledger, (NUM_STEPS,), (SAVED_AT, NUM_STEPS)))


def test_a_dataset_ledger_that_was_put_back_is_refused(tmp_path):
    """What others spent since may be missing from it, too."""
    out, people = tmp_path / "out", tmp_path / "people.jsonl"
    train(tmp_path / "other")
    backup = people.read_bytes()
    train(out, stop=SAVED_AT)
    people.write_bytes(backup)
    with pytest.raises(DPConfigError, match="lacks a charge of this run.*put back"):
        train(out, resume=True)


@pytest.mark.parametrize("name", ["other run", "not there", "unhashable"])
def test_the_entry_that_an_output_dir_names_counts_for_nothing(tmp_path, name):
    """Who can write there cannot have his run charged as another one."""
    out, other = tmp_path / "out", tmp_path / "other"
    train(other)
    train(out, stop=SAVED_AT)
    (entry,) = {one["entry"] for one in dataset_ledger(tmp_path)["runs"]} - {entry_of(out)}
    named = {"other run": entry, "not there": "f" * 16, "unhashable": ["x"]}[name]
    lines = records_of(out)
    for line in lines:
        if "privacy_ledger" in line.get("plan", {}):
            line["plan"]["privacy_ledger"]["entry"] = named
    write(out, lines)
    before = dataset_ledger(tmp_path)
    made = train(out)
    ledger = dataset_ledger(tmp_path)
    assert [one["entry"] for one in ledger["runs"]] == [one["entry"] for one in before["runs"]]
    assert ledger["spent"] >= epsilon_of(made, ledger, (NUM_STEPS,), (SAVED_AT, NUM_STEPS))


def entry_of(out: Path) -> str:
    return [one["plan"] for one in records_of(out) if one["kind"] == "plan"][-1]["privacy_ledger"]["entry"]


def test_a_run_that_goes_on_is_charged_once(tmp_path):
    """Stopped, killed and trained twice in one folder: one entry, with the exact cost of its chains."""
    out = tmp_path / "out"
    train(out, stop=1, save_steps=1)
    made = train(out, resume=True)
    ledger = dataset_ledger(tmp_path)
    assert len(ledger["runs"]) == 1 and ledger["spent"] == pytest.approx(epsilon_of(made, ledger, (NUM_STEPS,)))
    made = train(out)
    ledger = dataset_ledger(tmp_path)
    both = epsilon_of(made, ledger, (NUM_STEPS, NUM_STEPS))
    assert len(ledger["runs"]) == 1 and ledger["spent"] == pytest.approx(both)


def test_a_kill_after_the_charge_costs_nothing(tmp_path, monkeypatch):
    """The name of the entry is known before it is charged: the next start is the same run."""
    home, left = tmp_path / "home", tmp_path / "left"
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(home / "private"))
    fsync = os.fsync

    def copy_when_charged(descriptor: int) -> None:
        fsync(descriptor)
        path = home / "people.jsonl"
        if not left.exists() and path.exists() and '"charge"' in path.read_text():
            shutil.copytree(home, left)

    monkeypatch.setattr(os, "fsync", copy_when_charged)
    train(home / "out", stop=1)
    monkeypatch.undo()
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(home / "private"))
    shutil.rmtree(home)
    left.rename(home)
    assert not [line for line in (home / "out/privacy/ledger.jsonl").read_text().splitlines() if '"step"' in line]
    made = train(home / "out", resume=True)
    ledger = dataset_ledger(home)
    assert len(ledger["runs"]) == 1
    assert ledger["spent"] == pytest.approx(epsilon_of(made, ledger, (NUM_STEPS,)))
