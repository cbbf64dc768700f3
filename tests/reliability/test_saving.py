"""A save that is killed at any moment leaves a whole checkpoint at each place, and nothing that the next run keeps."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from hf_dpopt.common import durable
from hf_dpopt.huggingface.checkpoints import surplus
from hf_dpopt.run import checkpoint
from hf_dpopt.run.cleaning import UNFINISHED, clean, leftovers
from hf_dpopt.run.keys import PrivateState, continue_or_branch
from hf_dpopt.run.ledger import GENESIS, LEDGER, Ledger
from hf_dpopt.run.seal import Seal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
OPERATIONS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Saver:
    """A ledger, its keys, and saves of two small files each."""

    def __init__(self, folder: Path):
        self.out = folder / "out"
        self.out.mkdir(exist_ok=True)
        self.ledger = Ledger.open(self.out / LEDGER)
        self.state = PrivateState(folder / "keys", forbidden=self.out)
        self.memory = self.state.memory(self.ledger)
        if not self.ledger.chains:
            chain = continue_or_branch(self.ledger, self.state, None)
            self.ledger.charge(chain.chain_id, 1)
        self.memory.lock()
        self.seal = Seal.load_or_make(self.memory.folder, GENESIS)

    def save(self, step: int, content: str) -> None:
        made = self.out / UNFINISHED / f"checkpoint-{step}"
        made.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.pt"):
            (made / name).write_text(f"{content} {name}")
        checkpoint.write_mark(made, checkpoint.Standing(self.ledger.digest(), self.seal))
        durable.move_into_place(made, self.out / made.name)
        durable.remove_folder(self.out / "checkpoint-1", made.parent)

    def content(self, step: int) -> str:
        found = checkpoint.examine(self.out / f"checkpoint-{step}", self.ledger, self.seal)
        assert found.is_whole, found.reasons
        return (found.folder / "optimizer.pt").read_text().split()[0]

    def close(self) -> None:
        self.memory.close()
        self.ledger.close()


def _killed_at(operation: int, run: Callable[[], None]) -> bool:
    """Whether a child that dies without a trace before that many calls to the filesystem got as far."""
    child = os.fork()
    if child == 0:
        left = [operation]

        def counted(call: Callable) -> Callable:
            def inner(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return inner

        try:
            for name in OPERATIONS:
                setattr(os, name, counted(getattr(os, name)))
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_save_that_is_killed_before_any_call_leaves_whole_checkpoints(tmp_path):
    """Step 2 is saved a second time, as after a resume from before it, and step 1 is deleted, as by a limit."""
    (tmp_path / "start").mkdir()
    saver = Saver(tmp_path / "start")
    saver.save(1, "one")
    saver.save(2, "old")
    (saver.out / UNFINISHED).rmdir()
    shutil.copytree(saver.out / "checkpoint-2", saver.out / "checkpoint-1")
    saver.close()
    seen, operation = set[str](), 0
    while True:
        folder = tmp_path / str(operation)
        shutil.copytree(tmp_path / "start", folder)

        def save(folder: Path = folder) -> None:
            saver = Saver(folder)
            saver.save(2, "new")

        was_killed = _killed_at(operation, save)
        last = get_last_checkpoint(str(folder / "out"))  # what a stock script would be handed
        saver = Saver(folder)
        assert last is None or checkpoint.examine(Path(last), saver.ledger, saver.seal).is_whole
        clean(saver.out, saver.ledger, saver.state)
        seen.add(saver.content(2))
        assert not (saver.out / UNFINISHED).exists() and not leftovers(saver.out, saver.ledger, saver.state)
        assert {path.name for path in saver.out.iterdir()} <= {"privacy", "checkpoint-1", "checkpoint-2"}
        if (saver.out / "checkpoint-1").exists():
            assert saver.content(1)
        saver.close()
        if not was_killed:
            break
        shutil.rmtree(folder)
        operation += 1
    assert seen == {"old", "new"} and operation > 20


def test_a_checkpoint_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    saver, order = Saver(tmp_path), list[str]()
    sync, rename = os.fsync, os.rename

    def fsync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(saver.out).as_posix())
        sync(descriptor)

    def renamed(source, target):
        order.append(f"-> {Path(target).relative_to(saver.out)}")
        rename(source, target)

    made = saver.out / UNFINISHED / "checkpoint-1"
    (made / "adapter").mkdir(parents=True)
    for name in ("model.safetensors", "adapter/weights.bin", checkpoint.MARK):
        (made / name).write_text(name)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    durable.move_into_place(made, saver.out / "checkpoint-1")
    monkeypatch.undo()
    inside = {f"{UNFINISHED}/checkpoint-1/{name}".rstrip("/") for name in
              ("", "adapter", "model.safetensors", "adapter/weights.bin", checkpoint.MARK)}  # fmt: skip
    at = order.index("-> checkpoint-1")
    assert set(order[:at]) == inside and order[at + 1] == "."
    saver.close()


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


def test_what_is_not_ours_is_left_alone(tmp_path):
    saver = Saver(tmp_path)
    others = [saver.out / UNFINISHED / "notes.txt", saver.out / "privacy" / ".plan.txt.0123abcd.tmp",
              saver.state.directory / "chains" / "ffff.key", saver.state.directory / "chains" / ".ffff.key.0123abcd.tmp",
              saver.state.directory / "used" / "ffff" / ".ffff.mark.0123abcd.tmp"]  # fmt: skip
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"of somebody else")
    foreign = saver.state.new_chain(tmp_path / "other" / "ledger.jsonl")  # a run on another ledger is starting
    clean(saver.out, saver.ledger, saver.state)
    assert all(path.exists() for path in others)
    assert saver.state.load_chain(foreign.chain_id) is not None
    saver.close()


def test_a_key_that_was_never_used_goes_and_one_that_was_stays(tmp_path):
    """The second was recorded in a ledger that was put back to before: its mark says that steps ran under it."""
    saver = Saver(tmp_path)
    unused = saver.state.new_chain(saver.ledger.path)
    used = saver.state.new_chain(saver.ledger.path)
    (saver.state.directory / "used" / "other").mkdir()
    (saver.state.directory / "used" / "other" / f"{used.chain_id}.mark").touch()
    first = saver.ledger.chains[0].chain_id
    half = saver.state.directory / "chains" / f".{first}.noise.0123abcd.tmp"
    half.write_bytes(b"half")
    clean(saver.out, saver.ledger, saver.state)
    left = {path.name for path in (saver.state.directory / "chains").glob("*.key")}
    assert left == {f"{first}.key", f"{used.chain_id}.key"} and not half.exists()
    assert not list((saver.state.directory / "chains").glob(f"*{unused.chain_id}*"))
    saver.close()
