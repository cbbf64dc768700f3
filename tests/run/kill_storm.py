"""Kill -9 of real runs at random points, until they are done; their weights are compared with the undisturbed run's.

    python -m tests.run.kill_storm --kills 150 --kills_of_two 50 --out docs/kill_storm.json
    python -m tests.run.kill_storm --settings users dataset_ledger:2 shards:2 --kills 10 --kills_of_two 20 --out storm.json
    python -m tests.run.kill_storm --out docs/kill_storm.json --table    # prints the table of docs/reliability.md

A run is started with ``resume_from_checkpoint=True``, killed, started again in the same way, and so on; nothing else is
done to its folder. Points are drawn from the phases of a run (`PHASES`), and within a phase by time. When a run is done,
its final weights must equal, bit for bit, those of a run that nothing disturbed under the same key; where its ledger
notes lost steps, those of a run in which these steps made no update. Epsilon must be the plan's and within the target,
every charged step was taken or noted as lost, the ledger is what the log says, and no key and nothing half-written is left.

Processes are forked from one that has imported everything, so that a start costs tenths of a second. Every result is
written at once: the same command goes on where it was stopped. The same seed draws the same points, as far as time does.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hf_dpopt.run.run as run_module
import hf_dpopt.run.step as step_module
from hf_dpopt.common.chained import ChainedFile
from hf_dpopt.common.sharding import whole_of
from hf_dpopt.huggingface.evaluation import EvaluationGuard
from hf_dpopt.huggingface.trainer import DPTrainerMixin
from hf_dpopt.report.facts import collect_versions
from hf_dpopt.run.checkpoint import UNFINISHED
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.run.journal import JOURNAL, Journal
from hf_dpopt.run.keys import Keys
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run_log import RunLog, find_run
from tests.helpers import ranks, tiny
from tests.run import preempted
from tests.sharded.trained import allow_fsdp_on_cpus

# Phase -> share of the kills.
# "log" is a record that is written there, "export" its line in the ledger, "read" the time between a charge and its
# release, "key" the making of a key.
PHASES = {
    "start": 0.25, "log": 0.15, "export": 0.15, "read": 0.1, "key": 0.05, "save": 0.15, "journal": 0.1,
    "anywhere": 0.05,
}  # fmt: skip
LETTERS = {
    "log": "l", "export": "x", "read": "r", "key": "k", "save": "s", "journal": "j", "evaluation": "e",
    "dataset": "d",
}  # fmt: skip
MORE_PHASES = {
    "evaluation": {"evaluation": 0.5},
    "dataset_ledger": {"dataset": 0.5},
}
OF_TWO = ("gaussian", "nu_dpftrl", "dp2", "users", "banded", "evaluation", "dataset_ledger", "shards")
PATIENCE = 120.0  # seconds after which a process that neither ends nor dies is a failure


# --- in the process that is killed ---


def _tell(pipe: int, letter: str) -> None:
    with contextlib.suppress(OSError):
        os.write(pipe, letter.encode())


@contextlib.contextmanager
def _telling(pipe: int) -> Iterator[None]:
    """Tell the parent when a phase begins (its first letter, a capital) and ends (the letter)."""

    def wrap(owner: Any, name: str, letter: str) -> Any:
        whole = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            _tell(pipe, letter.upper())
            try:
                return whole(*args, **kwargs)
            finally:
                _tell(pipe, letter)

        return mock.patch.object(owner, name, told)

    with contextlib.ExitStack() as stack:
        for owner, name, letter in (
            (RunLog, "_append", "l"),
            (Keys, "add", "k"),
            (step_module, "clip_and_sum", "r"),
            (DPTrainerMixin, "_save_checkpoint", "s"),
            (Journal, "_append", "j"),
            (EvaluationGuard, "evaluate", "e"),
            (run_module, "charge_run", "d"),
        ):
            stack.enter_context(wrap(owner, name, letter))
        stack.enter_context(_telling_of_exports(pipe))
        yield


def _telling_of_exports(pipe: int) -> Any:
    """Tell of lines of the ledger: when they begin, the log has the record."""
    whole = ChainedFile.append

    def told(self: ChainedFile, *records: dict[str, Any]) -> None:
        letter = LETTERS["export"] if self.path.name == "ledger.jsonl" else ""
        _tell(pipe, letter.upper())
        try:
            whole(self, *records)
        finally:
            _tell(pipe, letter)

    return mock.patch.object(ChainedFile, "append", told)


def _train(folder: Path, setting: str, resumes: bool) -> None:
    """Train to the end, and leave the weights and what was spent."""
    _prepare(setting)
    _leave(folder, preempted.start(folder, setting, resumes=resumes))


def _prepare(setting: str) -> None:
    if setting in preempted.IN_SHARDS:
        dist.init_process_group("gloo")
        allow_fsdp_on_cpus()


def _leave(folder: Path, trainer: Any) -> None:
    spent = trainer.privacy_spent()
    weights = {name: whole_of(p).clone() for name, p in tiny.weights(trainer.model).items()}
    if trainer.args.process_index == 0:
        result = {"weights": weights, "spent": spent.epsilon, "planned": trainer.plan.epsilon()}
        evaluations = len(Ledger.read(folder / "out/privacy/ledger.jsonl").evaluations)
        torch.save(result | {"steps": spent.num_steps, "evaluations": evaluations}, folder / "result.tmp")
        os.replace(folder / "result.tmp", folder / "result.pt")


def _reference(folder: Path, setting: str, key: int, lost: frozenset[int], loses_opening: bool) -> None:
    _prepare(setting)
    _leave(folder, preempted.undisturbed(folder, setting, lost, key=key, loses_opening=loses_opening))


# --- in the parent ---


class Processes(ranks.Ranks):
    """The processes of one start of a run, and the pipe on which they tell their phases."""

    def __init__(self, work: Callable[[], None], world: int, folder: Path):
        self.pipe, writes = os.pipe()

        def told() -> None:
            with _telling(writes) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
                work()

        super().__init__(told, world, folder)
        os.close(writes)

    def letters(self, seconds: float) -> str:
        """What was told, after waiting that long for it at most; empty for nothing, or if all have ended."""
        ready, _, _ = select.select([self.pipe], [], [], max(0.0, seconds))
        return os.read(self.pipe, 1 << 16).decode() if ready else ""

    def end(self) -> None:
        """Wait for all, and stop at what a process says went wrong: of one whose partner was killed it is no error."""
        self.wait()
        os.close(self.pipe)
        if self.is_killed and len(self.codes) > 1:
            return
        failed = [rank for rank, code in self.codes.items() if code not in (0, -signal.SIGKILL)]
        assert not failed, self.said(failed[0]).strip().splitlines()[-1]

    @property
    def is_killed(self) -> bool:
        """Whether one of those that have ended was killed."""
        return -signal.SIGKILL in self.codes.values()


class Storm:
    """Runs of one setting, killed and compared.

    Args:
        setting: one of `preempted.SETTINGS`.
        world: processes of a run.
        seed: of the points.
        folder: scratch.
    """

    def __init__(self, setting: str, world: int, seed: int, folder: Path):
        self.setting, self.world, self.seed, self.folder = setting, world, seed, folder
        self._known: dict[tuple[int, frozenset[int], bool], dict[str, Any]] = {}
        self._durations: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def profile(self) -> None:
        """Time the phases of a run that nothing disturbs."""
        folder = self.folder / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        began, begun, spent = time.monotonic(), {}, Counter()
        processes = Processes(lambda: _train(folder, self.setting, False), self.world, folder)
        while True:
            letters = processes.letters(0.05)
            now = time.monotonic()
            for letter in letters:
                if letter.isupper():
                    begun[letter] = now
                    self._counts[letter] += 1
                    if letter == "L":
                        self._durations.setdefault("start", now - began)
                else:
                    spent[letter] += now - begun[letter.upper()]
            if not letters and processes.have_ended():
                break
        processes.end()
        for letter, total in spent.items():
            self._durations[letter] = total / self._counts[letter.upper()]
        self._durations["anywhere"] = now - began
        shutil.rmtree(folder)

    def run(self, number: int) -> dict[str, Any]:
        """One run, killed one to five times, and what came of it."""
        if not self._durations:
            self.profile()
        chance = random.Random(f"{self.seed} {self.setting} {self.world} {number}")
        folder = self.folder / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        planned, kills = chance.randint(1, 5), []
        outcome: dict[str, Any] = {"run": number, "kills": kills}
        try:
            while not self._start(folder, chance if len(kills) < planned else None, kills):
                pass
            outcome |= self._compare(folder)
        except AssertionError as error:
            outcome["error"] = str(error)
            return outcome
        shutil.rmtree(folder)
        return outcome

    def _start(self, folder: Path, chance: random.Random | None, kills: list[str]) -> bool:
        """Start the run once; True if it came to its end, False if it was killed."""
        phases = PHASES | MORE_PHASES.get(self.setting, {})
        phase = chance.choices(list(phases), list(phases.values()))[0] if chance is not None else ""
        letter = LETTERS.get(phase, "")
        # fewer are left to one that goes on
        most = self._counts[letter.upper()] // (2 if kills else 1) if letter else 0
        awaited = chance.randint(1, max(1, most)) if chance is not None and letter else 0
        share = chance.uniform(0, 1.3) if chance is not None else 0.0
        wait = share * self._durations.get(letter or phase, 0.0)
        victim, pause = (chance.randrange(self.world), chance.uniform(0, 0.1)) if chance is not None else (0, 0.0)
        began = time.monotonic()
        processes = Processes(lambda: _train(folder, self.setting, True), self.world, folder)
        due = began + wait if chance is not None and not letter else None
        while True:
            letters = processes.letters(min(0.05, due - time.monotonic()) if due is not None else 0.05)
            if awaited and due is None:
                awaited -= letters.count(letter.upper())
                if awaited <= 0:
                    due = time.monotonic() + wait
            if due is not None and time.monotonic() >= due:
                processes.kill(victim, pause)
            if not letters and processes.have_ended():
                break
            assert time.monotonic() < began + PATIENCE, "a process neither ended nor died"
        if processes.is_killed:
            kills.append(phase)
        processes.end()
        return not processes.is_killed

    def _compare(self, folder: Path) -> dict[str, Any]:
        """Compare the weights of a run that is done; an AssertionError says what is wrong."""
        ledger = Ledger.read(folder / "out/privacy/ledger.jsonl")
        chains = [chain for chain in ledger.chains if chain.steps]
        assert len(chains) == 1, f"{len(chains)} chains were charged"
        lost = frozenset(chains[0].lost)
        _check_ended(folder, ledger)
        result = torch.load(folder / "result.pt", weights_only=True)
        loses_opening = any("it is not asked again" in path.read_text() for path in folder.glob("rank-*.log"))
        want = self._wanted(preempted.number_of(chains[0].key_id), lost, loses_opening)
        other = [name for name, p in result["weights"].items() if not torch.equal(p, want["weights"][name])]
        assert not other, f"{len(other)} tensors differ ({other[0]}); lost steps {sorted(lost)}"
        assert result["steps"] == preempted.NUM_STEPS == want["steps"], f"{result['steps']} steps are charged"
        assert result["spent"] == result["planned"] <= preempted.TARGET, f"epsilon {result['spent']}"
        # one that was lost is neither asked nor charged again
        asked, planned = result["evaluations"], want["evaluations"]
        assert asked == planned, f"{asked} evaluations were charged, not {planned}"
        return {"lost": sorted(lost), "epsilon": result["spent"]} | _other_charges(folder, result["spent"])

    def _wanted(self, key: int, lost: frozenset[int], loses_opening: bool) -> dict[str, Any]:
        of = key, lost, loses_opening
        if of not in self._known:
            folder = self.folder / "reference"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            Processes(lambda: _reference(folder, self.setting, *of), self.world, folder).end()
            self._known[of] = torch.load(folder / "result.pt", weights_only=True)
        return self._known[of]


def _check_ended(folder: Path, ledger: Ledger) -> None:
    """Check that the ledger says what the log does, and that nothing is left that a person would have to delete."""
    logs = [Ledger.read(path) for path in (folder / "keys/runs").glob("*/log.jsonl")]
    assert sum(bool(log.num_charged) for log in logs) == 1, f"{len(logs)} runs were charged"
    log = find_run(folder / "out", folder / "keys").log
    assert log is not None and log.num_charged and log.run == ledger.run, "the ledger is not that of the log"
    for chain in log.chains:
        public = ledger.chain(chain.chain_id)
        assert (chain.steps, chain.lost) == (public.steps, public.lost), "the ledger is not what the log says"
    left = [
        path for path in folder.rglob("*") if path.suffix in (".key", ".tmp") or path.name in (JOURNAL, UNFINISHED)
    ]
    assert not left, f"{left[0].relative_to(folder)} is left"


def _other_charges(folder: Path, epsilon: float) -> dict[str, Any]:
    """What the run charged besides its steps; an AssertionError says what is wrong with it."""
    found: dict[str, Any] = {}
    evaluations = Ledger.read(folder / "out/privacy/ledger.jsonl").evaluations.values()
    if evaluations:
        found["evaluations_lost"] = sum(one.metrics is None for one in evaluations)
    path = folder / "people.jsonl"
    if path.exists():
        ledger = DatasetLedger.read(path)
        assert ledger.spent >= epsilon, f"the run costs {epsilon}, and {ledger.spent} is charged to the dataset"
        assert len(ledger.entries) == 1, f"the dataset was charged for {len(ledger.entries)} runs"
    return found


# --- the command ---


def _jobs(kills: int, kills_of_two: int, only: list[str] | None) -> list[tuple[str, int, int]]:
    """(setting, processes, kills) that make up the storm.

    Args:
        only: settings, and ``SETTING:2`` for those of two processes; None for all.
    """
    one = [name for name in preempted.SETTINGS if name not in preempted.IN_SHARDS and (only is None or name in only)]
    two = [name for name in OF_TWO if only is None or f"{name}:2" in only]
    unknown = {*only} - {*one} - {f"{name}:2" for name in two} if only is not None else None
    assert not unknown, f"--settings {' '.join(sorted(unknown))}: unknown. Settings: {all_settings()}"
    share = [(name, 1, kills // len(one) + (i < kills % len(one))) for i, name in enumerate(one)]
    return share + [(name, 2, kills_of_two // len(two) + (i < kills_of_two % len(two))) for i, name in enumerate(two)]


def all_settings() -> str:
    """The names that ``--settings`` takes."""
    return ", ".join([n for n in preempted.SETTINGS if n not in preempted.IN_SHARDS] + [f"{n}:2" for n in OF_TWO])


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Counts of each setting."""
    rows = {}
    for name, outcomes in runs.items():
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        rows[name] = {
            "runs": len(outcomes),
            "kills": sum(len(outcome["kills"]) for outcome in outcomes),
            "kills_by_phase": dict(sorted(Counter(phase for o in outcomes for phase in o["kills"]).items())),
            "runs_bit_equal": len(outcomes) - len(errors),
            "lost_steps": sum(len(outcome.get("lost", ())) for outcome in outcomes),
            "evaluations_lost": sum(outcome.get("evaluations_lost", 0) for outcome in outcomes),
            "budget_exceeded": sum("DPBudgetExceeded" in error for error in errors),
            "errors": errors,
        }
    return rows


def table(content: dict[str, Any]) -> str:
    """The table of docs/reliability.md, in Markdown.

    Args:
        content: of a file that the command has written.
    """
    rows = content["settings"]
    phases = sorted({phase for row in rows.values() for phase in row["kills_by_phase"]})
    counts = {
        "runs": "runs", "runs_bit_equal": "equal to the last bit", "lost_steps": "updates lost",
        "evaluations_lost": "evaluations lost", "charged_again": "charged to the dataset again",
        "budget_exceeded": "over budget",
    }  # fmt: skip
    counts = {key: name for key, name in counts.items() if all(key in row for row in rows.values())}
    lines = [
        "| setting | kills | " + " | ".join([*phases, *counts.values()]) + " |",
        "|---" + "|---:" * (1 + len(counts) + len(phases)) + "|",
    ]
    numbers = {
        name: [row["kills"], *(row["kills_by_phase"].get(phase, 0) for phase in phases), *(row[key] for key in counts)]
        for name, row in rows.items()
    }
    numbers["all"] = [sum(column) for column in zip(*numbers.values(), strict=True)]
    lines += [f"| {name} | " + " | ".join(map(str, row)) + " |" for name, row in numbers.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=150, help="of runs of one process")
    parser.add_argument("--kills_of_two", type=int, default=50, help="of runs of two processes (gloo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("kill_storm.json"))
    parser.add_argument("--settings", nargs="+", help=f"only these; all: {all_settings()}")
    parser.add_argument("--table", action="store_true", help="print the table of what --out holds, and kill nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.out.read_text())))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        runs = before["runs"] if before["seed"] == arguments.seed else {}
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is not looked through in every process
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_storm_") as scratch:
        for setting, world, kills in _jobs(arguments.kills, arguments.kills_of_two, arguments.settings):
            name = setting if world == 1 else f"{setting}, two processes"
            storm, outcomes = Storm(setting, world, arguments.seed, Path(scratch) / name), runs.setdefault(name, [])
            while sum(len(outcome["kills"]) for outcome in outcomes) < kills:
                outcomes.append(storm.run(len(outcomes)))
                _write(arguments, runs, time.monotonic() - began)
            print(f"{name}: {json.dumps(summary({name: outcomes})[name])}", flush=True)
    failed = [name for name, row in summary(runs).items() if row["errors"]]
    print(f"{sum(row['kills'] for row in summary(runs).values())} kills; failed: {failed or 'none'}")
    return 1 if failed else 0


def _write(arguments: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], seconds: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    content = {
        "command": "python -m tests.run.kill_storm " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": collect_versions(),
        "seed": arguments.seed,
        "steps_of_a_run": preempted.NUM_STEPS,
        "seconds": round(seconds, 1),
        "target_epsilon": preempted.TARGET,
        "settings": summary(runs),
        "runs": runs,
    }
    temporary = arguments.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, arguments.out)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what libraries say about themselves when they are taken down helps nobody
