"""The ledger never forgets a step that ran, never charges one twice, and notices when it was changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.ledger import Ledger

PLAN = {"noise_multiplier": 0.7, "sampler": "poisson", "sizes": (1, 2), "num_steps": 198, "target_epsilon": 8.0}
MUST_MATCH = ("noise_multiplier", "sampler", "sizes")


C1, C2, K1, K2 = "c1" * 8, "c2" * 8, "a1" * 16, "a2" * 16  # names of chains and of their keys


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


def _write(path: Path, num_steps: int = 3) -> None:
    """A finished run: header, plan, chain, steps."""
    with Ledger.open(path) as ledger:
        ledger.record_plan(PLAN, must_match=MUST_MATCH)
        ledger.start_chain(chain_id=C1, key_id=K1, start_step=0, note="first run")
        for step in range(1, num_steps + 1):
            ledger.charge(C1, step)


def _in_child(body: Callable[[], object]) -> int:
    """Runs ``body`` in a forked process, which never returns into pytest; gives its process id."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- what is recorded ---


def test_a_run_is_read_back(path):
    _write(path)
    with Ledger.open(path) as ledger:
        ledger.start_chain(chain_id=C2, key_id=K2, start_step=2, parent=C1, note="resumed")
        assert ledger.last_step(C2) is None
        ledger.charge(C2, 3)
        written = ledger.plan, ledger.chains, ledger.num_charged, ledger.digest()
    ledger = Ledger.read(path)
    assert (ledger.plan, ledger.chains, ledger.num_charged, ledger.digest()) == written
    assert ledger.plan == PLAN | {"sizes": [1, 2]}
    assert ledger.num_charged == 4 and (ledger.last_step(C1), ledger.last_step(C2)) == (3, 3)
    assert [c.chain_id for c in ledger.chains] == [C1, C2]
    last = ledger.last_chain
    assert (last.chain_id, last.key_id, last.start_step, last.parent, last.note) == (C2, K2, 2, C1, "resumed")
    assert not last.unsafe


def test_records_form_a_chain_of_hashes(path):
    """Checked from the format's description, without the class."""
    _write(path)
    prev = "0" * 64
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["prev"] == prev
        prev = record.pop("sha256")
        body = json.dumps(record, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(body.encode()).hexdigest() == prev
    assert Ledger.read(path).digest() == prev


def test_an_empty_ledger_has_a_header(path):
    Ledger.open(path).close()
    ledger = Ledger.read(path)
    assert (ledger.plan, ledger.chains, ledger.last_chain, ledger.num_charged) == (None, (), None, 0)
    assert json.loads(path.read_text())["version"] == 1


def test_a_missing_ledger_is_not_invented(path):
    for attempt in (lambda: Ledger.open(path, create=False), lambda: Ledger.read(path)):
        with pytest.raises(DPConfigError, match="There is no ledger at .*put it back"):
            attempt()
    assert not path.exists()


# --- charging ---


@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("step", [3, 2, 1, 0])
def test_a_step_is_charged_once(path, reopen, step):
    """Also by another process, and also a step that comes after a later one: its noise may have been used."""
    _write(path)
    ledger = Ledger.open(path)
    ledger.charge(C1, 4)
    if reopen:
        ledger.close()
        ledger = Ledger.open(path)
    with ledger:
        for again in (step, 4):
            with pytest.raises(DPConfigError, match=f"Step {again} .*has reached step 4.*new chain with a fresh key"):
                ledger.charge(C1, again)
        ledger.charge(C1, 5)
    assert Ledger.read(path).num_charged == 5


def test_a_chain_begins_after_its_start_step(path):
    _write(path)
    with Ledger.open(path) as ledger:
        ledger.start_chain(chain_id=C2, key_id=K2, start_step=2, parent=C1)
        with pytest.raises(DPConfigError, match="Step 2 .*has reached step 2"):
            ledger.charge(C2, 2)
        ledger.charge(C2, 3)


def test_chains_and_keys_are_used_once(path):
    _write(path)
    with Ledger.open(path) as ledger:
        with pytest.raises(DPConfigError, match=f"Chain {C1} is already in"):
            ledger.start_chain(chain_id=C1, key_id=K2, start_step=0)
        with pytest.raises(DPConfigError, match=f"noise key {K1} was used by another chain.*fresh key"):
            ledger.start_chain(chain_id=C2, key_id=K1, start_step=0)
        ledger.start_chain(chain_id=f"unsafe{C2}", key_id=K1, start_step=0, unsafe=True)
    assert Ledger.read(path).last_chain.unsafe


def test_a_charge_is_on_the_disk_when_it_returns(path, monkeypatch):
    """fsync of the ledger itself, after the record was written to it."""
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, path.stat().st_size if path.exists() else None))

    monkeypatch.setattr(os, "fsync", record)
    with Ledger.open(path) as ledger:
        assert (path.parent.stat().st_ino, path.stat().st_size) in synced  # the new file's name is durable too
        ledger.start_chain(chain_id=C1, key_id=K1, start_step=0)
        ledger.charge(C1, 1)
        assert synced[-1] == (path.stat().st_ino, path.stat().st_size)


def test_a_kill_at_any_moment_leaves_every_executed_step_charged(path, tmp_path):
    """kill -9 at 20 random moments of a loop that charges and then executes; each time a new chain goes on."""
    executed = tmp_path / "executed"

    def run() -> None:
        with Ledger.open(path) as ledger:
            chain = f"{len(ledger.chains):016x}"
            ledger.start_chain(chain_id=chain, key_id=chain * 2, start_step=0)
            log = os.open(executed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for step in range(1, 10**9):
                ledger.charge(chain, step)
                os.write(log, f"{chain} {step}\n".encode())

    counts = [0]
    while len(counts) <= 20 or counts[-1] <= 20:  # the second for a machine that is slow
        assert len(counts) < 200, "the loop was killed before it did anything; the test shows nothing"
        child = _in_child(run)
        time.sleep(random.uniform(0.005, 0.05))
        os.kill(child, signal.SIGKILL)
        assert _exit_code(child) == -signal.SIGKILL
        steps = executed.read_text().splitlines() if executed.exists() else []
        assert len(set(steps)) == len(steps)
        if not path.exists():
            assert not steps
            counts.append(0)
            continue
        with Ledger.open(path) as ledger:
            charged = sum(ledger.last_step(c.chain_id) or 0 for c in ledger.chains)
            assert ledger.num_charged == charged
            assert len(steps) <= charged <= len(steps) + len(ledger.chains)
            for last in steps[-1:]:
                chain, step = last.split()
                assert int(step) <= ledger.last_step(chain)
        counts.append(len(steps))


def test_a_full_disk_stops_the_step_and_does_not_spoil_the_file(path):
    """The file may not grow: half a record is written, the step is refused, and the next process mends the file."""
    _write(path)

    def charge_on_full_disk() -> None:
        ledger = Ledger.open(path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, resource.RLIM_INFINITY))
        with pytest.raises(OSError):
            ledger.charge(C1, 4)
        with pytest.raises(AssertionError, match="not open for writing"):
            ledger.charge(C1, 4)

    size = path.stat().st_size
    assert _exit_code(_in_child(charge_on_full_disk)) == 0
    assert path.stat().st_size == size + 10
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 3
        ledger.charge(C1, 4)
    assert Ledger.read(path).num_charged == 4


# --- what was changed ---


def test_a_torn_last_line_is_cut_off(path):
    """At every byte of the last record. A whole record that only lacks its newline stays: overcharging is safe."""
    _write(path)
    content = path.read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start, len(content)):
        whole = end == len(content) - 1
        path.write_bytes(content[:end])
        assert Ledger.read(path).num_charged == (3 if whole else 2)
        assert path.read_bytes() == content[:end]  # reading mends nothing
        with Ledger.open(path) as ledger:
            assert ledger.num_charged == (3 if whole else 2)
            assert path.read_bytes() == (content if whole else content[:start])
            ledger.charge(C1, 4)
        assert Ledger.read(path).last_step(C1) == 4


def test_an_edited_byte_is_found_wherever_it_is(path):
    """Every byte but the last newline: with another byte there, the last line is torn."""
    _write(path, num_steps=1)
    content = path.read_bytes()
    for position in range(len(content) - 1):
        edited = bytearray(content)
        edited[position] ^= 1
        path.write_bytes(edited)
        with pytest.raises(DPConfigError, match=r"(line \d+: .*(edited|follow)).*Put the original file back"):
            Ledger.read(path)
    path.write_bytes(content)
    assert Ledger.read(path).num_charged == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lines: lines[1:], "line 1: .*lines were removed"),
        (lambda lines: lines[:2] + lines[3:], "line 3: it does not follow line 2; lines were removed or moved"),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "line 4: it does not follow line 3"),
        (lambda lines: lines + lines[-1:], "line 7: it does not follow line 6"),
        (lambda lines: [*lines[:2], b"", *lines[2:]], "line 3: is no record of a ledger"),
        (lambda lines: [*lines[:2], b" " + lines[2], *lines[3:]], "line 3: the record does not have the digest"),
        (lambda lines: [], "is empty or has no whole line"),
    ],
)
@pytest.mark.parametrize("opener", [Ledger.read, Ledger.open])
def test_removed_moved_and_added_lines_are_found(path, change, match, opener):
    _write(path)
    changed = b"".join(line + b"\n" for line in change(path.read_bytes().splitlines()))
    path.write_bytes(changed)
    with pytest.raises(DPConfigError, match=match):
        opener(path)
    assert path.read_bytes() == changed  # left as evidence
    with pytest.raises(DPConfigError, match=match):
        Ledger.open(path)  # the failed attempt gave the lock back


def test_records_removed_from_the_end_change_the_digest(path):
    """They are not found from the file alone; the digest in the privacy report tells."""
    _write(path)
    digest = Ledger.read(path).digest()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    shortened = Ledger.read(path)
    assert shortened.num_charged == 2 and shortened.digest() != digest


def test_a_newer_format_is_refused(path):
    Ledger.open(path).close()
    record = {"kind": "header", "version": 2, "prev": "0" * 64}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(record | {"sha256": digest}, sort_keys=True, separators=(",", ":")) + "\n")
    with pytest.raises(DPConfigError, match="the ledger has format 2.*Use the release that wrote it"):
        Ledger.read(path)


# --- one writer ---


def test_a_second_writer_is_refused_until_the_first_one_closes(path):
    def second() -> None:
        with pytest.raises(DPConfigError, match=f"is in use by process {os.getppid()};.*Wait for that run"):
            Ledger.open(path)
        assert Ledger.read(path).num_charged == 0

    ledger = Ledger.open(path)
    assert _exit_code(_in_child(second)) == 0
    with pytest.raises(DPConfigError, match=f"is in use by process {os.getpid()};"):
        Ledger.open(path)
    ledger.close()
    assert _exit_code(_in_child(lambda: Ledger.open(path))) == 0


def test_a_ledger_opened_for_reading_or_closed_takes_nothing(path):
    _write(path)
    with Ledger.open(path) as closed:
        pass
    for ledger in (Ledger.read(path), closed):
        with pytest.raises(AssertionError, match="not open for writing"):
            ledger.charge(C1, 4)


# --- plans ---


def test_the_same_plan_is_recorded_once(path):
    _write(path)
    size = path.stat().st_size
    with Ledger.open(path) as ledger:
        ledger.record_plan(PLAN, must_match=MUST_MATCH)
    assert path.stat().st_size == size


def test_horizon_and_budget_may_change(path):
    _write(path)
    with Ledger.open(path) as ledger:
        ledger.record_plan(PLAN | {"num_steps": 300, "target_epsilon": 9.0}, must_match=MUST_MATCH)
    plan = Ledger.read(path).plan
    assert (plan["num_steps"], plan["target_epsilon"], plan["sampler"]) == (300, 9.0, "poisson")


def test_another_mechanism_is_refused_field_by_field(path):
    _write(path)
    other = PLAN | {"noise_multiplier": 0.6, "sizes": [1, 3], "num_steps": 1}
    del other["sampler"]
    with Ledger.open(path) as ledger:
        with pytest.raises(DPConfigError) as error:
            ledger.record_plan(other, must_match=MUST_MATCH)
        assert ledger.plan["num_steps"] == 198
    message = str(error.value)
    assert "noise_multiplier: 0.7 in the ledger, 0.6 now" in message
    assert "sampler: 'poisson' in the ledger, 'absent' now" in message
    assert "sizes: [1, 2] in the ledger, [1, 3] now" in message
    assert "num_steps" not in message
    assert "Continue with the same options, or choose another output_dir" in message


def test_a_ledger_is_intact_until_something_else_is_at_its_place(path):
    with Ledger.open(path) as ledger:
        assert ledger.is_intact and stat.S_IMODE(path.stat().st_mode) == 0o644
        with path.open("ab") as file:
            file.write(b" ")
        assert not ledger.is_intact
        path.write_bytes(path.read_bytes()[:-1])
        assert ledger.is_intact
        content = path.read_bytes()
        path.rename(path.with_name("moved"))
        assert not ledger.is_intact
        path.write_bytes(content)
        assert not ledger.is_intact  # the same bytes in another file
    assert Ledger.read(path).is_intact
