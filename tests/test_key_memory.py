"""The marks beside the keys: durable, found out when damaged, one run at a time, and never behind what was used."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from hf_dpopt import PrivacyConfig, make_plan
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run import key_memory
from hf_dpopt.run.key_memory import PAGE, SLOTS, KeyMemory
from hf_dpopt.run.keys import Chain, PrivateState, continue_or_branch
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run import PrivateRun


class Run:
    """What `PrivateRun` does with a ledger and the keys, step by step."""

    def __init__(self, out: Path, private: Path, resume_step: int | None = None):
        self.ledger = Ledger.open(out / "ledger.jsonl")
        self.state = PrivateState(private, forbidden=out)
        self.memory: KeyMemory = self.state.memory(self.ledger)
        try:
            self.memory.lock()
            self.found = self.memory.charge_unknown()
            self.chain: Chain = continue_or_branch(self.ledger, self.state, resume_step)
            self.memory.lock()
            self.memory.use(self.chain.chain_id)
        except BaseException:
            self.close()
            raise
        self.step = resume_step or 0

    def steps(self, num: int) -> list[tuple[bytes, int]]:
        """Charges and notes that many steps; what was used then."""
        used = []
        for _ in range(num):
            self.step += 1
            self.ledger.charge(self.chain.chain_id, self.step)
            self.memory.note(self.step)
            used.append((self.chain.noise_key, self.step))
        return used

    def close(self) -> None:
        self.memory.close()
        self.ledger.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def private(tmp_path) -> Path:
    return tmp_path / "private"


def _mark_file(private: Path) -> Path:
    (path,) = private.rglob("*.mark")
    return path


def _overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


# --- the file ---


def test_a_mark_says_the_last_step_and_the_ledger_at_that_point(out, private):
    with Run(out, private) as run:
        for step in range(1, 6):
            run.steps(1)
            mark = run.memory.mark(run.chain.chain_id)
            assert (mark.step, mark.digest, mark.start_step) == (step, run.ledger.digest(), 0)
            assert (mark.chain_id, mark.key_id) == (run.chain.chain_id, run.chain.key_id)
    path = _mark_file(private)
    assert path.stat().st_size == 3 * PAGE and path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == path.parent.parent.stat().st_mode & 0o077 == 0
    assert not any(secret in path.read_bytes() for secret in run.state.secrets())


def test_the_order_is_ledger_mark_records(out, private, monkeypatch):
    """Each is on the disk before the next: a kill between them charges a step that did not run, never the reverse."""
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=4)
    plan, order = make_plan(config, num_examples=40, num_steps=4), list[str]()
    run = PrivateRun(plan, output_dir=out, private_state_dir=private)
    descriptors = {run.ledger._file: "ledger", run._memory._file: "mark"}
    sync, datasync = os.fsync, key_memory._fdatasync
    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), order.append(descriptors[fd])))
    monkeypatch.setattr(key_memory, "_fdatasync", lambda fd: (datasync(fd), order.append(descriptors[fd])))
    for step in (1, 2):
        run.charge(step)
        assert order == ["ledger", "mark"] * step
        mark = run.state.memory(run.ledger).mark(run.chain.chain_id)
        assert (mark.step, mark.digest) == (step, run.ledger.digest())
    monkeypatch.undo()
    run.close()


@pytest.mark.parametrize("kept", [0, 7, 39, 55])
def test_a_torn_write_is_found_and_the_step_counts_as_used(out, private, kept):
    """Only so many bytes of the last write are there; the other place still says the step before."""
    with Run(out, private) as run:
        run.steps(4)
        torn = SLOTS[1 - run.memory._next_slot]
    path = _mark_file(private)
    _overwrite(path, torn + kept, b"\xa5" * (PAGE - kept))
    with Run(out, private, resume_step=4) as again:
        assert again.memory.mark(run.chain.chain_id).step == 4
        assert again.chain.chain_id != run.chain.chain_id and again.found == 0
        assert "behind this ledger's back" in again.ledger.last_chain.note


@pytest.mark.parametrize("start, content", [(0, b"x"), (SLOTS[0], b"\xa5" * 2 * PAGE), (SLOTS[0], bytes(2 * PAGE))])
def test_a_damaged_mark_stops_the_run_before_anything_is_written(out, private, start, content):
    with Run(out, private) as run:
        run.steps(3)
    _overwrite(_mark_file(private), start, content)
    before = (out / "ledger.jsonl").read_bytes()
    for resume_step in (3, None):
        with pytest.raises(DPConfigError, match=r"\.mark is damaged.*Put the file back.*another output_dir"):
            Run(out, private, resume_step)
    assert (out / "ledger.jsonl").read_bytes() == before


def test_a_mark_that_was_cut_or_moved_is_damaged(out, private):
    with Run(out, private) as run:
        run.steps(3)
    path = _mark_file(private)
    whole = path.read_bytes()
    path.write_bytes(whole[: PAGE + 20])
    with pytest.raises(DPConfigError, match="header is not what was written"):
        Run(out, private)
    path.write_bytes(whole)
    path.rename(path.with_name(f"{'0' * 16}.mark"))
    with pytest.raises(DPConfigError, match="header is not what was written"):
        Run(out, private)


def test_a_mark_of_another_key_is_refused(out, private):
    with Run(out, private) as run:
        run.steps(3)
        record = run.ledger.last_chain
        run.memory.begin(type(record)(**{**vars(record), "key_id": "0" * 32}))
    with pytest.raises(DPConfigError, match="another key than chain"):
        Run(out, private)


# --- one run at a time ---


def test_a_copy_that_shares_the_keys_waits_its_turn(out, private, tmp_path):
    with Run(out, private) as run:
        run.steps(2)
        shutil.copytree(out, tmp_path / "copy")
        for resume_step in (2, None):
            with pytest.raises(
                DPConfigError, match=f"in use by process {os.getpid()}, a run on a copy.*Wait for that"
            ):
                Run(tmp_path / "copy", private, resume_step)
        (tmp_path / "unrelated").mkdir()
        with Run(tmp_path / "unrelated", private) as unrelated:
            unrelated.steps(1)
    with Run(tmp_path / "copy", private, 2) as copy:
        assert copy.chain.chain_id == run.chain.chain_id


def test_a_killed_process_leaves_no_lock(out, private, tmp_path):
    with Run(out, private) as run:
        run.steps(1)
    shutil.copytree(out, tmp_path / "copy")
    child = os.fork()
    if child == 0:  # never returns into pytest
        try:
            run = Run(tmp_path / "copy", private, 1)
            (tmp_path / "ready").touch()
            time.sleep(60)
        finally:
            os._exit(1)
    for _ in range(3000):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.01)
    with pytest.raises(DPConfigError, match=f"in use by process {child}, a run on a copy"):
        Run(out, private, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Run(out, private, 1).close()


# --- what the ledger does not know ---


def test_a_chain_goes_on_though_a_copy_trained_anew(out, private, tmp_path):
    """Nothing of its own key was used: it stays, and pays for the copy."""
    with Run(out, private) as run:
        run.steps(3)
    shutil.copytree(out, tmp_path / "copy")
    with Run(tmp_path / "copy", private) as copy:
        copy.steps(2)
    with Run(out, private, 3) as again:
        assert again.chain == run.chain and again.found == 2 and again.ledger.charged == (3, 2)
        again.steps(1)
    with Run(out, private, 4) as again:
        assert again.chain == run.chain and again.found == 0 and again.ledger.charged == (4, 2)


def test_no_history_of_backups_and_copies_uses_noise_twice_or_forgets_a_step(tmp_path):
    """Random histories: folders are copied, put back to any earlier state, killed at a charge, resumed anywhere.

    One private directory stays. Whatever starts covers all that ran before it, and no (key, step) comes twice.
    """
    for history in range(12):
        folder = tmp_path / str(history)
        first = folder / "0"
        first.mkdir(parents=True)
        folders, backups, executed = [first], list[Path](), list[tuple[bytes, int]]()
        with Run(first, folder / "private") as run:  # all others are copies of it
            executed += run.steps(random.randrange(1, 4))
        for move in range(14):
            out = random.choice(folders)
            match random.choice(("run", "run", "run", "backup", "restore", "copy")):
                case "run":
                    reached = Ledger.read(out / "ledger.jsonl")
                    last = reached.last_step(reached.last_chain.chain_id) or reached.last_chain.start_step
                    resume_step = random.choice((last, last, None))
                    with Run(out, folder / "private", resume_step) as run:
                        assert run.ledger.num_charged >= len(executed)
                        executed += run.steps(random.randrange(4))
                        if random.random() < 0.2:  # killed between the ledger and the mark
                            run.ledger.charge(run.chain.chain_id, run.step + 1)
                        if random.random() < 0.1:
                            run.state.forget()
                case "backup":
                    shutil.copytree(out, folder / f"backup{move}")
                    backups.append(folder / f"backup{move}")
                case "restore" if backups:
                    shutil.rmtree(out)
                    shutil.copytree(random.choice(backups), out)
                case "copy":
                    shutil.copytree(out, folder / f"copy{move}")
                    folders.append(folder / f"copy{move}")
        assert len(set(executed)) == len(executed)


def test_a_key_that_was_used_beyond_the_ledger_gets_no_further_step(out, private):
    """The record that the mark names is known, and its step is not: `charge_unknown` charges it, and a chain begins."""
    with Run(out, private) as run:
        run.steps(2)
        run.memory.note(4)
        chain = run.chain
    with Ledger.open(out / "ledger.jsonl") as ledger:
        state = PrivateState(private, forbidden=out)
        assert continue_or_branch(ledger, state, 2).chain_id != chain.chain_id
        assert "behind this ledger's back" in ledger.chains[-1].note


def test_a_memory_that_is_closed_holds_no_file(out, private):
    run = Run(out, private)
    descriptor = run.memory._file
    run.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert run.memory._file is None
    run.memory.close()  # again, as an error on the way does
