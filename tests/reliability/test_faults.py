"""Every fault ends in one clear line, or in nothing lost; what the page says of it is what was seen."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from tests.helpers.run_files import UNFINISHED
from tests.reliability import faults
from tests.reliability.faults import FAULTS, STOPPED_AT, Fault, Folders, Seen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow_but(13)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault(fault: Fault, folders: Folders, undisturbed: Seen) -> None:
    seen = faults.resume(folders, fault)
    said = " ".join((*seen.lines, seen.error))
    assert re.search(fault.says, said), said
    if fault.outcome == "refused":
        assert seen.error and seen.error.count("\n") == 0
        assert fault.is_during or sum(seen.charged) in (0, STOPPED_AT)
    else:
        assert not seen.error
        is_equal = all(torch.equal(value, undisturbed.weights[name]) for name, value in seen.weights.items())
        assert is_equal is (fault.outcome == "same")
        assert seen.charged == {"same": (6,), "older": (4, 4), "fresh": (4, 2)}[fault.outcome]
        assert not list(folders.root.rglob("*.tmp")) and not (folders.out / UNFINISHED).exists()
        assert not list(folders.keys.rglob("*.key")) or fault.name == "log gone", "nobody knows whose that key is"
    if fault.name == "output_dir deleted":
        assert not folders.out.exists(), "a report without a ledger"
    if folders.victim.exists():
        assert folders.victim.read_text() == "of somebody else"
    assert faults.recorded()[fault.done] == (faults.told(seen, folders) or "(nothing)"), faults.PAGE


def test_every_fault_is_on_the_page() -> None:
    assert list(faults.recorded()) == [fault.done for fault in FAULTS], "run `python -m tests.reliability.faults`"
