"""Checks how the package speaks: docstrings, `Args:`, names of functions, error messages, and words of our own making.

tests/house/test_words.py, a part of `make lint`, refuses what breaks a rule.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hf_dpopt"

# A docstring says what something is, or in the imperative what it does. These words begin a fragment of a sentence
# whose start the reader would have to guess.
FRAGMENTS = frozenset(
    """about after against among and around as at because before behind below beneath beside besides between beyond but
    by during except for from how if in inside into like near of off on or outside over past per since so than through
    till to toward towards under until unto up upon via what when where wherever which while who whose why with within
    without""".split()
)

# "Refuse a batch", not "Refuses a batch": a first line in the third person leaves out who does it.
THIRD_PERSON = frozenset(
    """adds allows appends applies asks assigns begins brings builds carries charges checks chooses collates compares
    computes continues converts creates cuts deletes descends divides does draws expands fills finds gives goes hides
    keeps leaves lets looks makes multiplies opens overwrites prints puts raises reads receives recognises refreshes
    refuses releases removes replaces replays restores returns says sends settles shortens starts stops takes trains
    tries turns updates verifies warns writes yields""".split()
)

# An argument is described by what it is. "of the model" or "as for `Plan`" leave that to be guessed.
OPEN_ARGUMENTS = frozenset("of as in from for with by to on at under over".split())

# Participles and remainders of sentences; a function is a verb, a predicate `is_` or `has_`, a value a noun.
NAMES = frozenset(
    "accepted agreed after_of all_of_them allowed as_is asked capped checked collated combined compared described "
    "formed guarded joined kept listed made merged moved of_query sampled seen served taken unpadded".split()
)

# Word of ours -> the word of the field.
SLANG = {
    r"(?<![a-z])mend(s|ed)?(?![a-z])": "fix",
    r"(?<![a-z])coins?(?![a-z])": "Bernoulli draw, or random draw",
    r"(?<![a-z])toss(es|ed|ing)?(?![a-z])": "draw",
    r"(?<![a-z])loud(er|est|ly|ness)?(?![a-z])": "noise level, or large",
    r"(?<![a-z])tickets?(?![a-z])": "single-use token",
}

_ANY_SLANG = re.compile("|".join(SLANG))

# Text of recorded statements, which are compared to the letter (`make frozen`).
FROZEN = ("coins of the sampling are secret",)

CODE = re.compile(r"`[^`]*`")  # names in a document, which the code decides

# What an error may begin with: a capital, a digit, a quoted or backticked name, an option, or "name=".
_START = re.compile(r"[A-Z0-9`'\"(]|--|\.?\w[\w.\[\]]*\s?=|\{")


@dataclass(frozen=True, order=True)
class Violation:
    """A place that breaks a rule: file below hf_dpopt/, line, the rule and the words."""

    file: str
    line: int
    rule: str
    words: str

    def __str__(self) -> str:
        return f"hf_dpopt/{self.file}:{self.line}: {self.rule}: {self.words}"


@functools.cache
def violations(package: Path = PACKAGE) -> list[Violation]:
    """Everything in the package that breaks a rule of this module."""
    found = []
    for file in sorted(package.rglob("*.py")):
        name, source = file.relative_to(package).as_posix(), file.read_text(encoding="utf-8")
        found += [Violation(name, *of_one) for of_one in check(source)]
    return found


def check(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, rule and words of each violation in one module."""
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_docstring(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") in NAMES:
            yield node.lineno, "name", node.name
        yield from _check_message(_message(node))
    for number, line in enumerate(source.splitlines(), 1):
        yield from ((number, "slang", word) for word in slang(line))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all statements inside it; expressions, which are most of a tree, are left out."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield from _statements(inner)


def slang(line: str) -> Iterator[str]:
    """Each word of `SLANG` in a line, with the field's word for it; `FROZEN` texts may stay."""
    for text in FROZEN:
        line = line.replace(text, "")
    line = line.lower()
    if not _ANY_SLANG.search(line):
        return
    for pattern, better in SLANG.items():
        yield from (f"{match.group()} (say: {better})" for match in re.finditer(pattern, line))


def _check_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
    text = ast.get_docstring(node)
    if not text:
        return
    line = node.body[0].lineno
    first = text.splitlines()[0]
    if first.split()[0].strip(".,:;").lower() in FRAGMENTS | THIRD_PERSON:
        yield line, "docstring", first
    for name, description in arguments(text):
        if description and description.split()[0].strip(".,:;").lower() in OPEN_ARGUMENTS:
            yield line, "argument", f"{name}: {description}"


def arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and descriptions in the sections `Args:` and `Attributes:`."""
    for section in re.finditer(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE):
        yield from re.findall(r"^    ([\w*`., ]+?):\s+(\S.*)$", section.group(1), re.MULTILINE)


def _check_message(message: ast.expr | None) -> Iterator[tuple[int, str, str]]:
    if isinstance(message, ast.JoinedStr):
        message = message.values[0]  # a text, or a value, which may be anything
    if isinstance(message, ast.Constant) and isinstance(message.value, str) and not _START.match(message.value):
        yield message.lineno, "message", message.value


def _message(node: ast.AST) -> ast.expr | None:
    """The message of ``raise DP...Error(message)``, or of a refusal, ``yield applies, message, fix``."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        name = ast.unparse(node.exc.func).rpartition(".")[2]
        return node.exc.args[0] if re.match(r"DP|Unsupported", name) else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and isinstance(node.value.value, ast.Tuple):
        texts = node.value.value.elts[1:]
        if len(texts) == 2 and all(isinstance(text, ast.Constant | ast.JoinedStr) for text in texts):
            return texts[0]
    return None
