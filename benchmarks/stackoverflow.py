"""recipes/stackoverflow.py at the size of the benchmark: rows per second, seconds a round, memory of each process.

    python benchmarks/stackoverflow.py --folder build/stackoverflow --output docs/stackoverflow.json
    OMP_NUM_THREADS=1 python benchmarks/stackoverflow.py --rounds_in_turns 3 --num_users 2000 --output rounds.json

Writes a synthetic split with the statistics of the real one and runs the recipe on it as a user would, on one process
and on two. The first run of a size converts the split, the others map the files. Speeds are of CPU seconds, so that
other work on the machine does not count; one thread each. Of a process, `anonymous` memory is
its own; `mapped` pages belong to files, are shared by the processes and given up when others need the memory.

`--rounds_in_turns` compares rounds of the recipe with rounds of a plain loop of torch without privacy, in turns, in one
process: as many users, drawn anew, the same local training, the mean of their moves added to the weights. A private
round is everything from the end of the others to its own end: draw, rows, collation, local training, clip, ledger,
journal, noise and optimizer. Where pfl-research is at hand (`pfl_rounds.py` says how to get it), its rounds take turns, too.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from transformers import TrainerCallback

from hf_dpopt import DPTrainer
from hf_dpopt.users import local
from recipes import stackoverflow as recipe
from recipes import stackoverflow_synthetic as synthetic

ROOT = Path(__file__).resolve().parents[1]
REAL_ROWS, REAL_USERS = 135_818_730, 342_477
USERS_PER_ROUND, RECORDS_PER_USER, ROUNDS = 100, 16, 8
LOCAL_RATE = 0.5
KINDS = ("anonymous", "mapped")


def words(folder: Path, out: Path, *, rounds: int, users: int = USERS_PER_ROUND, **others: Any) -> list[str]:
    """Command line of the recipe."""
    flags: dict[str, Any] = {
        "train_file": folder / synthetic.SQLITE, "vocabulary_file": folder / synthetic.WORD_COUNT, "use_cpu": True,
        "target_epsilon": 8, "target_delta": 1e-6, "expected_batch_size": users,
        "records_per_user": RECORDS_PER_USER, "local_training": json.dumps({"learning_rate": LOCAL_RATE}),
        "optim": "sgd", "learning_rate": 1, "max_steps": rounds, "per_device_train_batch_size": 256,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "output_dir": out / "run",
        "private_state_dir": out / "private", **others,
    }  # fmt: skip
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def measure(folder: Path, *, rounds: int, processes: int) -> dict[str, Any]:
    """Run the recipe once, and poll the memory of its processes."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    began, used = time.perf_counter(), cpu_seconds()
    started = subprocess.Popen(
        [*command, str(ROOT / "recipes" / "stackoverflow.py"), *words(folder, out, rounds=rounds)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peaks: dict[int, dict[str, int]] = {}
    while started.poll() is None:
        for process in psutil.Process(started.pid).children(recursive=True):
            peak = peaks.setdefault(process.pid, dict.fromkeys(KINDS, 0))
            for name, mib in memory_mib(process.pid).items():
                peak[name] = max(peak[name], mib)
        time.sleep(0.1)
    if started.returncode:
        raise SystemExit(f"The recipe ended with {started.returncode}.")
    found = {"rounds": rounds, "processes": processes, "seconds": round(time.perf_counter() - began, 2)}
    found["cpu_seconds"] = round(cpu_seconds() - used, 2)
    return found | {f"peak_{kind}_mib": max(p[kind] for p in peaks.values()) for kind in KINDS}


def cpu_seconds() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_mib(pid: int) -> dict[str, int]:
    """Resident memory of a process, its own and that of mapped files; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if "kB" in value}
    return {"anonymous": kib.get("RssAnon", 0) // 1024, "mapped": kib.get("RssFile", 0) // 1024}


class InTurns(TrainerCallback):
    """A round of the plain loop, and of pfl-research if it is there, after each private one, with CPU seconds of each.

    Args:
        model: a copy of the model, which the plain loop trains.
        records: all records.
        collate: makes a batch of some.

    Attributes:
        num_users: of the private round in progress.
        rounds: users, seconds of the private round and of the others.
    """

    def __init__(self, model: torch.nn.Module, records: Any, collate: Any):
        self.model, self.records, self.collate = model.train(), records, collate
        order = np.argsort(users := np.asarray(records["user"]), kind="stable")
        self.rows = np.split(order, np.flatnonzero(np.diff(np.unique(users[order], return_inverse=True)[1])) + 1)
        self.rng, self.num_users = np.random.default_rng(0), 0
        self.others: dict[str, Callable[[list[int]], None]] = {"plain": self.plain_round}
        if importlib.util.find_spec("pfl") is not None:
            from pfl_rounds import PflRounds

            self.others["pfl"] = PflRounds(copy.deepcopy(model), self.batch_of, LOCAL_RATE).take
        self.since, self.rounds = time.process_time(), list[dict[str, float]]()

    def prepare_user(self, *args: Any) -> Any:
        self.num_users += 1
        return _alone(*args)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        seconds = {"users": self.num_users, "private": time.process_time() - self.since}
        for name, take in self.others.items():
            self.since = time.process_time()
            take(self.rng.choice(len(self.rows), self.num_users, replace=False).tolist())
            seconds[name] = time.process_time() - self.since
        self.rounds.append(seconds)
        self.num_users, self.since = 0, time.process_time()

    def batch_of(self, user: int) -> dict[str, torch.Tensor]:
        """The one local batch of a user, as in the recipe."""
        rows = self.rows[user]
        chosen = self.rng.choice(rows, min(len(rows), RECORDS_PER_USER), replace=False)
        columns = self.records[np.sort(chosen).tolist()]
        return self.collate([{"input_ids": ids} for ids in columns["input_ids"]])

    def plain_round(self, users: list[int]) -> None:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        start, total = [p.detach().clone() for p in weights], [torch.zeros_like(p) for p in weights]
        for user in users:
            self.model(**self.batch_of(user)).loss.backward()
            with torch.no_grad():
                for p, before, moved in zip(weights, start, total, strict=True):
                    p.sub_(p.grad, alpha=LOCAL_RATE)
                    p.grad = None
                    moved.add_(before - p)
                    p.copy_(before)
        with torch.no_grad():
            for p, moved in zip(weights, total, strict=True):
                p.sub_(moved, alpha=1 / max(len(users), 1))


_alone = local.alone


def rounds_in_turns(folder: Path, *, num_rounds: int, users: int) -> dict[str, Any]:
    """Rounds of the recipe and of a plain loop in turns; the first of each warms up and is left out."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    options = recipe.parse(words(folder, out, rounds=1 + num_rounds, users=users))
    model_args, data_args, training_args = options
    vocabulary, _ = recipe.read_vocabulary(data_args)
    encoder, model = recipe.make_model(model_args, data_args, vocabulary, training_args.seed)
    records = recipe.read_splits(data_args, training_args, encoder, "user")["train"]
    turns = InTurns(copy.deepcopy(model), records, collate := recipe.Collator(0))
    trainer = DPTrainer(
        model=model, args=training_args, train_dataset=records, data_collator=collate, callbacks=[turns]
    )
    with mock.patch.object(local, "alone", turns.prepare_user):
        trainer.train()
    each = turns.rounds[1:]
    found: dict[str, Any] = {"rounds": [{name: round(value, 2) for name, value in one.items()} for one in each]}
    for name in turns.others:
        ratios = [one["private"] / one[name] for one in each]
        found[f"private / {name}"] = {
            "median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)
        }  # fmt: skip
    num_records = RECORDS_PER_USER * sum(one["users"] for one in each)
    return found | {
        "records_per_second": {
            name: round(num_records / sum(one[name] for one in each), 1) for name in ("private", *turns.others)
        },
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/stackoverflow"))
    parser.add_argument(
        "--num_users", type=int, nargs="+", default=[2_500, 14_000], help="of two splits, 397 rows a user"
    )
    parser.add_argument(
        "--rounds_in_turns", type=int, default=0, help="so many rounds and those of a plain loop alone"
    )
    parser.add_argument("--users_per_round", type=int, default=200, help="of the rounds in turns")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if not arguments.rounds_in_turns and len(arguments.num_users) != 2:
        parser.error("--num_users: memory is extrapolated from two splits. Give two numbers.")
    folders = [
        synthetic.write(arguments.folder / str(num_users), num_users=num_users) for num_users in arguments.num_users
    ]
    if num_rounds := arguments.rounds_in_turns:
        found = rounds_in_turns(folders[-1], num_rounds=num_rounds, users=arguments.users_per_round)
        found = {"users_a_round": arguments.users_per_round, "records_per_user": RECORDS_PER_USER, **found}
        print(text := json.dumps({"date": date.today().isoformat(), "torch": version("torch"), **found}, indent=1))
        arguments.output.write_text(text + "\n", encoding="utf-8")
        return
    results = []
    for folder in folders:
        shutil.rmtree(folder / f"{synthetic.SQLITE}.converted", ignore_errors=True)
        runs = [
            measure(folder, rounds=rounds, processes=processes)
            for rounds, processes in ((1, 1), (1, 1), (1 + ROUNDS, 1), (1, 2))
        ]
        number = synthetic_rows(folder)
        results.append({
            "rows": number, "runs": runs,
            "converted_rows_per_second": round(number / (runs[0]["cpu_seconds"] - runs[1]["cpu_seconds"])),
            "seconds_a_round": round((runs[2]["cpu_seconds"] - runs[1]["cpu_seconds"]) / ROUNDS, 3),
        })  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    small, large = results
    about = {
        "command": "python benchmarks/stackoverflow.py --output docs/stackoverflow.json",
        "date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count(),
        **{name: version(name) for name in ("torch", "transformers", "datasets", "pyarrow", "numpy")},
        "users_a_round": USERS_PER_ROUND, "records_per_user": RECORDS_PER_USER,
    }  # fmt: skip
    text = json.dumps({**about, "sizes": results, "full_split": extrapolated(small, large)}, indent=1)
    arguments.output.write_text(text + "\n", encoding="utf-8")


def synthetic_rows(folder: Path) -> int:
    """Number of training rows of the split."""
    from recipes.stackoverflow_files import SqliteRows

    return SqliteRows(folder / synthetic.SQLITE, "train").count()


def extrapolated(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """The full split: memory is a + b * rows through the two sizes (b >= 0), seconds are rows / (rows per second)."""
    found: dict[str, Any] = {
        "rows": REAL_ROWS, "users": REAL_USERS, "formula": "a + b * rows, by the peaks of the two sizes",
        "hours_of_conversion": round(REAL_ROWS / large["converted_rows_per_second"] / 3600, 2),
    }  # fmt: skip
    for name, places in (("converting", (0,)), ("training", (1, 2, 3))):
        for kind in KINDS:
            first, second = (max(size["runs"][i][f"peak_{kind}_mib"] for i in places) for size in (small, large))
            per_row = max(0.0, (second - first) / (large["rows"] - small["rows"]))
            found[f"{kind}_mib_{name}"] = round(first + per_row * (REAL_ROWS - small["rows"]))
            found[f"{kind}_bytes_a_row_{name}"] = round(per_row * 2**20, 2)
    return found


if __name__ == "__main__":
    main()
