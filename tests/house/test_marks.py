"""Which tests run: chosen by marks alone, on every date the same, and every guard of privacy is among the fast ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each test function in these files has a fast case: attacks, planted bugs, audits, contracts, frozen outputs, ranks, forgeries.
GUARDS = (
    "tests/adversary/", "tests/audit/", "tests/contract/", "tests/faults/", "tests/frozen/", "tests/sharded/",
    "tests/verify/",
    "tests/mechanisms/test_slices.py", "tests/huggingface/test_processes.py", "tests/huggingface/test_two_nodes.py",
    "tests/huggingface/test_two_processes.py", "tests/common/test_zones.py",
)  # fmt: skip
PLUGIN = """
import datetime, json, os, time

import transformers.trainer  # it imports pandas, whose compiled parts need the class that is replaced below

SHIFT = 86400.0 * int(os.environ["SHIFT_DAYS"])


def shift(function):
    return lambda seconds=None: function(time.time() if seconds is None else seconds)


class Date(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    today = utcnow = now


time.time = lambda now=time.time: now() + SHIFT
time.time_ns = lambda: int(time.time() * 1e9)
time.localtime, time.gmtime = shift(time.localtime), shift(time.gmtime)
datetime.datetime = Date


def pytest_collection_finish(session):
    marks = {item.nodeid: {mark.name: mark.args for mark in item.iter_markers() if "slow" in mark.name or mark.name == "nightly"}
             for item in session.items}
    with open(os.environ["COLLECTED"], "w") as file:
        json.dump({"dates": [str(datetime.date.today()), str(Date.now().date())], "marks": marks}, file)
"""


def collected(folder: Path, repo: Path, days: int) -> dict[str, Any]:
    """What pytest collects so many days from today, with the marks of each case."""
    (folder / "shifted_clock.py").write_text(PLUGIN)
    file = folder / f"{days}.json"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(repo)]),
        "SHIFT_DAYS": str(days),
        "COLLECTED": str(file),
    }
    command = [sys.executable, "-m", "pytest", "-p", "shifted_clock", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-qq"]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return json.loads(file.read_text())


def with_slow_but(marks: dict[str, Any]) -> dict[str, list[str]]:
    """The cases of each function with this mark."""
    found: dict[str, list[str]] = {}
    for name in (name for name, own in marks.items() if "slow_but" in own):
        found.setdefault(name.partition("[")[0], []).append(name)
    return found


@pytest.mark.slow
def test_every_date_has_the_same_tests_and_every_guard_a_fast_case(tmp_path: Path, repo: Path) -> None:
    now, later = collected(tmp_path, repo, 0), collected(tmp_path, repo, 1237)
    assert len({*now["dates"], *later["dates"]}) == 2 and later["dates"][0] > now["dates"][0]
    assert now["marks"] == later["marks"]
    fast = {name for name, marks in now["marks"].items() if not {"slow", "nightly"} & marks.keys()}
    assert 1000 < len(fast) < len(now["marks"])
    for function, cases in with_slow_but(now["marks"]).items():
        (number,) = now["marks"][cases[0]]["slow_but"]
        assert cases[0] in fast and len(fast.intersection(cases)) == min(number, len(cases)), function
    guards = {name.partition("[")[0] for name in now["marks"] if name.startswith(GUARDS)}
    assert all(any(name.startswith(guard) for name in guards) for guard in GUARDS)
    assert guards <= {name.partition("[")[0] for name in fast}


def test_every_mark_is_registered(request: pytest.FixtureRequest, repo: Path) -> None:
    """pytest itself refuses others while it collects; a mark that only an option of a command names would choose nothing."""
    registered = {line.partition(":")[0].partition("(")[0] for line in request.config.getini("markers")}
    used = {
        mark
        for file in (repo / "tests").rglob("*.py")
        for mark in re.findall(r"\bpytest\.mark\.(\w+)", file.read_text())
    }
    commands = (repo / "Makefile").read_text() + (repo / ".ci" / "run").read_text()
    chosen = re.findall(r"\bMARKS \?= (.*)|\bMARKS='(.*?)'", commands)
    named = {word for pair in chosen for word in re.findall(r"\w+", " ".join(pair))} - {"not", "and"}
    assert named == {"slow", "nightly"}
    assert used | named <= registered and "--strict-markers" in request.config.getini("addopts")


@pytest.mark.xdist_group("together")
def test_groups_of_tests_reach_the_workers(request: pytest.FixtureRequest) -> None:
    """A pytest that hides them from pytest-xdist (9.2.0 does) spreads blocks of a page and shared ranks over workers."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("no worker: without -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
