"""The index of users at scale: time to build, peak memory, time to draw a round.

    python benchmarks/users.py --output docs/users.json

A synthetic table (ids with a heavy tail, in no order) is written as Arrow files and read through memory maps, as a
dataset is. The build runs in a process of its own. Its peak counts the pages of the table that were read, too, which
the system can drop; `anonymous_mib` is what it cannot, after the build.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.users import UserData, UserIndex, index

CHUNK = 1_000_000
USERS_PER_ROUND, RECORDS_PER_USER, ROUNDS = 100, 16, 50


def write_table(path: Path, num_rows: int, num_users: int) -> None:
    """An Arrow file with a column of ids; every user has a row, and a tenth of them most of the rest."""
    rng = np.random.default_rng(0)
    names_U = pa.array([f"user-{u:08d}" for u in range(num_users)])
    schema = pa.schema([("author", pa.string()), ("text", pa.int32())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, num_rows, CHUNK):
            size = min(CHUNK, num_rows - first)
            users = (num_users * rng.random(size) ** 3).astype(np.int64)
            if first < num_users:
                some = np.arange(first, min(first + size, num_users))
                users[: len(some)] = some
            names = names_U.take(pa.array(users))
            rows = pa.array(np.arange(first, first + size, dtype=np.int32))
            writer.write_batch(pa.record_batch([names, rows], schema))


def build(path: Path) -> dict[str, Any]:
    dataset = datasets.Dataset.from_file(str(path))
    before, began = _anonymous(), time.perf_counter()
    found = UserIndex.build(dataset, "author")
    seconds = time.perf_counter() - began
    return {
        "num_rows": found.num_rows, "num_users": found.num_users, "seconds": seconds,
        "anonymous_mib_before": before, "anonymous_mib": _anonymous(), "largest_user": int(found.sizes().max()),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "table_mib": path.stat().st_size / 2**20,
        "rows_read_at_once": index.CHUNK, "round": draw(found),
    }  # fmt: skip


def _anonymous() -> float:
    """MiB of memory that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class _Run:
    """As much of a run as the choice of records looks at."""

    class chain:
        sampling_key = bytes(32)


def draw(found: UserIndex) -> dict[str, Any]:
    """Seconds for the users of a round and their records, by sampler."""
    config = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=USERS_PER_ROUND,
        privacy_unit="user",
        records_per_user=RECORDS_PER_USER,
    )
    users, taken = UserData(found, "author", config), {}
    for name in ("poisson", "truncated_poisson", "fixed_order", "balls_in_bins"):
        sampler = SAMPLERS[name](num_examples=found.num_users, expected_batch_size=USERS_PER_ROUND)
        seconds = []
        for step in range(1, ROUNDS + 1):
            began = time.perf_counter()
            users.choose(_Run(), step, sampler.draw(_Run.chain.sampling_key, step))  # type: ignore[arg-type]
            seconds.append(time.perf_counter() - began)
        taken[name] = {"median_ms": 1e3 * statistics.median(seconds), "first_ms": 1e3 * seconds[0]}
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**7, 136_000_000])
    parser.add_argument("--users", type=int, default=342_477)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(json.dumps(build(options.build)))
        return
    rows = []
    for num_rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder, "table.arrow")
            write_table(table, num_rows, options.users)
            command = [sys.executable, __file__, "--build", str(table)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        about = {"python": platform.python_version(), "numpy": np.__version__, "pyarrow": pa.__version__}
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
