"""Tests that touch a line: by a recorded pass of the fast ones, and by what files of tests import for the slow ones.

A pass of the whole suite under a tracer takes longer than a run of the command, so tests marked as slow are not traced.
They are tried last, those first whose file names the module, or has a fast test that executes it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from pathlib import Path

from tests.mutants import child
from tests.mutants.places import AREAS, Outline

FAST, SLOW = 0.35, 10.0  # seconds of CPU that a case is taken for, by its mark
CASES = 2  # of a parametrisation, while lines are recorded
NOT_HERE = ("two_process", "test_packaging", "test_readme", "kernels/test_on_a_gpu", "adversary/test_planted")
OTHER_PROCESS = ("subprocess", "sys.executable", "tests.mutants", "pytester")
# Words in the names of files of tests, for packages whose tests are called otherwise.
FOLDERS = {"noise": ("mechanisms", "noise"), "clipping": ("grads", "clipping"), "run": (), "plan": ("test_plan",)}

Lines = dict[str, dict[str, list[int]]]  # test function -> file -> lines


def all_tests(repo: Path) -> dict[str, float]:
    """Test functions that run in one process, and `FAST` or `SLOW` by their marks."""
    found = {}
    for path in sorted((repo / "tests").rglob("test_*.py")):
        file = path.relative_to(repo).as_posix()
        if any(part in file for part in NOT_HERE):
            continue
        all_slow = re.search(r"^pytestmark = .*pytest\.mark\.slow\b", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name, source in _functions(path).items():
            if name.startswith("test_") and not any(word in source for word in (*OTHER_PROCESS, "mark.nightly")):
                is_slow = all_slow or re.search(r"^@pytest\.mark\.slow$", source, re.MULTILINE)
                found[f"{file}::{name}"] = SLOW if is_slow else FAST
    return found


@functools.cache
def _functions(file: Path) -> dict[str, str]:
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min(n.lineno for n in (node, *node.decorator_list)) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def record(repo: Path, file: Path, *, log: Path) -> Lines:
    """Lines that the fast tests execute, recorded once, without a mutant; kept in a file.

    A function that is red here, in a forked process, is left out: it would be red with every mutant.
    """
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    tests = all_tests(repo)
    fast = tuple(sorted(test for test, cost in tests.items() if cost <= FAST))
    traced = tuple(name for names in AREAS.values() for name in names)
    order = child.Order(fast, tests, cases=CASES, traced=traced, goes_on=True)
    outcome = child.run(order, log, wall_seconds=14400.0)
    green = set(outcome.passed)
    lines = {test: files for test, files in outcome.lines.items() if test in green}
    lines |= {test: {} for test in green - set(lines)}
    file.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    return lines


@dataclasses.dataclass(frozen=True)
class Place:
    """What a mutant changes: lines of a statement, in a function of a file."""

    repo: Path
    file: str
    function: str
    lines: range

    @property
    def words(self) -> tuple[str, ...]:
        """Words of its name, by which cases of a parametrisation are known that are about it."""
        parts = f"{Path(self.file).stem}_{self.function.replace('.', '_')}".lower().split("_")
        return tuple(sorted({part for part in parts if len(part) > 2} - {"init", "self", "base", "linear"}))

    def distance(self, test: str) -> int:
        """How far a test is from it: 0 names the function, 1 is of the module, 2 of the package, 3 of none of these."""
        where, _, name = test.partition("::")
        words = [word for word in self.function.split(".") if not word.startswith("__")]
        if words and any(word in _functions(self.repo / where).get(name, "") for word in words[-2:]):
            return 0
        path = Path(self.file)
        if path.stem.strip("_") in where or names_module(self.repo / where, self.file):
            return 1
        folders = [word for part in path.parts[1:-1] for word in FOLDERS.get(part, (part,))]
        return 2 if any(word in where for word in folders) else 3


def named_tests(repo: Path, text: str) -> list[str]:
    """Tests that a verdict names as ``file.py::function``: those that were written for the mutant run first."""
    named = [match.groups() for match in re.finditer(r"(\w+\.py)::(\w+)", text)]
    return [f"{path.relative_to(repo)}::{test}" for file, test in named for path in (repo / "tests").rglob(file)]


def first_tests(lines: Lines, tests: dict[str, float], place: Place) -> list[str]:
    """Fast tests that execute a line of a statement, the nearest first.

    Lines of the top of a module, and of classes, are executed by imports: then the nearest of all.
    """
    wanted = set(place.lines)
    touching = [test for test, files in lines.items() if wanted & set(files.get(place.file, ()))]
    if not place.function.rpartition(".")[2].lstrip("_").islower():
        touching = list(lines)
    return sorted(touching, key=lambda test: (place.distance(test), tests.get(test, 0.1), test))


def further_tests(lines: Lines, tests: dict[str, float], place: Place) -> list[str]:
    """Tests that were not traced, those most likely to notice first."""
    wanted = set(place.lines)
    files = {test.partition("::")[0] for test, seen in lines.items() if wanted & set(seen.get(place.file, ()))}

    def rank(test: str) -> tuple[int, float, str]:
        is_beside = test.partition("::")[0] in files  # a fast test of that file executes the lines
        return min(place.distance(test), 1 if is_beside else 3), tests[test], test

    return sorted((test for test in tests if test not in lines), key=rank)


@functools.cache
def names_module(where: Path, file: str) -> bool:
    """Whether a file of tests imports a module, or names out of it from its package."""
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    package, _, stem = module.rpartition(".")
    for node in ast.walk(ast.parse(where.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == module or (node.module == package and any(a.name == stem for a in node.names)):
                return True
    return False


def place_of(repo: Path, file: str, line: int) -> Place:
    """The statement that a mutant changes."""
    outline = Outline.of((repo / file).read_text(encoding="utf-8"))
    return Place(repo, file, outline.function_at(line), outline.lines_of(line))
