"""Mutants of a file, made by the operators of cosmic-ray and by one of ours; https://cosmic-ray.readthedocs.io.

Cosmic-ray has no operator that leaves a statement out: `DropStatement` does, and is how a refusal that never comes and
a function that does nothing are made.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.operators.operator import Operator

from tests.mutants.places import Outline

RANDOM = ("VariableReplacer", "VariableInserter")  # they draw a number of their own, and need names to be given


class DropStatement(Operator):
    """A call for its effect, or a `raise`, becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple]:
        if node.parent is not None and node.parent.type == "simple_stmt":
            is_call = node.type in ("atom_expr", "power") and node.children[-1].get_code().startswith("(")
            if is_call or node.type == "raise_stmt":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple:
        return ()


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file. What names it holds as long as the line is there, wherever in the file it stands.

    Attributes:
        file: relative to the repository.
        function: qualified name of what the line belongs to.
        operator: its name; those of cosmic-ray begin with ``core/``.
        text: the line where the change begins.
        column: of the change, from the first character of the text.
        nth: number among mutants that are alike in all of this.
    """

    file: str
    function: str
    operator: str
    text: str
    column: int
    nth: int


@dataclasses.dataclass(frozen=True)
class Found:
    """A mutant as it is in a file now: its line, and its number among those of its operator."""

    mutant: Mutant
    line: int
    occurrence: int


def _operators() -> dict[str, Operator]:
    names = [name for name in cosmic_ray.plugins.operator_names() if not name.endswith(RANDOM)]
    made = {name: cosmic_ray.plugins.get_operator(name)() for name in names if not name.endswith("NoOp")}
    return {**made, "DropStatement": DropStatement()}


OPERATORS = _operators()


def mutants_of(repo: Path, file: str) -> list[Found]:
    """Every mutant of a file that the rule of `places` lets through, in the order of the file."""
    source = (repo / file).read_text(encoding="utf-8")
    outline, lines = Outline.of(source), source.splitlines()
    occurrences, alike, found = Counter[str](), Counter[tuple](), []
    for node in ast_nodes(get_ast(source)):
        if node.type in ("name", "newline", "endmarker", "string"):
            continue
        for name, operator in OPERATORS.items():
            for start, end in operator.mutation_positions(node):
                occurrence = occurrences[name]
                occurrences[name] += 1
                if outline.is_ignored(start, end):
                    continue
                text = lines[start[0] - 1]
                column = start[1] - (len(text) - len(text.lstrip()))
                key = (file, outline.function_at(start[0]), name, text.strip(), column)
                found.append(Found(Mutant(*key, alike[key]), start[0], occurrence))
                alike[key] += 1
    return sorted(found, key=lambda one: (one.line, one.mutant.column))


def mutated(source: str, found: Found) -> str:
    """The text of the file with the mutant in it."""
    operator = _operators()[found.mutant.operator]
    result = MutationVisitor.mutate_code(source, operator, found.occurrence)
    assert result is not None and result != source, found
    return result
