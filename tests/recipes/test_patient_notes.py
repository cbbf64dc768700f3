"""Small data from end to end: what `hf-dpopt plan` prints for 5,000 notes of 12 departments at epsilon 3, run."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MEASURED = REPO / "docs" / "patient_notes.json"
_SPEC = importlib.util.spec_from_file_location("patient_notes", REPO / "benchmarks" / "patient_notes.py")
assert _SPEC is not None and _SPEC.loader is not None
notes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(notes)


def test_the_largest_class_is_a_tenth(tmp_path: Path) -> None:
    assert 0.08 < notes.write_notes(tmp_path) < 0.12
    lines = (tmp_path / "train.csv").read_text().splitlines()
    assert len(lines) == 1 + notes.NUM_TRAIN and len(set(lines)) > 0.9 * notes.NUM_TRAIN


@pytest.mark.slow
def test_the_measured_command_is_the_one_that_plan_prints() -> None:
    """If advice changed: `python benchmarks/patient_notes.py` measures again."""
    found = json.loads(MEASURED.read_text())
    assert shlex.split(found["command"]) == notes.printed_command()
    assert found["private"]["accuracy"] >= 0.5 > 4 * found["majority"] and found["private"]["epsilon"] <= 3
