"""The guard of `make audit`: exact runs pass, and every planted fault is found by the audit or by a named test.

python -m tests.audit.guard            all of it; exit code 1 if something was missed, or an exact run failed

Exact code fails with probability `TOTAL_FALSE_ALARM` at most: each audit has a share of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt.audit import audit
from tests.audit.faults import CLOSE, FAULTS, Fault

TOTAL_FALSE_ALARM = 1e-5
OF_A_NAMED_TEST = 1e-6  # more than each of them states
REPO = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, dict[str, Any]] = {
    "DP-SGD, every record in every step": {"expected_batch_size": 1000},
    "DP-SGD, Poisson, a quarter": {"expected_batch_size": 250},
    "DP-SGD, Poisson, a tenth": {"expected_batch_size": 100},
    "DP-SGD, balls in bins": {"expected_batch_size": 125, "sampling": "balls_in_bins"},
    "nu-DP-FTRL, fixed order": {"expected_batch_size": 250, "noise_mechanism": "nu_dpftrl"},
    "BLT, fixed order": {"expected_batch_size": 250, "noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 2}},
    "banded, cyclic Poisson": {
        "expected_batch_size": 125, "noise_mechanism": "banded", "noise_kwargs": {"num_bands": 4},
    },
    "DP^2, every record in every step": {
        "expected_batch_size": 1000, "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 4},
    },
    "DP^2 with two queries, Poisson, a quarter": {
        "expected_batch_size": 250, "preconditioner": "dp2_rmsprop",
        "preconditioner_kwargs": {"delay": 4, "variant": "extra_query"},
    },
    "users, Poisson, a quarter": {"expected_batch_size": 250, "privacy_unit": "user"},
    "users, every one in every step": {"expected_batch_size": 1000, "privacy_unit": "user"},
}  # fmt: skip
EXACT = SETTINGS | {"hardly any noise": CLOSE}
RANKS = 2


def plant(fault: Fault) -> dict[str, Any]:
    """Plant a fault, and look who finds it."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        if fault.is_named:
            is_red = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no", fault.seen_by]) == 1
            return row(fault, [fault.seen_by] if is_red else [], 0.0)
        return row(fault, *failed_findings(fault.settings))


def failed_findings(settings: dict[str, Any]) -> tuple[list[str], float]:
    """Names of the findings that failed, and the smallest p-value."""
    found = audit({"skip_self_check": True} | settings)
    return [one.name for one in found.findings if not one.has_passed], min(one.p_value for one in found.findings)


def row(fault: Fault, by: list[str], p_value: float) -> dict[str, Any]:
    """What is written down of a fault."""
    is_found = any(name.startswith(fault.seen_by) for name in by)
    return {"what": fault.what, "found": is_found, "by": by, "p": p_value}


def on_ranks() -> tuple[list[dict[str, Any]], list[str]]:
    """Plant the faults that take two processes, in one launch of `tests/audit/ranks.py`.

    Returns:
        The rows of the faults, and the findings that failed without a fault.
    """
    faults = [fault for fault in FAULTS if fault.num_ranks == RANKS]
    # `--cpu` alone starts one process; without a GPU --multi_gpu starts two of gloo
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)]
    launch += ["--main_process_port", "0", str(Path(__file__).with_name("ranks.py"))]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        done = subprocess.run(
            [sys.executable, *launch, folder], env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        seen = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    exact = [name for one in seen for name in one["exact"][0]]
    rows = []
    for fault in faults:
        by = [f"{name} (rank {rank})" for rank, one in enumerate(seen) for name in one[fault.what][0]]
        rows.append(row(fault, by, min(one[fault.what][1] for one in seen)))
    return rows, exact


def all_faults() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all faults in their order, and findings that failed on two exact ranks."""
    rows = {fault.what: plant(fault) for fault in FAULTS if fault.num_ranks == 1}
    ranked, exact = on_ranks()
    rows |= {one["what"]: one for one in ranked}
    return [rows[fault.what] for fault in FAULTS], exact


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    wrong = {name: failed for name, settings in EXACT.items() if (failed := failed_findings(settings)[0])}
    rows, on_two = all_faults()
    if on_two:
        wrong["two ranks"] = on_two
    for one in rows:
        who = ", ".join(one["by"]) if one["found"] else "NOT FOUND"
        print(f"{'ok' if one['found'] else 'FAILED':<7} {one['what']}: {who} (p {one['p']:.0e})")
    for name, failed in wrong.items():
        print(f"FAILED  exact, {name}: {', '.join(failed)}")
    missed = sum(not one["found"] for one in rows)
    print(
        f"{len(rows) - missed} of {len(rows)} faults found, {len(EXACT) + 1 - len(wrong)} of {len(EXACT) + 1} exact "
        f"settings pass, in {time.perf_counter() - start:.0f} s. Exact code fails here with probability "
        f"{TOTAL_FALSE_ALARM:g} at most."
    )
    sys.exit(bool(missed or wrong))


if __name__ == "__main__":
    main()
