"""The tables of docs/audit.md: bounds beside claims, runs that carry nothing, and faults that were planted.

python -m tests.audit.page                 all of it, about ten minutes on a core; writes docs/audit.json and the tables
python -m tests.audit.page nulls faults    these parts, and the others as they are in docs/audit.json
python -m tests.audit.page --write         the tables alone, from docs/audit.json
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_dpopt.audit import Audit, audit, canaries
from hf_dpopt.audit.bounds import lower_bounds
from tests.audit import guard
from tests.audit.guard import SETTINGS
from tests.faults.plant import copy

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "audit.json", DOCS / "audit.md"
BEGIN, END = "<!-- {} begin -->\n", "<!-- {} end -->"
RUNS = 10  # of each setting
NULLS, TRAINED_NULLS = 2000, 200
METHODS = ("one_run", "independent")


def bounds_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Audit a setting several times."""
    found = [audit(settings) for _ in range(RUNS)]
    return {
        "claimed": found[0].claimed_epsilon,
        "passed": sum(one.has_passed for one in found),
        **{method: [one.bounds[method] for one in found] for method in found[0].bounds},
    }


def nulls() -> dict[str, Any]:
    """Bounds from what carries nothing, drawn scores and whole runs: how often they say more than 0."""
    generator = np.random.default_rng(1)
    above, trained = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0)
    for _ in range(NULLS):
        scores, coins = generator.standard_normal(1000), generator.random(1000) < 0.5
        _count(above, lower_bounds(scores, coins, delta=1e-5, threshold=0.0))
    failed = 0
    for _ in range(TRAINED_NULLS):
        found = null_run()
        _count(trained, found.bounds)
        # that records add nothing is seen by the tests of what they add
        failed += any(not one.has_passed for one in found.findings if not one.name.startswith("a record"))
    return {
        "runs": NULLS, "above 0": above,
        "trained": {"runs": TRAINED_NULLS, "above 0": trained, "failed": failed},
    }  # fmt: skip


def null_run() -> Audit:
    """A whole run through the trainer in which no canary has a gradient, whether it takes part or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canaries, "LENGTH", 0.0)
        settings = {"noise_multiplier": 1.0, "expected_batch_size": 100, "sampling": "fixed_order"}
        return audit({"skip_self_check": True} | settings, num_canaries=400, num_steps=8, num_quiet=400)


def _count(above: dict[str, int], bounds: Mapping[str, float]) -> None:
    for method, bound in bounds.items():
        above[method] += bound > 0


def faults() -> list[dict[str, Any]]:
    """Which findings see each fault. `make audit` also audits exact ranks and settings."""
    with copy() as within:
        return [guard.find(fault, within) for fault in guard.AUDITED]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables in Markdown, by name."""
    rows = ["| setting | claimed | `one_run` | `independent` | of the claim | audits passed |"]
    rows.append("|---|---|---|---|---|---|")
    for name, row in results["bounds"].items():
        best = np.array(row["independent"])
        cells = [
            name, f"{row['claimed']:.2f}", f"{np.median(row['one_run']):.2f}",
            f"{np.median(best):.2f} ({best.min():.2f} to {best.max():.2f})", f"{np.median(best) / row['claimed']:.2f}",
            f"{row['passed']} of {RUNS}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    null = results["nulls"]
    said, trained = _counts(null), null["trained"]
    faults = ["| fault | found by | p |", "|---|---|---|"]
    for row in results["faults"]:
        faults.append(f"| {row['what']} | {', '.join(row['by']) or '**not found**'} | {row['p']:.0e} |")
    return {
        "bounds": "\n".join(rows) + "\n",
        "nulls": (
            f"Bounds above 0, of {null['runs']} sets of scores that carry nothing: {said}.\n"
            f"Of {trained['runs']} runs through the trainer whose canaries have no gradient: {_counts(trained)}; a "
            f"test failed in {trained['failed']}.\n"
        ),
        "faults": "\n".join(faults) + "\n",
    }


def _counts(null: dict[str, Any]) -> str:
    return ", ".join(f"`{method}` {count}" for method, count in null["above 0"].items())


def page(text: str, results: dict[str, Any]) -> str:
    """The page with its tables replaced."""
    for name, table in tables(results).items():
        begin, end = BEGIN.format(name), END.format(name)
        text = text[: text.index(begin) + len(begin)] + table + text[text.index(end) :]
    return text


PARTS: dict[str, Callable[[], Any]] = {
    "bounds": lambda: {name: bounds_of(settings) for name, settings in SETTINGS.items()},
    "nulls": nulls,
    "faults": faults,
}


def main() -> None:
    if "--write" not in sys.argv:
        torch.set_num_threads(1)
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        for part in sys.argv[1:] or PARTS:
            start = time.perf_counter()
            results[part] = PARTS[part]()
            results.setdefault("seconds", {})[part] = round(time.perf_counter() - start)
        results |= {
            "date": datetime.date.today().isoformat(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": "python -m tests.audit.page",
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    missed = [row["what"] for row in results["faults"] if not row["found"]]
    failed = [name for name, row in results["bounds"].items() if row["passed"] < RUNS]
    print(f"{len(results['faults']) - len(missed)} faults found; missed: {missed}; {failed=}")
    sys.exit(bool(missed or failed))


if __name__ == "__main__":
    main()
