"""`hf-dpopt doctor` says what is there, and changes nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_dpopt.cli.app import app
from tests.helpers import run_files, tiny
from tests.reliability import faults
from tests.reliability.faults import FAULTS, Folders

BY_NAME = {fault.name: fault for fault in FAULTS}


def doctor(folders: Folders) -> Result:
    return CliRunner().invoke(app, ["doctor", str(folders.out), "--private-state-dir", str(folders.keys)])


def everything(folders: Folders) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folders.root.rglob("*")}


def test_a_sound_run(folders: Folders) -> None:
    before = everything(folders)
    result = doctor(folders)
    assert result.exit_code == 0 and everything(folders) == before
    for said in (
        r"^run +6 steps planned; sampling fixed_order, noise nu_dpftrl$",
        r"^ledger +whole; last record [0-9a-f]{64}$",
        r"^cost +4 steps charged in 1 chain: epsilon 1\.\d+ at delta 0\.001 \(zero_out\); 3\.\d+ planned$",
        r"^keys +.*: 1 of 1 kept, beside the log of the run$",
        r"^lock +free$",
        r"^checkpoint-4 +whole",
        r"^resume +from checkpoint-4, under its key; 2 steps are left, epsilon 3\.\d+ in the end$",
    ):
        assert re.search(said, result.output, re.MULTILINE), said


def test_what_it_says_of_cost_is_what_the_run_spends(folders: Folders) -> None:
    BY_NAME["torn weights"].inflict(folders)
    said = doctor(folders)
    assert said.exit_code == 1
    assert "checkpoint-4  ! not to resume from: model.safetensors is not what was saved" in said.output
    end = re.search(r"from checkpoint-2, with a fresh key \(2 .*\); 4 .* epsilon ([\d.]+) in the end", said.output)
    faults.resume(folders, None)
    assert run_files.charged(folders.out) == (4, 4)
    spent = faults.trainer(folders).privacy_spent()
    assert end is not None and spent.epsilon == pytest.approx(float(end[1]), rel=0.02)
    finished = doctor(folders)
    assert "resume          finished: checkpoint-6 is that of the last step" in finished.output


# fault -> (a line, the exit code)
SAID = {
    "torn weights": ("checkpoint-4  ! not to resume from: model.safetensors is not", 1),
    "no manifest": ("checkpoint-4  ! not to resume from: it was not written", 1),
    "half a folder": ("checkpoint-6  ! not to resume from: ", 1),
    "half a save": ("left          ! .*_unfinished_checkpoints/checkpoint-6.*the next run settles it", 1),
    "save not renamed": ("left          ! .*_unfinished_checkpoints/checkpoint-4.*the next run settles it", 1),
    "temporary files": ("left          ! .*report.json.*the next run settles it", 1),
    "link at the lock": ("lock          ! .*ledger.jsonl.lock is a link or no file; a run refuses it", 1),
    "edited log": ("ledger        ! .*log.jsonl, line", 1),
    "keys gone": ("keys            no log of run [0-9a-f]{16} in", 0),
    "ledger and keys gone": ("ledger        ! there is none at .* what was spent is unknown", 1),
    "ledger written to": ("ledger        ! .*no record; it was edited", 1),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_wrong_is_named_and_nothing_is_changed(folders: Folders, name: str) -> None:
    said, code = SAID[name]
    BY_NAME[name].inflict(folders)
    before = everything(folders)
    result = doctor(folders)
    assert re.search(said, result.output), result.output
    assert result.exit_code == code and everything(folders) == before


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_what_is_not_a_file_at_the_lock_is_named(folders: Folders, what: str) -> None:
    folders.lock.unlink(missing_ok=True)
    os.mkfifo(folders.lock) if what == "pipe" else folders.lock.mkdir()
    assert re.search(r"lock +! .* is a link or no file", doctor(folders).output)


def test_a_run_that_is_going_on_is_left_alone(folders: Folders) -> None:
    with run_files.in_use(folders.lock):
        assert re.search(r"lock +in use by process \d+: the run is going on", doctor(folders).output)


def test_a_run_that_ended_without_a_checkpoint_is_well(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "out", max_steps=2, save_strategy="no", private_state_dir=str(tmp_path / "keys")).train()
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "out"), "--private-state-dir", str(tmp_path / "keys")])
    assert shown.exit_code == 0 and "finished: all steps are charged, and no checkpoint was kept" in shown.output


def test_a_folder_in_which_nothing_ran(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1 and "none has begun in this folder. Name the output_dir" in result.output
    (tmp_path / "privacy").mkdir()  # the ledger was here
    assert "what was spent is unknown" in CliRunner().invoke(app, ["doctor", str(tmp_path)]).output


def test_a_folder_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["doctor", "/nowhere"])
    assert "is not a folder" in str(result.exception)
