"""The command of mutants: what it leaves out, how a mutant is named, and what the page says of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import mutants

LEFT_OUT = (
    "def f(x: int | None = None) -> int | None: ...",
    "x: int | None = True",
    "assert x == 1",
    "raise ValueError(f'{x == 1}')",
    "logger.info(x == 1)",
    "warnings.warn(x == 1)",
    "class A:\n    def __repr__(self): return 'a' * 2",
    "zip(a, b, strict=True)",
    "@functools.cache\ndef f(): ...",
    "if TYPE_CHECKING:\n    x = 1",
)


@pytest.fixture(scope="module")
def operators():
    return pytest.importorskip("tests.faults.operators", reason="needs cosmic-ray", exc_type=ImportError)


def test_what_cannot_matter_is_left_out(operators):
    """A default, a whole refusal and a call for its effect are not."""
    for source in LEFT_OUT:
        kept = [one["operator"] for one in operators.mutants_of("a.py", source)]
        assert set(kept) <= {"DropStatement", "core/ReplaceTrueWithFalse"}, source
    assert operators.mutants_of("a.py", "def f(x: int = 1): ...")


def test_a_mutant_is_named_and_made(operators):
    source = "class A:\n    def f(x):\n        if x == 1:\n            raise ValueError(x == 1)\n        g(x)\n"
    found = {one["operator"]: one for one in operators.mutants_of("a.py", source)}
    assert all(one["line"] != 4 or one["operator"] == "DropStatement" for one in found.values())
    assert operators.mutated(source, found["DropStatement"]) == source.replace("g(x)", "pass")
    assert "if x != 1:" in operators.mutated(source, found["core/ReplaceComparisonOperator_Eq_NotEq"])
    assert {one["function"] for one in found.values()} == {"A.f"}


def test_tests_that_a_verdict_names_come_first_and_then_those_of_the_module():
    found = mutants.nearest_tests("hf_dpopt/sampling/poisson.py", "`test_delta.py::test_known_defaults`")
    assert found[0] == "tests/accounting/test_delta.py" and "tests/sampling/test_samplers.py" in found[:20]


def test_the_page_is_that_of_the_results_and_every_survivor_has_a_verdict(repo: Path):
    """Printed by `python -m tests.faults.mutants --table`."""
    assert mutants.section(mutants.RESULTS) in (repo / "docs/reliability.md").read_text(encoding="utf-8")
    rows = [row for row in mutants.load(mutants.RESULTS)[1] if row.get("kind", "killed") not in mutants.KILLED]
    assert not [json.dumps(row) for row in rows if "verdict" not in row]
