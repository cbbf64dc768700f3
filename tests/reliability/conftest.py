"""A run that was stopped, which is made once, and what it becomes where nothing disturbs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reliability import faults
from tests.reliability.faults import Folders, Seen


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return faults.stopped_run(tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def folders(stopped: Folders, tmp_path: Path) -> Folders:
    """A copy of the run."""
    shutil.copytree(stopped.root, tmp_path / "run")
    return Folders(tmp_path / "run")


@pytest.fixture(scope="session")
def undisturbed(stopped: Folders, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(stopped.root, root)
    seen = faults.resume(Folders(root), None)
    assert seen.charged == (6,) and not seen.error and not seen.lines
    return seen
