"""Rare stages register themselves: without their files the rest is imported, plans, trains, and refuses their names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dpopt

HIDDEN = {
    "convex": ("convex", "cli/plan_head.py"),
    "subspace": (  # a head and a preconditioner of experiments are made of one
        "public/subspace.py", "preclip/subspace_projection.py", "convex", "cli/plan_head.py",
    ),
    "galore": ("optim/galore.py",),
    "tree": ("noise/tree.py",),
    "dense": ("noise/dense.py",),
}  # fmt: skip


def _run_without(hidden: tuple[str, ...], folder: Path, repo: Path) -> None:
    copy = folder / "copy" / "hf_dpopt"
    shutil.copytree(Path(hf_dpopt.__file__).parent, copy)
    for name in sorted(set(hidden), key=len, reverse=True):  # files before the folders that hold them
        (shutil.rmtree if (copy / name).is_dir() else os.remove)(copy / name)
    path = {"PYTHONPATH": os.pathsep.join((str(copy.parent), str(repo)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.hidden_run", str(folder)], cwd=folder, env=os.environ | path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_run_needs_no_rare_stage(tmp_path, repo):
    _run_without(tuple(name for names in HIDDEN.values() for name in names), tmp_path, repo)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("part", HIDDEN)
def test_each_of_them_can_be_deleted_alone(part, tmp_path, repo):
    _run_without(HIDDEN[part], tmp_path, repo)
