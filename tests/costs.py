"""What tests cost, recorded, and the fast tier that is chosen by it.

    python -m tests.costs junit.xml      writes tests/costs.json from a report of the whole suite (`make costs`)

`pytest --tier fast` runs the tests that are cheap by this record, and of each large parametrisation a sample that
rotates from day to day, so that `make check` stays under two minutes on two cores. A test that is slow there fails,
whether its record says otherwise or it has none yet: it has changed, or is new, and so is the tier.
"""

from __future__ import annotations

import datetime
import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("costs.json")
FAST = 0.35  # seconds of one case, at most
SAMPLE = 6  # cases of a parametrisation that run in one day
SECONDS = 130.0  # of one core, for the whole tier
SLOW = 3.0  # seconds after which a case of the fast tier fails; a loaded machine may make one of what is cheap


def function_of(nodeid: str) -> str:
    """The name of a test without its parameters, and without the group that xdist appends."""
    return nodeid.partition("[")[0].partition("@")[0]


def recorded() -> dict[str, float]:
    """Test function -> seconds of its most expensive case, set-up included."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def chosen(nodeids: Sequence[str], costs: dict[str, float], *, day: int) -> set[str]:
    """The cases of the fast tier.

    Args:
        nodeids: every case that was collected.
        costs: see `recorded`; what is not in there is new, and counts as cheap.
        day: decides which cases of a large parametrisation run.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        cases[function_of(nodeid)].append(nodeid)
    found, left = set(), SECONDS
    for function in sorted(cases, key=lambda name: (costs.get(name, 0.0), name)):
        cost = costs.get(function, 0.0)
        if cost > FAST:
            break
        some = cases[function]
        if len(some) > SAMPLE:
            some = random.Random(f"{function} {day}").sample(some, SAMPLE)
        left -= cost * len(some)
        if left < 0:
            break
        found |= set(some)
    return found


def select(items: list[Any], deselect: Callable[[list[Any]], None]) -> None:
    """Keeps the fast tier among what pytest collected."""
    keep = chosen([item.nodeid for item in items], recorded(), day=datetime.date.today().toordinal())
    deselect([item for item in items if item.nodeid not in keep])
    items[:] = [item for item in items if item.nodeid in keep]


def is_too_slow(nodeid: str, seconds: float, costs: dict[str, float]) -> str:
    """Why a case of the fast tier fails, or an empty text."""
    if seconds <= SLOW:
        return ""
    record = costs.get(function_of(nodeid))
    known = "nothing is" if record is None else f"{record:.2f} s are"
    return (
        f"{seconds:.1f} s, and {known} recorded in tests/costs.json. Make it cheaper, or record the suite: make costs."
    )


def from_junit(report: Path) -> dict[str, float]:
    """The record from pytest's `--junitxml`."""
    costs: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = f"{file}::{function_of(case.get('name', ''))}"
        costs[name] = max(costs.get(name, 0.0), round(float(case.get("time", 0.0)), 2))
    return dict(sorted(costs.items()))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.costs <report of pytest --junitxml>")
    FILE.write_text(json.dumps(from_junit(Path(sys.argv[1])), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
