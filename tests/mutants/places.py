"""The areas, the places of a file that are mutated, and the rule that leaves out those that cannot matter.

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
import dataclasses
from collections.abc import Iterator

RUN, PACKAGE = "hf_dpopt/run", "hf_dpopt"
AREAS: dict[str, tuple[str, ...]] = {  # files and folders
    "step": (f"{RUN}/step.py",),
    "run": (f"{RUN}/run.py",),
    "ledger": (f"{RUN}/ledger.py",),
    "keys": (f"{RUN}/keys.py", f"{RUN}/key_memory.py"),
    "sampling": (f"{PACKAGE}/sampling",),
    "clipping": (f"{PACKAGE}/clipping",),
    "noise": (f"{PACKAGE}/noise",),
    "accounting": (f"{PACKAGE}/accounting",),
    "plan": (f"{PACKAGE}/plan",),
}
Point = tuple[int, int]  # line from 1, column from 0
LOGGERS = {"logger", "log", "logging", "warnings", "_logger"}
TEXTS = {"print", "cast"}
GUARDS = {"strict", "frozen", "kw_only", "slots", "repr"}
CACHES = {"cache", "lru_cache", "cached_property"}


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a place in a file belongs to.

    Attributes:
        source: text of the file.
        ignored: spans of which every part is left out, as (start, end).
        functions: (first line, last line, qualified name) of functions and classes, outer ones first.
        statements: (first line, last line) of simple statements and of the heads of compound ones.
    """

    source: str
    ignored: tuple[tuple[Point, Point], ...]
    functions: tuple[tuple[int, int, str], ...]
    statements: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, source: str) -> Outline:
        tree = ast.parse(source)
        statements = sorted({_head(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)})
        return cls(source, tuple(_ignored(tree)), tuple(_functions(tree)), tuple(statements))

    def is_ignored(self, start: Point, end: Point) -> bool:
        """Whether the rule above leaves out what lies between two points."""
        return any(first <= start and end <= last for first, last in self.ignored)

    def function_at(self, line: int) -> str:
        """Qualified name of the innermost function or class around a line; empty at the top of a module."""
        return max(((a, name) for a, b, name in self.functions if a <= line <= b), default=(0, ""))[1]

    def lines_of(self, line: int) -> range:
        """Lines of the innermost statement around a line, without the body of a compound one."""
        around = [(b - a, a, b) for a, b in self.statements if a <= line <= b]
        _, first, last = min(around, default=(0, line, line))
        return range(first, last + 1)


def _span(node: ast.AST) -> tuple[Point, Point]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _head(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    last = node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, body[0].lineno - 1) if isinstance(body, list) and body else last


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, int, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            yield node.lineno, node.end_lineno or node.lineno, name
            yield from _functions(node, f"{name}.")
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
