"""The planted faults: their texts still fit the package, their tests exist, and the pages are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.faults import __main__ as command
from tests.faults.table import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_a_fault_can_be_planted_and_its_tests_exist(fault, repo: Path):
    """A change of the package may move the text of a fault: plant it where its code is now, and run the command."""
    source = (repo / fault.file).read_text(encoding="utf-8")
    assert fault.planted(source) != source and (fault.caught_by or fault.finding)
    for test in fault.caught_by:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (repo / file).read_text(encoding="utf-8"), test


def test_a_fault_whose_text_is_gone_is_named():
    with pytest.raises(ValueError, match="is 0 times in"):
        FAULTS[0].planted("something else")


def test_every_fault_was_caught_when_they_were_last_planted():
    found = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    planted = [(row["what"], row["file"]) for row in found["bugs"]]
    assert planted == [(fault.what, fault.file) for fault in command.TESTED], f"run: {found['command']}"
    assert all(row["caught_by"] for row in found["bugs"])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) for row in found["bugs"])
    assert len(planted) >= 20
    assert command.PAGE.read_text(encoding="utf-8") == command.page(found["bugs"]), f"run: {found['command']}"


def test_rows_that_are_not_measured_again_keep_their_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = ({"what": one.what, "file": one.file, "caught_by": ["a"], "date": "2001-01-01"} for one in FAULTS[:2])
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    command.write([old, new])
    command.write([{**new, "date": "2002-02-02"}])
    rows = json.loads(command.RESULTS.read_text(encoding="utf-8"))["bugs"]
    assert [row["date"] for row in rows] == ["2001-01-01", "2002-02-02"]
