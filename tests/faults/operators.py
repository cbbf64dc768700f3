"""Mutants of a text, made by the operators of cosmic-ray and by one of ours; https://cosmic-ray.readthedocs.io.

Cosmic-ray has no operator that leaves a statement out: `DropStatement` does, and is how a refusal that never comes and
a function that does nothing are made.

Left out, because no test should notice a change there:

* docstrings, annotations and arguments of `cast`: they are not executed, or change nothing that is;
* texts for people: arguments of an error that is raised, calls of a logger, of `warnings.warn` and of `print`,
  `__repr__` and `__str__`;
* guards against slips of programmers, not of users: `assert`, `strict` of `zip`, `frozen`, `kw_only`, `slots` and
  `repr` of a dataclass;
* `functools.cache`, `lru_cache` and `cached_property` as decorators: they change time alone;
* `TYPE_CHECKING` blocks, `__all__`, and methods of a `Protocol`, which nothing calls.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.operators.operator import Operator

Point = tuple[int, int]  # line from 1, column from 0
RANDOM = ("VariableReplacer", "VariableInserter")  # they draw a number of their own, and need names to be given
LOGGERS = {"logger", "log", "logging", "warnings", "_logger"}
TEXTS = {"print", "cast"}
GUARDS = {"strict", "frozen", "kw_only", "slots", "repr"}
CACHES = {"cache", "lru_cache", "cached_property"}


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


def operators() -> dict[str, Operator]:
    """Every operator by its name; those of cosmic-ray begin with ``core/``."""
    names = [name for name in cosmic_ray.plugins.operator_names() if not name.endswith(RANDOM)]
    made = {name: cosmic_ray.plugins.get_operator(name)() for name in names if not name.endswith("NoOp")}
    return {**made, "DropStatement": DropStatement()}


def mutants_of(file: str, source: str) -> list[dict[str, Any]]:
    """Every mutant of a file that the rule above lets through, in the order of the file.

    Returns:
        Rows of `file`, qualified name of the `function` around, `operator`, `text` of the line, `column` from the first
        character of the text, `nth` among mutants that are alike in all of this, `line`, and `occurrence` among those
        of the operator.
    """
    tree, lines = ast.parse(source), source.splitlines()
    ignored, functions = list(_ignored(tree)), list(_functions(tree))
    occurrences, alike, found = Counter[str](), Counter[tuple](), []
    for node in ast_nodes(get_ast(source)):
        if node.type in ("name", "newline", "endmarker", "string"):
            continue
        for name, operator in operators().items():
            for start, end in operator.mutation_positions(node):
                occurrence = occurrences[name]
                occurrences[name] += 1
                if any(first <= start and end <= last for first, last in ignored):
                    continue
                line, text = start[0], lines[start[0] - 1]
                function = max(((a, name) for a, b, name in functions if a <= line <= b), default=(0, ""))[1]
                column = start[1] - (len(text) - len(text.lstrip()))
                key = (file, function, name, text.strip(), column)
                row = dict(zip(("file", "function", "operator", "text", "column"), key, strict=True))
                found.append(row | {"nth": alike[key], "line": line, "occurrence": occurrence})
                alike[key] += 1
    return sorted(found, key=lambda row: (row["line"], row["column"]))


def mutated(source: str, mutant: dict[str, Any]) -> str:
    """Return the text of the file with the mutant in it."""
    result = MutationVisitor.mutate_code(source, operators()[mutant["operator"]], mutant["occurrence"])
    assert result is not None and result != source, mutant
    return result


def _span(node: ast.AST) -> tuple[Point, Point]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, int, str]]:
    """First line, last line and qualified name of functions and classes, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.end_lineno or node.lineno, f"{prefix}{node.name}"
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _name(node: ast.AST) -> str:
    """Last part of a dotted name, or of the name that is called."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_log(call: ast.Call) -> bool:
    of = call.func
    return isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id in LOGGERS


def _ignored(tree: ast.AST) -> Iterator[tuple[Point, Point]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assert():
                yield _span(node)
            case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                yield from (_span(part) for part in [*args, *keywords])
            case ast.Call() if _is_log(node) or _name(node) in TEXTS:
                yield _span(node)
            case ast.keyword(arg=name) if name in GUARDS:
                yield _span(node)
            case ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation):
                yield _span(annotation)
            case ast.If(test=test) if _name(test) == "TYPE_CHECKING":
                yield _span(node)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                yield _span(node)
            case ast.ClassDef(bases=bases) if any(_name(base) == "Protocol" for base in bases):
                yield _span(node)
            case ast.FunctionDef():
                yield from _ignored_of(node)


def _ignored_of(node: ast.FunctionDef) -> Iterator[tuple[Point, Point]]:
    if node.name in ("__repr__", "__str__"):
        yield _span(node)
    if node.returns is not None:
        yield _span(node.returns)
    for decorator in node.decorator_list:
        if _name(decorator) in CACHES:
            yield (decorator.lineno, 0), (decorator.lineno + 1, 0)
