"""A disk that is full, read-only or failing ends a run in one line; what was charged is right, and the run resumes."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.modeling_utils
from safetensors import SafetensorError

from hf_dpopt import DPStorageError
from hf_dpopt.cli import app
from tests.helpers import run_files, tiny
from tests.reliability import faults
from tests.reliability.faults import Folders, Seen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

NUMBERS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "failing": errno.EIO}
WRITES = os.O_WRONLY | os.O_RDWR


@contextlib.contextmanager
def broken(root: Path, pattern: str, kind: str) -> Iterator[list[Path]]:
    """Let files below a folder, by their path from there, lie on a disk that is full, read-only or failing.

    Yields the files that were met. What safetensors and torch write meets the limit of the size of a file, where the
    disk is full: their errors are real ones.
    """
    met: list[Path] = []

    def fails(place: Any) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fsdecode(place))
        is_met = path.is_relative_to(root) and re.search(pattern, str(path.relative_to(root))) is not None
        if is_met:
            met.append(path)
        return is_met

    def error(path: Any = None) -> OSError:
        names = () if path is None else (str(path),)
        return OSError(NUMBERS[kind], os.strerror(NUMBERS[kind]), *names)

    def instead(name: str) -> Callable[..., Any]:
        whole = getattr(os, name)

        def inner(first: Any, *rest: Any, **named: Any) -> Any:
            place = rest[0] if name in ("rename", "replace") else first
            if name == "open" and not (rest and rest[0] & WRITES):
                return whole(first, *rest, **named)
            if (name != "open" or kind == "read-only" or rest[0] & os.O_CREAT) and fails(place):
                raise error(None if isinstance(place, int) else place)
            return whole(first, *rest, **named)

        return inner

    def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not isinstance(file, int) and {*mode} & {*"wax+"} and fails(file):
            if kind != "full":
                raise error(file)
            made = whole_open(file, mode, *rest, **named)
            os.dup2(os.open("/dev/full", os.O_WRONLY), made.fileno())  # takes it, and fails when it is flushed
            return made
        return whole_open(file, mode, *rest, **named)

    def saved(save: Callable[..., Any], said: str) -> Callable[..., Any]:
        def inner(what: Any, file: Any, *rest: Any, **named: Any) -> Any:
            if not isinstance(file, (str, os.PathLike)) or not fails(file):
                return save(what, file, *rest, **named)
            if kind != "full":
                raise (SafetensorError if "os error" in said else RuntimeError)(said)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            try:
                return save(what, file, *rest, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        return inner

    whole_open = builtins.open
    number = NUMBERS[kind]
    of_safetensors = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    of_torch = f"[enforce fail at inline_container.cc:747] . open file failed with strerror: {os.strerror(number)}"
    operations = {
        "full": ("open", "write", "pwrite", "mkdir"), "failing": ("write", "pwrite", "fsync", "rename", "replace"),
        "read-only": ("open", "mkdir", "rename", "replace"),
    }[kind]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name in operations:
            stack.enter_context(mock.patch.object(os, name, instead(name)))
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", opened))
        stack.enter_context(mock.patch.object(torch, "save", saved(torch.save, of_torch)))
        save_file = transformers.modeling_utils.safe_save_file
        stack.enter_context(
            mock.patch.object(transformers.modeling_utils, "safe_save_file", saved(save_file, of_safetensors))
        )
        yield met


# Of a run that begins, and of one that is resumed at step 4: files, and what may be charged when they fail.
AT_THE_START = {
    "ledger": r"out/privacy/\.?ledger\.jsonl(\.\w+\.tmp)?$", "lock": r"ledger\.jsonl\.lock$",
    "key": r"keys/runs/\w+/\.\w+\.key", "log": r"keys/runs/\w+/\.?log\.jsonl", "lock of the log": r"keys/runs/\w+/lock$",
    "dataset ledger": r"people\.jsonl", "private folder": r"^keys",
    "output_dir": r"^out",
}  # fmt: skip
ON_THE_WAY = {
    "ledger": r"out/privacy/ledger\.jsonl$", "log": r"keys/runs/\w+/log\.jsonl$", "journal": r"out/_journal",
    "weights": r"checkpoint-6/model\.safetensors", "optimizer": r"checkpoint-6/optimizer\.pt",
    "scheduler": r"checkpoint-6/scheduler\.pt", "filter": r"checkpoint-6/released_state\.pt",
    "arguments": r"checkpoint-6/training_args\.bin", "configuration": r"checkpoint-6/config\.json",
    "state": r"checkpoint-6/trainer_state\.json", "list of files": r"checkpoint-6/\.?privacy_ledger\.json",
    "folder of the save": r"_unfinished_checkpoints", "place of the checkpoint": r"out/checkpoint-6$",
    "report": r"out/privacy/\.?report\.json",
    "statement": r"out/privacy/\.?statement\.md",
}  # fmt: skip


def assert_one_line(error: DPStorageError, kind: str, root: Path, met: list[Path], charged: int) -> None:
    said = str(error)
    assert said.count("\n") == 0 and len(said) < 700
    assert str(root) in said and os.strerror(NUMBERS[kind]) in said or "File too large" in said or "failed" in said, (
        said
    )
    assert any(str(path.parent) in said or path.parent.name in said for path in met), said
    assert ("MB are free" in said) or os.strerror(errno.ENOSPC) not in said, said
    assert (f"{charged} steps are charged" if charged else "Nothing is charged") in said, said
    again = "with --resume_from_checkpoint True" if charged else "again"
    assert said.endswith(f"then run the same command {again}."), said


def meet(made: Callable[[], Any], resume: Any, root: Path, pattern: str, kind: str) -> None:
    """Train with a broken disk, and check what is said."""
    with broken(root, pattern, kind) as met, pytest.raises(DPStorageError) as refused:
        made().train(resume_from_checkpoint=resume)
    charged = sum(run_files.charged(root / "out"))
    known = run_files.charged_in_log(root / "keys")
    assert charged <= known <= charged + 1, "in the log first"
    assert_one_line(refused.value, kind, root, met, known)


def cases(points: dict[str, str], not_met: tuple[tuple[str, str], ...] = ()) -> list[Any]:
    return [
        pytest.param(pattern, kind, id=f"{name}, {kind}", marks=[pytest.mark.slow] * (kind != "full"))
        for name, pattern in points.items()
        for kind in NUMBERS
        if (name, kind) not in not_met
    ]


@pytest.mark.parametrize(
    "pattern, kind", cases(AT_THE_START, (("private folder", "failing"), ("output_dir", "failing")))
)
def test_a_run_that_cannot_begin_charges_nothing(tmp_path: Path, pattern: str, kind: str) -> None:
    folders = Folders(tmp_path)
    ledger = {"privacy_ledger": str(tmp_path / "people.jsonl"), "privacy_ledger_epsilon": 16.0}
    meet(lambda: faults.trainer(folders, **ledger), None, tmp_path, pattern, kind)
    assert sum(run_files.charged(folders.out)) == 0
    made = faults.trainer(folders, **ledger)
    made.train(resume_from_checkpoint=True)
    steps = [number for number in run_files.charged(folders.out) if number]  # a key may have charged none
    assert steps == [6] and made.privacy_spent().epsilon == made.plan.epsilon()


@pytest.mark.parametrize("pattern, kind", cases(ON_THE_WAY, (("place of the checkpoint", "full"),)))
def test_a_run_that_meets_a_broken_disk_resumes(folders: Folders, undisturbed: Seen, pattern: str, kind: str) -> None:
    meet(lambda: faults.trainer(folders), True, folders.root, pattern, kind)
    assert len(run_files.charged(folders.out)) == 1, "under one key"
    seen = faults.resume(folders, None)
    assert not seen.error and seen.charged == (6,)
    if not sum(run_files.ledger(folders.out).lost):
        assert all(torch.equal(value, undisturbed.weights[name]) for name, value in seen.weights.items())


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("file", ["model.safetensors", "training_args.bin", "trainer_state.json", "all_results.json"])
def test_saves_of_the_user(tmp_path: Path, file: str, kind: str) -> None:
    made = tiny.trainer(tmp_path / "out", max_steps=1, private_state_dir=str(tmp_path / "keys"))
    made.train()
    with broken(tmp_path, rf"out/{re.escape(file)}", kind) as met, pytest.raises(DPStorageError) as refused:
        made.save_model()
        made.save_state()
        made.save_metrics("train", {"epsilon": 1.0})
    assert_one_line(refused.value, kind, tmp_path, met, 1)
    (tmp_path / "out" / file).unlink(missing_ok=True)  # half of it: the scan of a save would name it
    made.save_model()


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_private_evaluation(tmp_path: Path, kind: str) -> None:
    made = tiny.trainer(
        tmp_path / "out", eval_dataset=tiny.records(100)[64:], eval_data_privacy="private", eval_target_epsilon=2.0,
        eval_times=3,
    )  # fmt: skip
    with (
        broken(tmp_path, r"privacy/\.?ledger\.jsonl(\.\w+\.tmp)?$", kind) as met,
        pytest.raises(DPStorageError) as refused,
    ):
        made.evaluate()
    assert met and str(met[0].parent) in str(refused.value)
    assert made.evaluate()["eval_epsilon"] < 2


def test_the_first_fault_is_told(folders: Folders) -> None:
    """A full disk takes no report, either; what failed first is what the user has to know."""
    with contextlib.ExitStack() as disk, pytest.raises(DPStorageError) as refused:
        full = broken(folders.root, r"checkpoint-6/optimizer|report\.json", "full")
        made = faults.trainer(folders, callbacks=[faults.before_the_end(lambda: disk.enter_context(full))])
        made.train(resume_from_checkpoint=True)
    assert "checkpoint-6" in str(refused.value) and "report.json" not in str(refused.value)


OUTPUTS = [
    ["tune", "--output-dir", "{}", "--epsilon", "8", "--space", "{{}}", "--metric", "loss", "--", "true"],
]  # fmt: skip


@pytest.mark.parametrize("place", ["/proc/x", "/proc/1/nothing/x", "/dev/null/x", "/sys/x"])
@pytest.mark.parametrize("command", OUTPUTS, ids=[command[0] for command in OUTPUTS])
def test_a_command_whose_output_has_no_place_ends_in_one_line(
    command: list[str], place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hf-dpopt", *(word.format(place) for word in command)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("hf-dpopt: ") and os.path.dirname(place) in err, err
