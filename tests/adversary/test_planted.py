"""The planted bugs: their texts still fit the package, their tests exist, and the page is that of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.adversary.planted import __main__ as command
from tests.adversary.planted.bugs import BUGS


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_bug_can_be_planted_and_its_tests_exist(bug, repo: Path):
    """A change of the package may move the text of a bug: plant it where its code is now, and run the command."""
    source = (repo / bug.file).read_text(encoding="utf-8")
    assert command.planted(bug, source) != source
    for test in bug.caught_by:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (repo / file).read_text(encoding="utf-8"), test


def test_a_bug_whose_text_is_gone_is_named():
    with pytest.raises(ValueError, match="is 0 times in"):
        command.planted(BUGS[0], "something else")


def test_every_bug_was_caught_when_they_were_last_planted():
    if not command.RESULTS.exists():
        pytest.skip("the bugs were not planted yet: python -m tests.adversary.planted")
    found = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    planted = [(row["what"], row["file"]) for row in found["bugs"]]
    assert planted == [(bug.what, bug.file) for bug in BUGS], f"run: {found['command']}"
    assert all(row["caught_by"] for row in found["bugs"])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) for row in found["bugs"])
    assert len(BUGS) >= 20
    assert command.PAGE.read_text(encoding="utf-8") == command.page(found["bugs"]), f"run: {found['command']}"


def test_rows_that_are_not_measured_again_keep_their_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = ({"what": bug.what, "file": bug.file, "caught_by": ["a"], "date": "2001-01-01"} for bug in BUGS[:2])
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    command.write([old, new])
    command.write([{**new, "date": "2002-02-02"}])
    rows = json.loads(command.RESULTS.read_text(encoding="utf-8"))["bugs"]
    assert [row["date"] for row in rows] == ["2001-01-01", "2002-02-02"]
