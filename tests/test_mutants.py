"""The command of mutants: what it leaves out, how a mutant reaches a process, and what the page says of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import report
from tests.mutants.places import Outline
from tests.mutants.verdicts import VERDICTS, key_of

RESULTS = Path("docs/mutants.jsonl")

LEFT_OUT = {
    "an annotation": "def f(x: int | None = None) -> int | None: ...",
    "an annotated name": "x: int | None = 1",
    "an assertion": "assert x == 1",
    "a message": "raise ValueError(f'{x == 1}')",
    "a log": "logger.info(x == 1)",
    "a warning": "warnings.warn(x == 1)",
    "a representation": "class A:\n    def __repr__(self): return 'a' * 2",
    "a guard": "zip(a, b, strict=True)",
    "a cache": "@functools.cache\ndef f(): ...",
    "for type checkers": "if TYPE_CHECKING:\n    x = 1",
}


def _spans(source: str, part: str) -> bool:
    """Whether a part of a source is left out."""
    before = source[: source.index(part)]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1)
    return Outline.of(source).is_ignored((line, column), (line, column + len(part)))


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_matter_is_left_out(case):
    source = LEFT_OUT[case]
    parts = [
        part
        for part in ("int | None", "x == 1", "'a' * 2", "strict=True", "@functools.cache", "x = 1")
        if part in source
    ]
    assert parts and any(_spans(source, part) for part in parts)


def test_what_decides_is_not_left_out():
    """A condition before a refusal, the refusal itself, and defaults beside annotations."""
    assert not _spans("if x == 1:\n    raise ValueError('x')", "x == 1")
    assert not _spans("if x == 1:\n    raise ValueError('x')", "raise ValueError('x')")
    assert not _spans("def f(x: int = 1): ...", "1")
    assert not _spans("@dataclass(frozen=True)\nclass A:\n    x: int = 1", "1")


def test_a_place_knows_its_function_and_its_statement():
    outline = Outline.of("class A:\n    def f(self):\n        return g(\n            1,\n        )\n\nx = 1\n")
    assert outline.function_at(4) == "A.f" and outline.function_at(7) == ""
    assert list(outline.lines_of(4)) == [3, 4, 5] and list(outline.lines_of(2)) == [2]


def test_the_page_is_that_of_the_results_and_every_survivor_has_a_verdict(repo: Path):
    """Printed by `python -m tests.mutants --table`."""
    page = (repo / "docs/reliability.md").read_text(encoding="utf-8")
    assert report.section(repo / RESULTS) in page
    rows = [row for row in report.load(repo / RESULTS)[1] if row.get("kind", "killed") not in report.KILLED]
    assert not [key_of(row) for row in rows if key_of(row) not in VERDICTS]


def test_a_mutant_is_named_and_made(tmp_path: Path):
    operators = pytest.importorskip("tests.mutants.operators", reason="needs cosmic-ray", exc_type=ImportError)
    source = "def f(x):\n    if x == 1:\n        raise ValueError(x == 1)\n    g(x)\n"
    (tmp_path / "a.py").write_text(source)
    found = {one.mutant.operator: one for one in operators.mutants_of(tmp_path, "a.py")}
    assert all(one.line != 3 or one.mutant.operator == "DropStatement" for one in found.values())
    dropped = operators.mutated(source, found["DropStatement"])
    assert dropped == source.replace("    g(x)", "    pass")
    assert "if x != 1:" in operators.mutated(source, found["core/ReplaceComparisonOperator_Eq_NotEq"])
    assert {one.mutant.function for one in found.values()} == {"f"}
