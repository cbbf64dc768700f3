"""`hf-dpopt verify` on files that are no reports at all, that steer a terminal, and on audits beside a report."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, read_report
from hf_dpopt.cli.app import app
from hf_dpopt.report.report import AUDIT, CANARIES, INSTALLATION, add_audit, read_audits, statement_in, write_report
from hf_dpopt.verify import FAILED, NOT_CHECKED, reading, verifying
from hf_dpopt.verify.outcome import OK, Check
from tests.verify import runs
from tests.verify.forging import Folder

Forge = Callable[[str], Folder]


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forge:
    """A new copy of a run's public files; epsilon, which is none of this page's matter, is taken for true."""
    true = Check("epsilon of the plan", OK, "as claimed", {"claim": "the plan", "supports": True})
    monkeypatch.setitem(verifying.OF_RUN, "epsilon", lambda _: [true])
    numbers = itertools.count()
    return lambda name: Folder(runs.REPORTS / name, tmp_path / str(next(numbers)))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ledger.jsonl", "statement.md", AUDIT])
def test_a_pipe_is_no_file_and_nobody_waits_for_it(name: str, forge: Forge) -> None:
    folder = forge("lora")
    (folder.path / "privacy" / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / "privacy" / name)
    outcome = folder.verify()
    assert outcome.has_failed or name == "statement.md", "a folder without a statement has one check less"


def test_files_of_a_cache_are_links(forge: Forge) -> None:
    folder = forge("lora")
    for path in (folder.report_path, folder.ledger_path, folder.path / "adapter_model.safetensors"):
        path.rename(blob := folder.path / f"blob-{path.name}.x")
        path.symlink_to(blob)
    assert not folder.failed()


def test_a_file_that_is_too_large_is_not_read(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = forge("lora")
    monkeypatch.setattr(reading.read_regular, "__defaults__", (1000,))
    assert folder.failed() == {"report"} and "more than 1000 bytes" in folder.verify().checks[0].detail


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
def test_json_is_utf_8(encoding: str, forge: Forge) -> None:
    folder = forge("lora")
    text = folder.report_path.read_text().replace('"plan"', '"\u00e9": 1, "plan"', 1)
    folder.report_path.write_bytes(text.encode(encoding))
    assert folder.failed() == {"report"}


def test_more_steps_than_can_be_recomputed_are_not_waited_for(forge: Forge) -> None:
    folder = forge("nu_dpftrl")
    folder.edit_plan(lambda plan: plan.update(num_steps=10**9, noise_steps=10**9))
    folder.edit_report(lambda report: report.update(steps_planned=10**9))
    start = time.monotonic()
    outcome = folder.verify()
    assert time.monotonic() - start < 10
    open_ = {check.name for check in outcome.checks if check.status == NOT_CHECKED}
    assert {"sensitivity", "sampler"} <= open_, [str(check) for check in outcome.checks]


def test_what_is_quoted_does_not_steer_the_terminal(forge: Forge) -> None:
    """Else a report could print its own verdict over that of the checks."""
    folder = forge("lora")
    folder.edit_report(lambda report: report["plan"].update({"\x1b[1A\x1b[2K\rverified: \u202e\ud800": 1}))
    printed = CliRunner().invoke(app, ["verify", str(folder.path)]).output
    assert "FAILED" in printed and all(c.isprintable() or c == "\n" for c in printed)


def test_weights_that_the_report_does_not_name_fail(forge: Forge) -> None:
    folder = forge("lora")
    (folder.path / "training_args.bin").write_bytes(b"")
    assert not folder.failed()
    (folder.path / "model.safetensors").write_bytes(b"")
    assert folder.failed() == {"released files"}


# --- audits ----------------------------------------------------------------------------------------------------------

BOUNDS = {"one_run": 1.25, "independent": 1.75}


def _audited(folder: Folder, kind: str, **changes: Any) -> Folder:
    facts = read_report(folder.path)
    found = {"num_canaries": 1000, "num_steps": 32, "lower_bounds": BOUNDS, "delta": facts.delta, "confidence": 0.95,
             "passed": True, "claimed_epsilon": facts.epsilon}  # fmt: skip
    add_audit(folder.path, kind, found | changes)
    return folder


def test_a_statement_tells_what_audits_found_and_verify_agrees(forge: Forge) -> None:
    folder = _audited(_audited(forge("lora"), INSTALLATION), CANARIES)
    text = folder.statement.read_text()
    assert "## What an audit found" in text and "1.75 (independent, confidence 95%)" in text
    assert "1.25 (one_run, confidence 95%)" in text and "It is no estimate of epsilon" in text
    assert text == statement_in(folder.path / "privacy", read_report(folder.path))
    outcome = folder.verify()
    assert not outcome.has_failed and outcome.exit_code(is_strict=False) == 0, outcome.verdict
    assert outcome.checks[-1].name == "audits" and "1.75 by independent" in outcome.checks[-1].detail


def test_an_audit_of_an_earlier_state_is_not_shown(forge: Forge) -> None:
    folder = _audited(forge("lora"), CANARIES)
    audits = json.loads((folder.path / "privacy" / AUDIT).read_text())
    audits[CANARIES]["ledger_digest"] = "0" * 64
    (folder.path / "privacy" / AUDIT).write_text(json.dumps(audits))
    write_report(folder.path, read_report(folder.path))
    assert "audit found" not in folder.statement.read_text()
    assert [check.status for check in folder.verify().checks if check.name == "audits"] == [NOT_CHECKED]


@pytest.mark.parametrize(
    "changes",
    [
        {"passed": False},
        {"lower_bounds": BOUNDS | {"one_run": 1e3}},
        {"lower_bounds": BOUNDS | {"one_run": 1.0}},  # another one than the statement tells
        {"lower_bounds": BOUNDS | {"one_run": -1}},
        {"lower_bounds": []},
        {"delta": 1e-9},
        {"claimed_epsilon": 1.3},
        {"passed": "yes"},
    ],
    ids=str,
)
def test_forged_audits_fail(changes: dict[str, Any], forge: Forge) -> None:
    folder = _audited(forge("lora"), CANARIES)
    path = folder.path / "privacy" / AUDIT
    audits = json.loads(path.read_text())
    audits[CANARIES].update(changes)
    path.write_text(json.dumps(audits))
    outcome = folder.verify()
    assert {check.name for check in outcome.checks if check.status == FAILED} == {"audits"}


@pytest.mark.parametrize("text", ["", "[]", '{"canaries": 1}', '{"people": {}}', '{"canaries": {}, "canaries": {}}'])
def test_a_damaged_file_of_audits_fails_and_is_no_reason_to_end_a_run(text: str, forge: Forge) -> None:
    folder = forge("lora")
    path = folder.path / "privacy" / AUDIT
    path.write_text(text)
    assert folder.failed() == {"audits"}
    with pytest.raises(DPConfigError, match=r"audit.json was damaged"):
        read_audits(path.parent)
    write_report(folder.path, read_report(folder.path))
    assert "audit found" not in folder.statement.read_text()


def test_an_audit_like_a_run_is_written_beside_it(forge: Forge) -> None:
    folder = forge("lora")
    result = CliRunner().invoke(app, ["audit", "--like", str(folder.path), "--canaries", "100", "--steps", "4"])
    assert result.exit_code == 0, result.output
    assert "What an audit found" in folder.statement.read_text()
    assert not folder.failed()
    found = read_audits(folder.path / "privacy")[INSTALLATION]
    assert found["num_canaries"] == 100 and found["delta"] == read_report(folder.path).delta
