"""The log beside the keys: durable, one process at a time, and never behind what was used, whatever becomes of files."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.checkpoint import write_manifest
from hf_dpopt.run.keys import fixed_chain
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.run.run_log import LOG, find_run
from hf_dpopt.verify.chain import read_ledger
from tests.adversary.forging import records_of, write
from tests.run.one_run import PLAN, Run
from tests.run.test_keys import spellings


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def private(tmp_path) -> Path:
    return tmp_path / "private"


def _log_file(private: Path) -> Path:
    (path,) = private.glob(f"runs/*/{LOG}")
    return path


def _in_child(body: Callable[[], object]) -> int:
    """Run a function in a forked process, which never returns into pytest; return its process id."""
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


def _copy(out: Path, name: str) -> Path:
    shutil.copytree(out, out.with_name(name))
    return out.with_name(name)


# --- what is written ---


def test_the_ledger_is_the_public_part_of_the_log(out, private):
    with Run(out, private) as run:
        run.steps(2)
        run.log.check_data(run.chain.chain_id, "a mark of private records")
        run.log.note_dataset("people", "d" * 64)
        name = run.log.charge_evaluation(1.5, "add_or_remove_one", {"set": "eval"})
        run.log.note_answer(name, {"loss": 0.5})
        run.steps(1)
    text = (out / LEDGER).read_text()
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds == ["header", "plan", "chain", "step", "step", "evaluation", "answer", "step"]
    assert "private records" not in text and "people" not in text
    log, ledger = Ledger.read(_log_file(private)), Ledger.read(out / LEDGER)
    assert (log.charged, log.evaluations, log.run) == (ledger.charged, ledger.evaluations, ledger.run) == (
        (3,), ledger.evaluations, _log_file(private).parent.name,
    )  # fmt: skip
    assert log.data == {run.chain.chain_id: "a mark of private records"} and ledger.data == {}
    assert stat.S_IMODE(_log_file(private).stat().st_mode) == 0o600
    assert stat.S_IMODE((out / LEDGER).stat().st_mode) == 0o644


def test_nothing_secret_is_in_log_or_ledger(out, private):
    with Run(out, private) as run:
        run.steps(3)
    content, secrets = (out / LEDGER).read_bytes() + _log_file(private).read_bytes(), run.log.keys.secrets()
    assert len(secrets) == 5 and not [s for key in secrets for s in spellings(key) if s in content]


def test_a_run_that_opens_and_changes_nothing_writes_nothing(out, private):
    with Run(out, private) as run:
        run.steps(2)
    before = {path: path.stat().st_mtime_ns for path in [_log_file(private), out / LEDGER]}
    with Run(out, private, 2) as again:
        assert again.log.digest() == Ledger.read(out / LEDGER).digest()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_full_disk_stops_the_step_and_does_not_spoil_the_file(out, private):
    """Half a record is written, the step is refused, and the next process mends the file."""
    with Run(out, private) as run:
        run.steps(3)

    def charge_on_a_full_disk() -> None:
        with Run(out, private, 3) as run:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_log_file(private).stat().st_size + 10, resource.RLIM_INFINITY))
            with pytest.raises(OSError):
                run.steps(1)
            with pytest.raises(AssertionError, match="not open for writing"):
                run.log.charge(run.chain.chain_id, 5)

    size = _log_file(private).stat().st_size
    assert _exit_code(_in_child(charge_on_a_full_disk)) == 0
    assert _log_file(private).stat().st_size == size + 10
    with Run(out, private, 3) as run:
        run.steps(1)
    assert Ledger.read(out / LEDGER).charged == Ledger.read(_log_file(private)).charged == (4,)


def test_a_torn_last_line_is_cut_off(out, private):
    """At every byte of the last record. A whole record that only lacks its newline stays: overcharging is safe."""
    with Run(out, private) as run:
        run.steps(3)
    path, content = _log_file(private), _log_file(private).read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    (out / LEDGER).unlink()
    write_manifest_of(run, out, 2)
    for end in range(start, len(content)):
        is_whole = end == len(content) - 1
        path.write_bytes(content[:end])
        assert find_run(out, private).known.num_charged == (3 if is_whole else 2)
        assert path.read_bytes() == content[:end]  # reading mends nothing
        with Run(out, private, 2, run.chain.chain_id) as again:
            assert again.log.state.charged[0] == (3 if is_whole else 2)
        (out / LEDGER).unlink()


def write_manifest_of(run: Run, out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    write_manifest(folder, run.log.state.run, run.chain.chain_id, step)
    return folder


# --- one process at a time ---


def test_a_second_run_in_a_folder_is_refused(out, private):
    def second() -> None:
        with pytest.raises(DPConfigError, match=f"is in use by process {os.getppid()};.*Wait for that run"):
            Run(out, private)
        assert Ledger.read(out / LEDGER).num_charged == 0

    with Run(out, private):
        assert _exit_code(_in_child(second)) == 0
    assert _exit_code(_in_child(lambda: Run(out, private))) == 0


def test_a_copy_waits_its_turn(out, private):
    with Run(out, private) as run:
        run.steps(2)
        copy = _copy(out, "copy")
        for step in (2, None):
            with pytest.raises(
                DPConfigError, match=f"in use by process {os.getpid()}, a run on a copy.*Wait for that"
            ):
                Run(copy, private, step)
        with Run(out.with_name("unrelated"), private) as unrelated:
            unrelated.steps(1)
    with Run(copy, private, 2) as again:
        assert again.chain.chain_id == run.chain.chain_id


def test_a_killed_process_leaves_no_lock(out, private, tmp_path):
    with Run(out, private) as run:
        run.steps(1)
    copy = _copy(out, "copy")

    def hold() -> None:
        with Run(copy, private, 1):
            (tmp_path / "ready").touch()
            time.sleep(60)

    child = _in_child(hold)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    with pytest.raises(DPConfigError, match=f"in use by process {child}, a run on a copy"):
        Run(out, private, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Run(out, private, 1).close()


@pytest.mark.parametrize("what", ["ledger", "log"])
@pytest.mark.parametrize("how", ["deleted", "replaced", "longer"])
def test_a_run_stops_before_the_next_step_if_a_file_is_not_as_it_left_it(out, private, what, how):
    with Run(out, private) as run:
        run.steps(2)
        path = out / LEDGER if what == "ledger" else _log_file(private)
        content = path.read_bytes()
        if how == "longer":
            path.open("ab").write(b" ")
        else:
            path.unlink()
        if how == "replaced":
            path.write_bytes(content)
        with pytest.raises(DPConfigError, match="was deleted, replaced or changed while the run was going on"):
            run.steps(1)
        assert run.charged == (2,)
    if what == "ledger":  # the log has all; from another place the ledger is written anew
        path.unlink(missing_ok=True)
        write_manifest_of(run, out, 2)
        with Run(out, private, 2, run.chain.chain_id) as again:
            assert again.chain == run.chain
        assert Ledger.read(out / LEDGER).charged == (2,)


def test_a_kill_at_any_moment_leaves_every_executed_step_charged(out, private, tmp_path):
    """kill -9 at 20 random moments of a loop that charges and then executes; each time a new chain goes on."""
    executed = tmp_path / "executed"

    def run() -> None:
        with Run(out, private) as run:
            log = os.open(executed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            while True:
                run.steps(1)
                os.write(log, f"{run.chain.chain_id} {run.step}\n".encode())

    counts, longest = [0], 0.05  # seconds; more on a machine that does nothing in that time
    while len(counts) <= 20 or counts[-1] <= 20:  # the second for a machine that is slow
        assert len(counts) < 200, "the loop was killed before it did anything; the test shows nothing"
        child = _in_child(run)
        time.sleep(random.uniform(0.005, longest))
        os.kill(child, signal.SIGKILL)
        assert _exit_code(child) == -signal.SIGKILL
        steps = executed.read_text().splitlines() if executed.exists() else []
        assert len(set(steps)) == len(steps)
        longest *= 1.0 if len(steps) > counts[-1] else 1.1
        counts.append(len(steps))
        known = find_run(out, private).known if private.exists() and out.exists() else None
        if known is None:
            assert not steps
            continue
        assert len(steps) <= known.num_charged <= len(steps) + len(known.chains)
        for chain, step in (line.split() for line in steps[-1:]):
            assert int(step) <= known.chain(chain).reached
    Run(out, private).close()  # settles what the last kill left
    (folder,) = {path.parent for path in private.rglob("*.key")}
    assert find_run(out, private).keys.folder == folder
    assert not list(folder.rglob("*.tmp")) and not list(out.rglob("*.tmp"))
    chains = {chain.chain_id for chain in Ledger.read(out / LEDGER).chains}
    assert {path.stem for path in private.rglob("*.key")} <= chains


# --- what becomes of folders: each outcome with its charges and its key ---


@pytest.mark.parametrize("what", ["out", "private"])
def test_a_folder_put_back_alone(out, private, caplog, what):
    """All that ran is charged, and the key gets no step twice: where the ledger knows more than the log, it is gone."""
    with Run(out, private) as run:
        run.steps(2)
    folder = out if what == "out" else private
    backup = _copy(folder, "backup")
    with Run(out, private, 2) as run:
        run.steps(3)
    shutil.rmtree(folder)
    shutil.move(backup, folder)
    with Run(out, private, 2 if what == "out" else 5) as again:
        assert again.charged == (5, 0) and again.chain != run.chain
    said = {"out": "3 steps or evaluations ran under keys of this run that",
            "private": "it was put back to an earlier state, or the ledger was edited"}  # fmt: skip
    assert said[what] in caplog.text
    assert Ledger.read(out / LEDGER).charged == (5, 0)
    if what == "private":
        assert [path.stem for path in private.rglob("*.key")] == [again.chain.chain_id]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_ledger_that_is_a_step_behind_was_killed(out, private, kept, caplog):
    """Between the log and the ledger: the next run writes the ledger anew, and says nothing of it."""
    with Run(out, private) as run:
        run.steps(2)
    lines = (out / LEDGER).read_bytes().splitlines(keepends=True)
    (out / LEDGER).write_bytes(b"".join(lines[:-1]) + lines[-1][: kept * 50])
    with Run(out, private, 2) as again:
        assert again.chain == run.chain and again.charged == (2,)
    assert Ledger.read(out / LEDGER).charged == (2,) and "put back" not in caplog.text


def test_copied_on_one_machine(out, private):
    """Copies share the log: each pays for the others, and goes on under a key of its own."""
    with Run(out, private) as run:
        run.steps(2)
    copy = _copy(out, "copy")
    with Run(out, private, 2) as run:
        run.steps(3)
    with Run(copy, private, 2) as other:
        assert other.charged == (5, 0) and other.chain != run.chain
        other.steps(2)
    with Run(out, private, 5, run.chain.chain_id) as again:
        assert again.chain == run.chain and again.charged == (5, 2)


@pytest.mark.parametrize("private_is_lost", [False, True])
def test_moved(out, private, private_is_lost):
    """The log is found again; where it is lost, all that ran is charged, and the next steps get a fresh key."""
    with Run(out, private) as run:
        run.steps(2)
    out.rename(out.with_name("moved"))
    if private_is_lost:
        shutil.rmtree(private)
    with Run(out.with_name("moved"), private, 2) as again:
        assert again.charged == ((2, 0) if private_is_lost else (2,))
        assert (again.chain == run.chain) != private_is_lost
        assert again.log.state.parent == (run.log.state.run if private_is_lost else None)


def test_copied_to_another_machine_and_back(out, private, tmp_path):
    """There it goes on with a key of its own; here both are charged."""
    with Run(out, private) as run:
        run.steps(2)
    away, elsewhere = _copy(out, "away"), tmp_path / "elsewhere"
    with Run(away, elsewhere, 2) as other:
        assert other.charged == (2, 0) and other.log.state.parent == run.log.state.run
        assert other.log.state.run != run.log.state.run
        other.steps(3)
    with Run(out, private, 2) as run:
        run.steps(1)
    with Run(away, private, 5, other.chain.chain_id) as back:
        assert sorted(back.charged) == [0, 3, 3] and back.log.state.parent == other.log.state.run


def test_thousands_of_steps_are_taken_in_at_once(out, private, tmp_path, monkeypatch):
    """Not one by one, each with its wait for the disk; those that were lost stay lost, in their order."""
    with Run(out, private) as run:
        for _ in range(3):
            run.steps(400)
            run.log.lose(run.chain.chain_id, run.step)
    waits, sync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (waits.append(descriptor), sync(descriptor)))
    with Run(out, tmp_path / "elsewhere", 1200) as other:
        assert other.charged == (1200, 0) and other.log.state.num_lost == 3 and len(waits) < 60
    assert read_ledger(out / LEDGER).num_lost == 3, "an independent reader takes it"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_ledger_deleted(out, private, has_checkpoint):
    """A checkpoint names the run; without one, nothing leads to it, and it is another run under another key."""
    with Run(out, private) as run:
        run.steps(2)
    if has_checkpoint:
        write_manifest_of(run, out, 2)
    (out / LEDGER).unlink()
    with Run(out, private, 2 if has_checkpoint else None, run.chain.chain_id) as again:
        assert (again.chain == run.chain) == has_checkpoint
        assert again.charged == ((2,) if has_checkpoint else (0,))


def test_a_checkpoint_beyond_what_is_charged(out, private):
    with Run(out, private) as run:
        run.steps(2)
    for step in (3, 9):
        with pytest.raises(
            DPConfigError, match=f"at step {step}, .*ends at step 2.*Resume with the ledger of the run"
        ):
            Run(out, private, step)
    assert Ledger.read(out / LEDGER).charged == (2,)


@pytest.mark.parametrize(
    "how", ["steps added", "steps removed", "all removed", "a chain added", "the id of another run"]
)
def test_the_ledger_forged(out, private, how):
    """More may be charged, never less; and a key whose use is in doubt is not used again."""
    with Run(out, private) as run:
        run.steps(3)
    with Run(out.with_name("other"), private) as other:
        other.steps(1)
    records, name = records_of(out), run.chain.chain_id
    forged = {
        "steps added": [*records, *({"kind": "step", "chain_id": name, "step": step} for step in (4, 5))],
        "steps removed": records[:-2],
        "all removed": records[:1],
        "a chain added": [
            *records,
            records[2] | {"chain_id": "d" * 16, "key_id": "e" * 32},
            {"kind": "step", "chain_id": "d" * 16, "step": 1},
        ],
        "the id of another run": [records[0] | {"run": other.log.state.run}, *records[1:]],
    }[how]
    write(out, forged)
    with Run(out, private, 3) as again:
        charged = sorted(again.charged)
        wanted = {"steps added": [0, 5], "a chain added": [1, 3], "the id of another run": [0, 1, 3]}
        assert charged == wanted.get(how, [3])
        assert (again.chain == run.chain) == (how in ("steps removed", "all removed", "a chain added"))


@pytest.mark.parametrize("change", [{"start_step": 1}, {"key_id": "e" * 32}])
def test_a_chain_that_contradicts_the_log_is_refused(out, private, change):
    with Run(out, private) as run:
        run.steps(3)
    write(out, [one | change if one["kind"] == "chain" else one for one in records_of(out) if one.get("step") != 1])
    before = (out / LEDGER).read_bytes()
    with pytest.raises(DPConfigError, match="contradicts the log of the run"):
        Run(out, private, 3)
    assert (out / LEDGER).read_bytes() == before
    (out / LEDGER).unlink()
    write_manifest_of(run, out, 3)
    with Run(out, private, 3) as again:
        assert again.chain == run.chain, "deleted, it is written again"


def test_the_private_folder_copied_along_is_out_of_reach(out, private, tmp_path):
    """Both copies go on under one key, and nothing here can know: docs/guarantee.md says so."""
    with Run(out, private) as run:
        run.steps(2)
    copy, keys = _copy(out, "copy"), _copy(private, "keys")
    with Run(out, private, 2) as one, Run(copy, keys, 2) as other:
        assert one.steps(1) == other.steps(1)


def test_two_machines_in_one_folder(out, private, tmp_path):
    """Where the lock does not reach, the ledger is replaced under the first run, which stops before its next step."""
    with Run(out, private) as run:
        run.steps(1)
        Path(f"{out / LEDGER}.lock").unlink()  # as on a disk without locks
        with Run(out, tmp_path / "elsewhere", 1) as other:
            other.steps(1)
            with pytest.raises(DPConfigError, match="replaced"):
                run.steps(1)
            assert other.charged == (1, 1)


def test_a_run_that_goes_on_though_a_copy_trained_anew(out, private):
    """Nothing of its own key was used: it stays, and pays for the copy."""
    with Run(out, private) as run:
        run.steps(3)
    with Run(_copy(out, "copy"), private) as copy:
        copy.steps(2)
    with Run(out, private, 3, run.chain.chain_id) as again:
        assert again.chain == run.chain and again.charged == (3, 2) and again.resume.charged == (2, 3)
        again.steps(1)
    with Run(out, private, 4, run.chain.chain_id) as again:
        assert again.chain == run.chain and again.charged == (4, 2)


@pytest.mark.parametrize(
    "how", ["killed", "trained anew", "an older checkpoint", "another chain's checkpoint", "no key", "no log"]
)
def test_a_run_goes_on_with_its_key_only_from_where_it_stopped(out, private, how):
    with Run(out, private) as run:
        run.steps(3)
    if how == "no key":
        run.log.keys.destroy()
    if how == "no log":  # nobody remembers what the key was used for
        _log_file(private).unlink()
    step = {"trained anew": None, "an older checkpoint": 2}.get(how, 3)
    name = "0" * 16 if how == "another chain's checkpoint" else run.chain.chain_id
    with Run(out, private, step, name) as again:
        assert (again.chain.key_id == run.chain.key_id) == (how == "killed")
        assert again.charged == ((3,) if how == "killed" else (3, 0))


def test_a_fixed_key_is_marked_unsafe_and_never_written(out, private):
    with Run(out, private) as run:
        chain = fixed_chain("ab" * 32)
        run.log.start_chain(chain, 0, "NOT PRIVATE")
        run.log.charge(chain.chain_id, 1)
        again = fixed_chain("ab" * 32)
        assert again.noise_key == chain.noise_key and again.chain_id != chain.chain_id
        run.log.start_chain(again, 1, "NOT PRIVATE")  # the point of a fixed key: the same noise
    assert [chain.unsafe for chain in Ledger.read(out / LEDGER).chains] == [False, True, True]
    assert [path.stem for path in private.rglob("*.key")] == [run.chain.chain_id]


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_charged_once(out, private, step):
    with Run(out, private) as run:
        run.steps(2)
        with pytest.raises(DPConfigError, match=f"Step {step} cannot run on chain .*, which has reached step 2"):
            run.log.charge(run.chain.chain_id, step)
        assert run.charged == (2,)


def test_a_chain_keeps_the_records_it_began_with(out, private):
    with Run(out, private) as run:
        run.log.check_data(run.chain.chain_id, "one order")
    with Run(out, private, 0) as again:
        again.log.check_data(again.chain.chain_id, "one order")
        with pytest.raises(DPConfigError, match="not those that this run began with"):
            again.log.check_data(again.chain.chain_id, "another order")


def test_no_history_of_backups_and_copies_uses_noise_twice_or_forgets_a_step(tmp_path):
    """Random histories: folders are copied, put back to any earlier state, moved, killed at a charge, resumed anywhere.

    One private folder stays. Whatever starts covers all that ran before it, and no (key, step) comes twice.
    """
    for history in range(12):
        folder = tmp_path / str(history)
        folder.mkdir()
        folders, backups, executed = [folder / "0"], list[Path](), list[tuple[bytes, int]]()
        with Run(folders[0], folder / "private") as run:  # all others are copies of it
            executed += run.steps(random.randrange(1, 4))
        for move in range(14):
            out = random.choice(folders)
            match random.choice(("run", "run", "run", "backup", "restore", "copy", "cut")):
                case "run":
                    known = find_run(out, folder / "private").known
                    chain = random.choice(known.chains)
                    reached = chain.reached or None  # None: from the start
                    step, name = random.choice((reached, reached, None)), random.choice((chain.chain_id, None))
                    with Run(out, folder / "private", step, name) as run:
                        assert run.log.state.num_charged >= len(executed)
                        executed += run.steps(random.randrange(4))
                        if random.random() < 0.1:
                            run.log.keys.destroy()
                case "cut":  # killed between the log and the ledger
                    lines = (out / LEDGER).read_bytes().splitlines(keepends=True)
                    (out / LEDGER).write_bytes(b"".join(lines[: max(1, len(lines) - random.randrange(3))]))
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


# --- plans ---


def test_the_same_plan_is_recorded_once(out, private):
    Run(out, private).close()
    with Run(out, private):
        assert [one["kind"] for one in records_of(out)].count("plan") == 1


def test_horizon_and_budget_may_change(out, private):
    Run(out, private).close()
    Run(out, private, plan=PLAN | {"num_steps": 300, "target_epsilon": 9.0}).close()
    plan = Ledger.read(out / LEDGER).plan
    assert (plan["num_steps"], plan["target_epsilon"], plan["sizes"]) == (300, 9.0, [1, 2])


def test_another_mechanism_is_refused_field_by_field(out, private):
    Run(out, private).close()
    with pytest.raises(DPConfigError) as error:
        Run(out, private, plan={"noise_multiplier": 0.6, "num_steps": 1})
    assert Ledger.read(out / LEDGER).plan["num_steps"] == 198
    message = str(error.value)
    assert "noise_multiplier: 0.7 in the ledger, 0.6 now" in message and "num_steps" not in message
    assert "sizes: [1, 2] in the ledger, 'absent' now" in message
    assert "Continue with the same options, or choose another output_dir" in message
