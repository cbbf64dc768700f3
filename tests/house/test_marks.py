"""Which tests run: chosen by marks alone, and every guard of privacy is among the fast ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Each test function in these files has a fast case: attacks, planted bugs, audits, contracts, frozen outputs, ranks, forgeries.
GUARDS = (
    "tests/adversary/", "tests/audit/", "tests/contract/", "tests/faults/", "tests/frozen/", "tests/sharded/",
    "tests/verify/",
    "tests/mechanisms/test_slices.py", "tests/recipes/test_processes.py", "tests/huggingface/test_two_nodes.py",
    "tests/huggingface/test_two_processes.py", "tests/common/test_zones.py",
)  # fmt: skip


def collected(repo: Path, *options: str) -> set[str]:
    """Names of the test functions that pytest collects."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *options, *GUARDS]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_every_guard_has_a_fast_case(repo: Path) -> None:
    guards = collected(repo)
    assert len(guards) > 300 and guards == collected(repo, "-m", "not slow and not nightly")


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
