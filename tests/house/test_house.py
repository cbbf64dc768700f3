"""The house keeps its order: nothing loose at the top, imports between packages go one way, and so do those of files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

# From what imports nothing of ours to what imports everything; a package may import those before it.
ORDER = (
    "common", "randomness", "clipping", "noise", "public", "accounting", "postprocess", "sampling", "preclip", "optim",
    "records", "plan", "run", "self_check", "report", "tuning", "users", "huggingface", "convex", "verify", "audit", "cli",
)  # fmt: skip


LONGEST_CHAIN = 12  # packages; who reads one has to know those before it


# Tests of the promise, which outlive any design: they drive the trainer and the command line.
OUTSIDE = ("adversary", "reliability")
INSIDE = ("hf_dpopt.run", "hf_dpopt.plan")


@pytest.fixture(scope="module")
def package(repo: Path) -> Path:
    return repo / "hf_dpopt"


def _modules(package: Path) -> dict[str, Path]:
    files = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for file, name in files.items()}


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(modules: dict[str, Path], name: str) -> Iterator[str]:
    """Modules that a module imports anywhere, also inside a function; ours as far down as files go."""
    yield from _imported(modules, _tree(modules[name]))


def _imported(modules: dict[str, Path], tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set[str](), [*graph[start]]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph[name]
    return found


def test_nothing_is_loose_at_the_top(package: Path):
    assert {file.name for file in package.glob("*.py")} == {"__init__.py", "__main__.py"}
    folders = {folder.name for folder in package.iterdir() if folder.is_dir() and (folder / "__init__.py").exists()}
    assert folders == set(ORDER), "a new package needs a place in the order of imports"


def test_nothing_is_loose_in_the_tests(repo: Path):
    assert {file.name for file in (repo / "tests").glob("*.py")} == {"__init__.py", "conftest.py"}


def test_imports_between_packages_go_one_way(package: Path):
    modules, upwards = _modules(package), []
    for name in modules:
        own = [part for part in name.split(".")[1:2] if part in ORDER]  # not __main__, which is the command line
        for imported in _imports(modules, name):
            parts = imported.split(".")
            if own and len(parts) > 1 and parts[0] == "hf_dpopt" and parts[1] in ORDER:
                if ORDER.index(parts[1]) > ORDER.index(own[0]):
                    upwards.append(f"{name} imports {imported}")
    assert not upwards


def test_one_package_imports_transformers(package: Path):
    modules = _modules(package)
    importing = {
        name for name in modules for other in _imports(modules, name) if other.split(".")[0] == "transformers"
    }
    assert {name.split(".")[1] for name in importing} == {"huggingface"}


def test_no_circles_of_files(package: Path):
    """Imports for types alone count, too: who reads one of the files still has to read the others."""
    modules = _modules(package)
    graph = {name: {other for other in _imports(modules, name) if other in modules} - {name} for name in modules}
    reach = {name: _reach(graph, name) for name in graph}
    circles = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    assert not circles


def test_no_import_of_ours_is_hidden_in_a_function(package: Path):
    """Lazy exports go through importlib, and the command line imports nothing heavy before a command runs."""
    modules, hidden = _modules(package), set()
    for name in modules:
        if name.split(".")[1:2] != ["cli"]:
            tree = _tree(modules[name])
            functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
            imported = (other for function in functions for other in _imported(modules, function))
            hidden |= {(name, other) for other in imported if other.split(".")[0] == "hf_dpopt"}
    assert not hidden


def test_the_longest_chain_of_packages(package: Path):
    modules = _modules(package)
    below: dict[str, set[str]] = {name: set() for name in ORDER}
    for name in modules:
        own = [part for part in name.split(".")[1:2] if part in ORDER]
        others = {other.split(".")[1] for other in _imports(modules, name) if other.startswith("hf_dpopt.")}
        if own:
            below[own[0]] |= others & set(ORDER) - {own[0]}
    chains: dict[str, list[str]] = {}
    for name in ORDER:  # imports go one way, so those of lower packages are there
        chains[name] = [*max((chains[other] for other in below[name]), key=len, default=[]), name]
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, " < ".join(longest)


def _inside(tree: ast.AST) -> Iterator[str]:
    """Names of the inside that a test imports, or patches by a string."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("hf_dpopt."):
            names = [node.value]
        for name in names:
            is_private = name.startswith("hf_dpopt.") and any(part.startswith("_") for part in name.split("."))
            if is_private or any(name == inside or name.startswith(f"{inside}.") for inside in INSIDE):
                yield name


@pytest.mark.parametrize("folder", OUTSIDE)
def test_tests_of_the_promise_stay_outside(repo: Path, folder: str):
    found = {
        (str(file.relative_to(repo)), name)
        for file in (repo / "tests" / folder).rglob("*.py")
        for name in _inside(_tree(file))
    }
    assert not found, "read the files of a run with tests/helpers/run_files.py"
