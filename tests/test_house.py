"""The house keeps its order: nothing loose at the top, imports between packages go one way, and so do those of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# From what imports nothing of ours to what imports everything; a package may import those before it.
ORDER = (
    "common", "randomness", "clipping", "noise", "public", "accounting", "postprocess", "sampling", "preclip", "optim",
    "records", "plan", "run", "report", "users", "experimental", "huggingface", "convex", "cli",
)  # fmt: skip


@pytest.fixture(scope="module")
def package(repo: Path) -> Path:
    return repo / "hf_dpopt"


def _modules(package: Path) -> dict[str, Path]:
    files = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for file, name in files.items()}


def _imports(modules: dict[str, Path], name: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere, also inside a function."""
    for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_loose_at_the_top(package: Path):
    assert {file.name for file in package.glob("*.py")} == {"__init__.py", "__main__.py"}
    folders = {folder.name for folder in package.iterdir() if folder.is_dir() and (folder / "__init__.py").exists()}
    assert folders == set(ORDER), "a new package needs a place in the order of imports"


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
