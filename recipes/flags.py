"""Flags that no recipe has are refused before the libraries are imported, which takes seconds."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
import sys
from collections.abc import Collection
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError

CLASSES_OF_ARGUMENTS = (  # package, files
    ("recipes", "*.py"),
    ("hf_dpopt", "plan/options.py"),
    ("hf_dpopt", "huggingface/*.py"),
    ("hf_dpopt", "convex/*.py"),
    ("transformers", "training_args*.py"),
    ("trl", "trainer/*_config.py"),
)
NAMES = re.compile("(Arguments|Options|_BaseConfig|(Model|SFT|DPO|Reward)Config)$")  # of classes of arguments


def refuse_unknown(argv: list[str]) -> None:
    """End the program with one line if a flag is not among the fields of any class of arguments.

    The parser of a recipe refuses what only another recipe has.
    """
    known = {f"--{name}" for name in ("help", *fields())}
    given = (word.partition("=")[0].lstrip("-") for word in argv if word.startswith("--"))
    names = [f"--{name.replace('-', '_')}" for name in given if name]
    if unknown := [name for name in names if not {name, name.replace("--no_", "--", 1)} & known]:
        sys.stderr.write(f"error: {unknown_flag(unknown, known)}\n")
        sys.exit(2)


def unknown_flag(given: Collection[str], known: Collection[str]) -> DPConfigError:
    """The refusal of flags that are not among the known ones, with the nearest of those."""
    close = {name: nearest(name.split("=")[0], known) for name in given}
    said = (f"{name} is not a flag.{f' Did you mean {meant[0]}?' if meant else ''}" for name, meant in close.items())
    return DPConfigError(f"{' '.join(said)} --help lists all flags.")


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the flag that was meant, if any: --epsilon is --target_epsilon, and --lora_rank is --lora_r."""
    target = name.replace(word := name.lstrip("-"), f"target_{word}")
    shorter = max((flag for flag in known if "_" in flag and name.startswith(flag)), key=len, default=None)
    if target in known or shorter is not None:
        return [target if target in known else shorter]  # type: ignore[list-item]
    return difflib.get_close_matches(name, known, 1, cutoff=0.75)


@functools.cache
def fields() -> dict[str, str]:
    """Names of the fields of all classes of arguments, with the types that they have there."""
    found: dict[str, str] = {}
    for package, pattern in CLASSES_OF_ARGUMENTS:
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else spec.submodule_search_locations or []
        for path in (path for folder in folders for path in Path(folder).glob(pattern)):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            classes = (node for node in nodes if isinstance(node, ast.ClassDef) and NAMES.search(node.name))
            for field in (n for one in classes for n in one.body if isinstance(n, ast.AnnAssign)):
                name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
                found[name] = f"{found.get(name, '')} {kind}"
    return found
