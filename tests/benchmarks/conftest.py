"""Modules of `benchmarks/`, which is a folder of scripts and no package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], Any]]:
    """Takes the name of a script and returns its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module
