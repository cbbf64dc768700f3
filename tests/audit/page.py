"""The tables of docs/audit.md: bounds beside claims, runs that carry nothing, and faults that were planted.

python -m tests.audit.page            all of it, about five minutes on a core; writes docs/audit.json and the tables
python -m tests.audit.page --write    the tables alone, from docs/audit.json
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_dpopt.audit import audit
from hf_dpopt.audit.bounds import lower_bounds
from tests.audit.faults import FAULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "audit.json", DOCS / "audit.md"
BEGIN, END = "<!-- {} begin -->\n", "<!-- {} end -->"
RUNS = 10  # of each setting
NULLS = 2000
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


def bounds_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Audit a setting several times."""
    found = [audit(settings) for _ in range(RUNS)]
    return {
        "claimed": found[0].claimed_epsilon,
        "passed": sum(one.has_passed for one in found),
        **{method: [one.bounds[method] for one in found] for method in found[0].bounds},
    }


def nulls() -> dict[str, Any]:
    """Bounds from scores that carry nothing: how often they say more than 0."""
    generator = np.random.default_rng(1)
    above = dict.fromkeys(("one_run", "one_run_curve", "independent"), 0)
    for _ in range(NULLS):
        scores, coins = generator.standard_normal(1000), generator.random(1000) < 0.5
        for method, bound in lower_bounds(scores, coins, delta=1e-5, threshold=0.0).items():
            above[method] += bound > 0
    return {"runs": NULLS, "above 0": above}


def fault(index: int) -> dict[str, Any]:
    """Plant a fault and audit."""
    planted, start = FAULTS[index], time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        found = audit({"skip_self_check": True} | planted.settings)
    failed = [finding for finding in found.findings if not finding.has_passed]
    return {
        "what": planted.what,
        "found": any(finding.name.startswith(planted.seen_by) for finding in failed),
        "by": [finding.name for finding in failed],
        "p": min((finding.p_value for finding in failed), default=1.0),
        "seconds": round(time.perf_counter() - start, 1),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables in Markdown, by name."""
    rows = ["| setting | claimed | `one_run` | `one_run_curve` | `independent` | of the claim | audits passed |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, row in results["bounds"].items():
        cells = [f"{np.median(row[m]):.2f}" for m in ("one_run", "one_run_curve")]
        best = np.array(row["independent"])
        cells.append(f"{np.median(best):.2f} ({best.min():.2f} to {best.max():.2f})")
        share = np.median(best) / row["claimed"]
        rows.append(
            f"| {name} | {row['claimed']:.2f} | {' | '.join(cells)} | {share:.2f} | {row['passed']} of {RUNS} |"
        )
    null = results["nulls"]
    said = ", ".join(f"`{method}` {count}" for method, count in null["above 0"].items())
    faults = ["| fault | found by | p |", "|---|---|---|"]
    for row in results["faults"]:
        faults.append(f"| {row['what']} | {', '.join(row['by']) or '**not found**'} | {row['p']:.0e} |")
    return {
        "bounds": "\n".join(rows) + "\n",
        "nulls": f"Of {null['runs']} runs whose scores carry nothing, bounds were above 0 in: {said}.\n",
        "faults": "\n".join(faults) + "\n",
    }


def page(text: str, results: dict[str, Any]) -> str:
    """The page with its tables replaced."""
    for name, table in tables(results).items():
        begin, end = BEGIN.format(name), END.format(name)
        text = text[: text.index(begin) + len(begin)] + table + text[text.index(end) :]
    return text


def main() -> None:
    if "--write" not in sys.argv:
        torch.set_num_threads(1)
        start = time.perf_counter()
        results = {
            "bounds": {name: bounds_of(settings) for name, settings in SETTINGS.items()},
            "nulls": nulls(),
            "faults": [fault(i) for i in range(len(FAULTS))],
            "date": datetime.date.today().isoformat(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": "python -m tests.audit.page",
        }
        results["seconds"] = round(time.perf_counter() - start)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    missed = [row["what"] for row in results["faults"] if not row["found"]]
    failed = [name for name, row in results["bounds"].items() if row["passed"] < RUNS]
    print(
        f"{len(results['faults']) - len(missed)} faults found in {results['seconds']} s; missed: {missed}; {failed=}"
    )
    sys.exit(bool(missed or failed))


if __name__ == "__main__":
    main()
