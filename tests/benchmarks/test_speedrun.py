"""The speedrun: which runs enter the table, in which order, and that its page is the one in docs/."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "benchmarks" / "speedrun.py"
_SPEC = importlib.util.spec_from_file_location("speedrun", _FILE)
speedrun = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(speedrun)

ENTRY = {
    "accuracy": 0.85, "loss": 0.4, "seconds": 600, "epsilon": 7.99, "delta": 1e-5, "private": True, "steps": 10,
    "batch": 8, "records": 100, "evaluated": 872, "model": "m", "self_check": "passed", "flags": "--lora_r 8", "commit": "abc", "device": "a CPU",
    "date": "2026-11-23", "versions": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, ""),
        ({"epsilon": 8.01}, "more than 8"),
        ({"epsilon": "inf"}, "more than 8"),
        ({"private": False}, "epsilon"),
        ({"delta": 1e-4}, "delta"),
        ({"self_check": "skipped by the user"}, "self-check"),
    ],
)
def test_runs_that_are_not_comparable_do_not_enter(change, words):
    found = speedrun.refusal({**ENTRY, **change})
    assert (words in found) and bool(found) == bool(words)


def test_the_fastest_that_reached_the_goal_comes_first():
    entries = [ENTRY, {**ENTRY, "accuracy": 0.87, "seconds": 900}, {**ENTRY, "accuracy": 0.866, "seconds": 700}]
    rows = [line for line in speedrun.page(entries).splitlines() if line.startswith("| ") and "%" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["**86.6%** (872)", "**87.0%** (872)", "85.0% (872)"]


def test_flags_replace_the_settings_of_the_same_name():
    assert "--lora_r" not in speedrun.flags_of(["--lora_r=16"])
    flags = speedrun.flags_of(["--lora_r", "16", "--bf16"])
    assert flags.count("--lora_r") == 1 and flags[flags.index("--lora_r") + 1] == "16"
    assert flags[flags.index("--start") + 1] == "pooled" and flags[-1] == "--bf16"


def test_what_makes_runs_comparable_cannot_be_changed(capsys):
    with pytest.raises(SystemExit):
        speedrun.main(["--model", "m", "--train_file", "a", "--validation_file", "b", "--", "--target_epsilon=9"])
    assert "set by the speedrun itself" in capsys.readouterr().err


def test_the_page_is_written_from_the_results():
    entries = json.loads(speedrun.RESULTS.read_text()) if speedrun.RESULTS.exists() else []
    assert speedrun.PAGE.read_text() == speedrun.page(entries)
