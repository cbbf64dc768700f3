"""A save that is killed at any moment leaves whole checkpoints, and nothing that the next run keeps."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from typer.testing import CliRunner

from hf_dpopt.cli.app import app
from hf_dpopt.huggingface.checkpoints import surplus
from tests.helpers import tiny
from tests.helpers.run_files import UNFINISHED
from tests.reliability import faults
from tests.reliability.faults import Folders
from tests.run.one_run import settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


def tree(folders: Folders) -> set[tuple[Path, int]]:
    """Files and folders of `output_dir`, and how large they are."""
    return {(path, path.lstat().st_size) for path in folders.out.rglob("*")}


def _doctor(folders: Folders, *flags: str) -> str:
    command = ["doctor", str(folders.out), "--private-state-dir", str(folders.keys), *flags]
    return CliRunner().invoke(app, command).output


def test_a_save_that_is_killed_before_any_operation_leaves_whole_checkpoints(folders: Folders, tmp_path: Path) -> None:
    """Step 4 is saved a second time, by a branch from step 2, whose checkpoint is then deleted by the limit.

    What a kill would leave is the disk before each operation on a file of `output_dir`.
    """
    old, left, trees = (folders.last / "model.safetensors").read_bytes(), list[Folders](), list[Any]()

    def keep(name: str, path: Path) -> None:
        is_saving = (folders.out / UNFINISHED / folders.last.name).exists() or left
        if is_saving and name != "fsync" and path.is_relative_to(folders.out) and tree(folders) not in trees:
            trees.append(tree(folders))
            left.append(Folders(tmp_path / str(len(left))))
            shutil.copytree(folders.root, left[-1].root)

    made = faults.trainer(folders, save_total_limit=1, callbacks=[tiny.StopAt(faults.STOPPED_AT)])
    with faults.watched(keep):
        made.train(resume_from_checkpoint=str(folders.out / "checkpoint-2"))
    new = (folders.last / "model.safetensors").read_bytes()
    assert len(left) > 12 and new != old and not (folders.out / "checkpoint-2").exists()
    seen = []
    for one in left:
        last = get_last_checkpoint(str(one.out))  # what a stock script would be handed
        before = _doctor(one)
        assert last is None or f"{Path(last).name}    whole" in before, before
        settle(one.out, one.keys)
        after = _doctor(one)
        assert " ! " not in after and "checkpoint-4    whole" in after, after
        assert {path.name for path in one.out.iterdir()} <= {"privacy", "checkpoint-2", "checkpoint-4", "_journal"}
        seen.append((one.last / "model.safetensors").read_bytes())
    assert {*seen} == {old, new}


def test_a_checkpoint_is_on_the_disk_before_it_is_renamed(folders: Folders) -> None:
    done: list[tuple[str, Path]] = []
    files: set[Path] = set()

    def note(name: str, path: Path) -> None:
        if name == "rename" and path == folders.out / "checkpoint-6":
            made = folders.out / UNFINISHED / "checkpoint-6"
            files.update(made.rglob("*"), [made])
            done.append(("-> its place", path))
        elif name == "fsync":
            done.append((name, path))

    with faults.watched(note):
        faults.trainer(folders).train(resume_from_checkpoint=True)
    at = done.index(("-> its place", folders.out / "checkpoint-6"))
    assert files and files <= {path for _, path in done[:at]}
    assert done[at + 1] == ("fsync", folders.out)


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_deletes_what_the_stock_trainer_would(tmp_path, seed):
    rng = random.Random(seed)
    steps = rng.sample(range(1, 50), rng.randint(1, 6))
    for folder in ("stock", "ours"):
        for age, step in enumerate(steps):
            (tmp_path / folder / f"checkpoint-{step}").mkdir(parents=True)
            os.utime(tmp_path / folder / f"checkpoint-{step}", (age * 10, age * 10))
    best = rng.choice([None, *steps])
    limit = rng.choice([None, 0, 1, 2, 3])
    names = [None if best is None else str(tmp_path / folder / f"checkpoint-{best}") for folder in ("stock", "ours")]
    rotate_checkpoints(str(tmp_path / "stock"), limit, names[0], use_mtime=True)
    gone = {Path(p).name for p in surplus(tmp_path / "ours", limit, SimpleNamespace(best_model_checkpoint=names[1]))}
    kept = {path.name for path in (tmp_path / "stock").iterdir()}
    assert kept == {f"checkpoint-{step}" for step in steps} - gone


def test_the_files_of_others_are_left_alone(folders: Folders, tmp_path: Path) -> None:
    """They have names like ours; and a run of another folder, which shares the private one, was killed at its start."""
    others = [folders.out / UNFINISHED / "notes.txt", folders.out / "privacy" / ".plan.txt.0123abcd.tmp",
              folders.keys / "ffff.key", folders.keys / "runs" / ("f" * 16) / f"{'f' * 16}.key",
              folders.keys / "runs" / ("f" * 16) / ".log.jsonl.0123abcd.tmp"]  # fmt: skip
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"32 bytes of another program ...." if path.suffix == ".key" else b"of somebody else")
        path.chmod(0o600)
        path.parent.chmod(0o700)
    mine = {*folders.keys.rglob("*.key")}
    other = Folders(tmp_path / "other")
    faults.kill_at_new_key(other, private_state_dir=str(folders.keys))
    theirs = {*folders.keys.rglob("*.key")} - mine
    faults.trainer(folders).train(resume_from_checkpoint=True)
    assert all(path.exists() for path in others)
    assert len(theirs) == 1 and next(iter(theirs)).exists()
