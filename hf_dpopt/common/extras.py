"""Imports by name: packages of the extras in pyproject.toml, and the files of a folder that register what they add."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any

from hf_dpopt.common.errors import DPConfigError

EXTRAS = {
    "cvxpy": "convex",
    "datasets": "recipes",
    "h5py": "recipes",
    "llguidance": "chat",
    "matplotlib": "plots",
    "opacus": "verify",
    "peft": "recipes",
    "trl": "chat",
}


def import_extra(module: str, needed_by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: dotted name; its package must be a key of `EXTRAS`.
        needed_by: start of the message: the option, file or task that needs it.

    Raises:
        DPConfigError: if the package is not installed, or does not load.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module.partition(".")[0], needed_by, str(error)) from None


def missing(package: str, needed_by: str, why: str) -> DPConfigError:
    """Make the error about a package of `EXTRAS`, with its install line."""
    return DPConfigError(
        f"{needed_by} needs the package {package} ({why}). Run: pip install 'hf-dpopt[{EXTRAS[package]}]'"
    )


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a folder: a rare stage adds itself to its registry, and no other file names it."""
    for module in pkgutil.iter_modules(path, f"{package}."):
        importlib.import_module(module.name)
