"""The guard of `make audit`: exact runs pass, and the audit finds every fault of `tests.faults` that names a finding.

python -m tests.audit.guard            all of it; exit code 1 if something was missed, or an exact run failed

Exact code fails with probability `TOTAL_FALSE_ALARM` at most: each audit has a share of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.audit import audit
from tests.faults.plant import Copy, Fault, copy
from tests.faults.table import CLOSE, FAULTS

TOTAL_FALSE_ALARM = 1e-5
AUDITED = tuple(fault for fault in FAULTS if fault.finding)
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


def failed_findings(settings: dict[str, Any]) -> tuple[list[str], float]:
    """Return the names of the findings that failed, and the smallest p-value."""
    found = audit({"skip_self_check": True} | settings)
    return [one.name for one in found.findings if not one.has_passed], min(one.p_value for one in found.findings)


def find(fault: Fault, within: Copy) -> dict[str, Any]:
    """Plant a fault, audit, and return what is written down of it."""
    with within.planted(fault):
        by, p_value = on_ranks(within, fault.num_ranks, fault.settings)
    return {"what": fault.what, "found": any(name.startswith(fault.finding) for name in by), "by": by, "p": p_value}


def on_ranks(within: Copy, num_ranks: int, settings: dict[str, Any]) -> tuple[list[str], float]:
    """Audit the copy in one process or several; return the findings that failed, and the smallest p-value."""

    def audited() -> list[tuple[list[str], float]]:
        from tests.audit import guard
        from tests.helpers import ranks  # of the copy, as is the guard

        def of_a_rank() -> None:
            found = guard.failed_findings({"use_cpu": True} | settings)  # of gloo, wherever it runs
            Path(f"findings-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))

        ranks.launch(of_a_rank, num_ranks, Path("ranks"))
        return [json.loads(Path(f"findings-{rank}.json").read_text()) for rank in range(num_ranks)]

    seen = within.run(audited)
    if num_ranks == 1:
        return seen[0]
    return [f"{name} (rank {rank})" for rank, (by, _) in enumerate(seen) for name in by], min(p for _, p in seen)


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    wrong = {name: failed for name, settings in EXACT.items() if (failed := failed_findings(settings)[0])}
    with copy() as within:
        rows = [find(fault, within) for fault in AUDITED]
        if on_two := on_ranks(within, RANKS, {})[0]:
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
