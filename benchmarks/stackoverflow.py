"""recipes/stackoverflow.py at the size of the benchmark: rows per second, seconds a round, memory of each process.

    python benchmarks/stackoverflow.py --folder build/stackoverflow --output docs/stackoverflow.json

Writes a synthetic split with the statistics of the real one and runs the recipe on it as a user would, on one process
and on two. The first run of a size converts the split, the others map the files. Speeds are of CPU seconds, so that
other work on the machine does not count; one thread each. Of a process, `anonymous` memory is
its own; `mapped` pages belong to files, are shared by the processes and given up when others need the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from recipes import stackoverflow_synthetic as synthetic

ROOT = Path(__file__).resolve().parents[1]
REAL_ROWS, REAL_USERS = 135_818_730, 342_477
USERS_PER_ROUND, RECORDS_PER_USER, ROUNDS = 100, 16, 8
SIZES = (1_000_000, None)
KINDS = ("anonymous", "mapped")


def measure(folder: Path, *, rows: int | None, rounds: int, processes: int) -> dict[str, Any]:
    """Run the recipe once, and poll the memory of its processes."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    flags: dict[str, Any] = {
        "train_file": folder / synthetic.SQLITE, "vocabulary_file": folder / synthetic.WORD_COUNT, "use_cpu": True,
        "target_epsilon": 8, "target_delta": 1e-6, "expected_batch_size": USERS_PER_ROUND,
        "records_per_user": RECORDS_PER_USER, "local_training": '{"learning_rate": 0.5}', "optim": "sgd",
        "learning_rate": 1, "max_steps": rounds, "per_device_train_batch_size": 256, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "output_dir": out / "run", "private_state_dir": out / "private",
        **({"max_train_samples": rows} if rows else {}),
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    began, used = time.perf_counter(), cpu_seconds()
    started = subprocess.Popen(
        [*command, str(ROOT / "recipes" / "stackoverflow.py"), *words],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/stackoverflow"))
    parser.add_argument("--num_users", type=int, default=14_000, help="397 rows each")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    synthetic.write(arguments.folder, num_users=arguments.num_users)
    source = synthetic_rows(arguments.folder)
    shutil.rmtree(arguments.folder / f"{synthetic.SQLITE}.converted", ignore_errors=True)
    results = []
    for rows in SIZES:
        runs = [
            measure(arguments.folder, rows=rows, rounds=rounds, processes=processes)
            for rounds, processes in ((1, 1), (1, 1), (1 + ROUNDS, 1), (1, 2))
        ]
        number = min(rows or source, source)
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
