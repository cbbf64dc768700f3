"""The ledger notices when it was changed, and takes in no record that a run does not write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.ledger import LEDGER, Ledger
from tests.adversary.forging import records_of, write
from tests.run.one_run import Run


@pytest.fixture
def out(tmp_path) -> Path:
    """The folder of a run: header, plan, chain, three steps."""
    with Run(tmp_path / "out", tmp_path / "private") as run:
        run.steps(3)
    return tmp_path / "out"


def test_a_run_is_read_back(out):
    ledger = Ledger.read(out / LEDGER)
    (chain,) = ledger.chains
    assert (chain.start_step, chain.parent, chain.note, chain.unsafe) == (0, None, "first run", False)
    assert ledger.charged == (3,) and chain.reached == 3 and tuple(chain.steps) == (1, 2, 3)
    assert ledger.num_lost == 0 and ledger.parent is None and len(ledger.digest()) == 64


def test_a_missing_ledger_is_not_invented(tmp_path):
    with pytest.raises(DPConfigError, match="There is no ledger at .*what was spent on the data is unknown"):
        Ledger.read(tmp_path / LEDGER)
    assert Ledger.find(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_an_edited_byte_is_found_wherever_it_is(out):
    """Every byte but the last newline: with another byte there, the last line is torn."""
    path, content = out / LEDGER, (out / LEDGER).read_bytes()
    for position in range(len(content) - 1):
        edited = bytearray(content)
        edited[position] ^= 1
        path.write_bytes(edited)
        with pytest.raises(DPConfigError, match=r"line \d: .*edited.*Put the original file back"):
            Ledger.read(path)
    path.write_bytes(content)
    assert Ledger.read(path).num_charged == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lines: lines[1:], "line 1: .*lines were removed"),
        (lambda lines: lines[:2] + lines[3:], "line 3: .*lines were removed or moved"),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "line 4: .*removed or moved"),
        (lambda lines: lines + lines[-1:], "line 7: .*removed or moved"),
        (lambda lines: [*lines[:2], b"", *lines[2:]], "line 3: no record"),
        (lambda lines: [*lines[:2], b" " + lines[2], *lines[3:]], "line 3: it was edited"),
        (lambda lines: [], "is empty or has no whole line"),
    ],
)
def test_removed_moved_and_added_lines_are_found(out, tmp_path, change, match):
    changed = b"".join(line + b"\n" for line in change((out / LEDGER).read_bytes().splitlines()))
    (out / LEDGER).write_bytes(changed)
    with pytest.raises(DPConfigError, match=match):
        Ledger.read(out / LEDGER)
    if changed:  # an empty file knows nothing, and is written again
        with pytest.raises(DPConfigError, match=match):
            Run(out, tmp_path / "private", 3)
        assert (out / LEDGER).read_bytes() == changed  # left as evidence


def test_records_removed_from_the_end_change_the_digest(out):
    """They are not found from the file alone; the digest in the privacy report tells."""
    digest = Ledger.read(out / LEDGER).digest()
    write(out, records_of(out)[:-1])
    shortened = Ledger.read(out / LEDGER)
    assert shortened.num_charged == 2 and shortened.digest() != digest


def test_a_newer_format_is_refused(out):
    header, *rest = records_of(out)
    write(out, [header | {"version": 2}, *rest])
    with pytest.raises(DPConfigError, match="has format 2.*Use the release that wrote it"):
        Ledger.read(out / LEDGER)


CHAIN = {
    "kind": "chain", "chain_id": "d" * 16, "key_id": "e" * 32, "note": "", "parent": None, "start_step": 0,
    "unsafe": False,
}  # fmt: skip
EVALUATION = {
    "kind": "evaluation", "evaluation": "e" * 16, "noise_multiplier": 1.0, "adjacency": "replace_one", "query": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "header", "version": 1, "run": "a" * 16, "parent": None},
        {"kind": "plan", "plan": []},
        {"kind": "of a newer release"},
        {},
        *(CHAIN | change for change in (
            {"chain_id": "../../victim"}, {"chain_id": "D" * 16}, {"chain_id": "d" * 16 + "\n"}, {"chain_id": ["d"]},
            {"chain_id": ""}, {"chain_id": "d" * 5000},
            {"key_id": "e"}, {"start_step": -1}, {"start_step": True}, {"unsafe": True}, {"parent": "f" * 16}, {"note": 1},
        )),
        {"kind": "step", "chain_id": "f" * 16, "step": 4},
        {"kind": "step", "chain_id": "own", "step": 3},
        {"kind": "step", "chain_id": "own", "step": 0},
        *({"kind": "step", "chain_id": "own", "step": step} for step in ("4", True, [4])),
        {"kind": "lost", "chain_id": "own", "step": 4},
        *(EVALUATION | change for change in (
            {"evaluation": "../x"}, {"noise_multiplier": 0}, {"noise_multiplier": "1"}, {"adjacency": 1}, {"query": 1},
        )),
        {"kind": "answer", "evaluation": "e" * 16, "metrics": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_no_run_writes_is_refused(out, record):
    records = records_of(out)
    name = records[2]["chain_id"]
    write(out, [*records, record | {"chain_id": name} if record.get("chain_id") == "own" else record])
    with pytest.raises(DPConfigError, match="that no run writes"):
        Ledger.read(out / LEDGER)


@pytest.mark.parametrize("run", ["../../victim", "", "A" * 16, "a" * 17, "a" * 16 + "\n", 5, None])
def test_the_name_of_a_run_leads_nowhere(out, run):
    header, *rest = records_of(out)
    write(out, [header | {"run": run}, *rest])
    with pytest.raises(DPConfigError, match="record that no run writes"):
        Ledger.read(out / LEDGER)


def test_what_a_run_writes_is_taken_in(out):
    """Else every record above could be refused for another reason."""
    records = records_of(out)
    name = records[2]["chain_id"]
    added = [
        CHAIN, {"kind": "step", "chain_id": name, "step": 4}, {"kind": "lost", "chain_id": name, "step": 4}, EVALUATION,
        {"kind": "answer", "evaluation": "e" * 16, "metrics": {"loss": 1.0}},
    ]  # fmt: skip
    write(out, [*records, *added])
    ledger = Ledger.read(out / LEDGER)
    assert ledger.charged == (4, 0) and ledger.chain(name).lost == {4}
    assert ledger.answer({}).metrics == {"loss": 1.0} and ledger.answer({"set": 1}) is None
    assert json.loads((out / LEDGER).read_text().splitlines()[0])["run"] == ledger.run
