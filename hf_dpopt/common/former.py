"""Import paths that the README or docs/ of release 0.1.0 taught; they work until 0.3.0, with a warning.

Only those: a path that no page taught moves without notice.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

UNTIL = "0.3.0"

# Module of release 0.1.0 -> name -> module that has it now.
TAUGHT: dict[str, dict[str, str]] = {
    "hf_dpopt.grads": {"make_engine": "hf_dpopt.clipping"},
    "hf_dpopt.stages": {"Stages": "hf_dpopt.run.stages"},
    "hf_dpopt.public": {"GoePreconditioner": "hf_dpopt.experimental.goe"},
}
GONE = ("hf_dpopt.grads", "hf_dpopt.stages")


def lookup(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that names were taken from."""

    def look_up(name: str) -> Any:
        if name not in TAUGHT[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = TAUGHT[module][name]
        warnings.warn(
            f"{name} has moved from {module} to {now}; the old path goes in hf_dpopt {UNTIL}. Fix: from {now} import "
            f"{name}.",
            FutureWarning,
            stacklevel=2,
        )
        value = getattr(importlib.import_module(now), name)
        setattr(sys.modules[module], name, value)  # one warning is enough
        return value

    return look_up


def install_modules() -> None:
    """Make the modules that are gone importable; nothing is imported before a name of theirs is asked for."""
    for name in GONE:
        module = ModuleType(name, f"Moved; see `{__name__}`.")
        module.__getattr__ = lookup(name)  # type: ignore[method-assign]
        sys.modules[name] = module
