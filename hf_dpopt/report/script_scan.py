"""Lines of the script that print or log training records: exact values that leave the run beside the trainer.

Found by the text of a line alone: a call that prints or logs rows or label counts of the training set.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_dpopt.common.log import logger

LOGGING = ("print", "debug", "info", "warning", "warn", "error", "critical", "log", "pprint")
TRAINING = re.compile(r"^(\w*_)?train(ing)?(_?(data|dataset|datasets|set|ds|examples|rows|samples|texts|features))?$")
HOLDERS = re.compile(r"^(\w*_)?(data|dataset|datasets|ds)$")  # {"train": ..., "validation": ...}
COUNTERS = ("Counter", "value_counts", "unique", "bincount")
LONGEST_LINE = 100  # characters that are repeated of a line


def warn_of_printed_rows() -> tuple[str, ...]:
    """Warn of lines of the running script that print training records, by number and text.

    Returns:
        One description each, for the privacy statement; none where there is no script to read.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    try:
        source = Path(path).read_text(encoding="utf-8") if path else ""
        found = printed_rows(source, _silenced(getattr(main, "logger", None)))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return ()
    lines = source.splitlines()
    described = tuple(f"{Path(path).name}, line {n}: {lines[n - 1].strip()[:LONGEST_LINE]}" for n in found if path)
    if described:
        logger.warning(
            "The script prints training records, exactly and without noise; the privacy statement lists it under what "
            "is not covered. Take these lines out, set --log_level warning if they log at level info, or keep the log "
            "as secret as the data (docs/migrate.md):\n" + "\n".join(described)
        )
    return described


def _silenced(logger_of_script: object) -> frozenset[str]:
    """Methods of the script's logger that print nothing at its level."""
    if not isinstance(logger_of_script, logging.Logger):
        return frozenset()
    levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
    return frozenset(name for name, level in levels.items() if not logger_of_script.isEnabledFor(level))


def printed_rows(source: str, silenced: frozenset[str] = frozenset()) -> list[int]:
    """Numbers of the lines in which a call prints or logs rows, or counts of labels, of the training set.

    Args:
        source: text of a Python script.
        silenced: methods of its `logger` that print nothing.
    """
    tree = ast.parse(source)
    counted = set(_counted_names(tree))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in LOGGING)
    heard = (call for call in calls if not (_receiver(call.func) == "logger" and _name(call.func) in silenced))
    return sorted({call.lineno for call in heard if any(_tells(a, counted) for a in _arguments(call))})


def _receiver(function: ast.expr) -> str:
    return getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _tells(expression: ast.expr, counted: set[str]) -> bool:
    """Whether the text holds a value of training records, not only their number or their columns."""
    if isinstance(expression, ast.Call) and _name(expression.func) in ("len", "type", "id"):
        return False
    if isinstance(expression, ast.Attribute):
        return False  # features, column_names, num_rows
    if isinstance(expression, ast.Subscript) and _is_training(expression):
        return True
    if isinstance(expression, ast.Name) and expression.id in counted:
        return True
    return any(_tells(child, counted) for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr))


def _is_training(expression: ast.Subscript) -> bool:
    """Whether this is ``train_dataset[...]`` or ``raw_datasets["train"][...]``."""
    value = expression.value
    if isinstance(value, ast.Name):
        return TRAINING.match(value.id) is not None
    return isinstance(value, ast.Subscript) and _is_training_split(value)


def _is_training_split(expression: ast.Subscript) -> bool:
    key = expression.slice.value if isinstance(expression.slice, ast.Constant) else None
    holds = isinstance(expression.value, ast.Name) and HOLDERS.match(expression.value.id) is not None
    return holds and isinstance(key, str) and TRAINING.match(key) is not None


def _counted_names(tree: ast.AST) -> Iterator[str]:
    """Names that hold counts of a column, or elements of such counts in a loop."""
    counted: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _counts(node.value):
            counted |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and counted & {n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name)}:
            counted |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    yield from counted


def _counts(expression: ast.expr) -> bool:
    """Whether this is ``Counter(dataset["label"])`` of the training set, or of a dataset whose split is not named."""
    if not isinstance(expression, ast.Call) or _name(expression.func) not in COUNTERS:
        return False
    columns = [a for a in _arguments(expression) if isinstance(a, ast.Subscript)]
    return any(
        isinstance(c.value, ast.Name) and (HOLDERS.match(c.value.id) or TRAINING.match(c.value.id)) for c in columns
    )
