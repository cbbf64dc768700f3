"""The planted faults: their texts still fit the package, their tests exist, and the pages are those of the results."""

from __future__ import annotations

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
    text = command.PAGE.read_text(encoding="utf-8")
    rows = command.rows_of(text)
    assert text.startswith(command.HEAD) and len(rows) >= 20
    assert list(rows) == [fault.what for fault in command.TESTED], f"run: {command.COMMAND}"
    for fault in command.TESTED:
        assert f"| `{fault.file}` | `" in rows[fault.what], f"run: {command.COMMAND}"
        assert any(f"`{test}`" in rows[fault.what] for test in fault.caught_by), f"run: {command.COMMAND}"
