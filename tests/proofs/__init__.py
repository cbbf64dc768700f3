"""Pins of the functions that each page of `docs/proofs` is about, by digests of their syntax trees.

A proof is about the code that was read for it. Where that code changes, the test asks for the page to be read again;
then `python -m tests.proofs --write` renews the pins. Comments, docstrings and layout are no part of a digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("digests.json")
SECTION = "## Functions"


def pages() -> list[Path]:
    """Pages with a proof."""
    return [page for page in sorted((REPO / "docs" / "proofs").glob("*.md")) if page.name != "README.md"]


def functions_of(page: Path) -> list[str]:
    """Functions, methods and classes that a page says it is about, in full."""
    _, _, section = page.read_text(encoding="utf-8").partition(f"{SECTION}\n")
    return re.findall(r"^\* `(hf_dpopt\.[\w.]+)`", section.partition("\n## ")[0], re.MULTILINE)


def digest(name: str) -> str:
    """Digest of the code of a function, method or class.

    Raises:
        LookupError: if there is none of that name.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        file = REPO.joinpath(*parts[:end])
        for path in (file.with_suffix(".py"), file / "__init__.py"):
            if path.is_file():
                return digest_of_source(path.read_text(encoding="utf-8"), parts[end:])
    raise LookupError(name)


def digest_of_source(source: str, inside: list[str]) -> str:
    """Digest of a definition in a module, without what no machine reads.

    Args:
        source: text of the module.
        inside: names that lead to it: a class and its method, say.
    """
    node: ast.AST = ast.parse(source)
    for name in inside:
        found = [child for child in ast.iter_child_nodes(node) if name in _names(child)]
        if not found:
            raise LookupError(".".join(inside))
        node = found[-1]
    for part in ast.walk(node):
        if (
            isinstance(part, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:32]


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def pins() -> dict[str, dict[str, str]]:
    """Page -> function -> digest, as the code has them now."""
    return {page.name: {name: digest(name) for name in functions_of(page)} for page in pages()}


def recorded() -> dict[str, dict[str, str]]:
    """Page -> function -> digest, as they were when the page was last read against the code."""
    found: dict[str, dict[str, str]] = json.loads(PINS.read_text())
    return found


def write() -> None:
    """Record the digests of now."""
    PINS.write_text(json.dumps(pins(), indent=1, sort_keys=True) + "\n")
