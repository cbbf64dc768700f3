"""The index of users at scale: time to build, peak memory, time to draw a round.

    python benchmarks/users.py --output docs/users.json

A synthetic table (ids with a heavy tail, in no order) is written as Arrow files and read through memory maps, as a
dataset is. The build runs in a process of its own, whose peak counts what is resident, mapped pages included.
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
    schema = pa.schema([("author", pa.string()), ("text", pa.int32())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, num_rows, CHUNK):
            size = min(CHUNK, num_rows - first)
            users = (num_users * rng.random(size) ** 3).astype(np.int64)
            if first < num_users:
                some = np.arange(first, min(first + size, num_users))
                users[: len(some)] = some
            names = pa.array([f"user-{u:08d}" for u in users.tolist()])
            writer.write_batch(
                pa.record_batch([names, pa.array(np.arange(first, first + size, dtype=np.int32))], schema)
            )


def build(path: Path, directory: Path) -> dict[str, float]:
    directory.mkdir()
    dataset = datasets.Dataset.from_file(str(path))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    found = UserIndex.build(dataset, "author", directory)
    return {
        "num_rows": found.num_rows, "num_users": found.num_users, "seconds": time.perf_counter() - began,
        "mib_before": before, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "largest_user": int(found.sizes().max()), "index_mib": sum(f.stat().st_size for f in directory.rglob("*.*")) / 2**20,
        "rows_read_at_once": index.CHUNK,
    }  # fmt: skip


class _Run:
    """As much of a run as the choice of records looks at."""

    class chain:
        sampling_key = bytes(32)


def draw(directory: Path) -> dict[str, float]:
    """Seconds for the users of a round and their records, by sampler."""
    (of_the_ids,) = directory.iterdir()
    found = UserIndex.load(of_the_ids)
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
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--users", type=int, default=10**5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--build", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(json.dumps(build(*options.build)))
        return
    rows = []
    for num_rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            table, directory = Path(folder, "table.arrow"), Path(folder, "index")
            write_table(table, num_rows, options.users)
            command = [sys.executable, __file__, "--build", str(table), str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]) | {"round": draw(directory)})
            print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        about = {"python": platform.python_version(), "numpy": np.__version__, "pyarrow": pa.__version__}
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
