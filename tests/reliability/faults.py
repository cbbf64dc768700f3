"""What can be done to the folders of a run, and what the next run, or the one that is going on, makes of it.

    python -m tests.reliability.faults      inflicts each fault and writes the table of docs/reliability.md

A run of six steps is stopped at the fourth, with checkpoints at the second and the fourth; its folders are copied, the
fault is inflicted on the copy, and the run is resumed. `tests.reliability.test_faults` does the same, case by case, and
compares what was seen with the page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from hf_dpopt import DPConfigError
from hf_dpopt.common import log
from tests.helpers import run_files, tiny
from tests.helpers.run_files import LEDGER, UNFINISHED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: python -m tests.reliability.faults -->", "<!-- end of faults -->"
NUM_STEPS, STOPPED_AT, SAVE_STEPS = 6, 4, 2

Outcome = Literal["refused", "same", "older", "fresh"]
RESULTS = {
    "refused": "nothing more runs or is charged",
    "same": "goes on; final weights equal to the last bit",
    "older": "goes on from the checkpoint before, with a fresh key; the steps after it are charged again",
    "fresh": "goes on with a fresh key",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and what is expected of the run that meets it.

    Attributes:
        name: in test ids.
        done: description for the page.
        inflict: does it to the folders; may return a context that lasts while the run is resumed.
        outcome: key of `RESULTS`.
        says: pattern in what the user sees.
        asked: ``resume_from_checkpoint``; a name is one of the run's checkpoints.
        is_during: inflicted while the resumed run is before its sixth step.
        changes: options of the resumed run.
    """

    name: str
    done: str
    inflict: Callable[[Folders], Any]
    outcome: Outcome
    says: str = ""
    asked: str | bool = True
    is_during: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Folders:
    """The folders of one run."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def last(self) -> Path:
        return self.out / f"checkpoint-{STOPPED_AT}"

    @property
    def ledger(self) -> Path:
        return self.out / LEDGER

    @property
    def lock(self) -> Path:
        return Path(f"{self.ledger}.lock")

    @property
    def victim(self) -> Path:
        return self.root / "victim.txt"

    def key(self, suffix: str) -> Path:
        (path,) = self.keys.glob(f"runs/*/*{suffix}")
        return path


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _half_saved(folders: Folders) -> None:
    shutil.copytree(folders.last, folders.out / UNFINISHED / "checkpoint-6")
    (folders.out / UNFINISHED / "checkpoint-6" / "optimizer.pt").unlink()


def _save_not_renamed(folders: Folders) -> None:
    (folders.out / UNFINISHED).mkdir()
    folders.last.rename(folders.out / UNFINISHED / folders.last.name)


def _temporary_files(folders: Folders) -> None:
    kill_at_new_key(folders)
    (folders.ledger.parent / ".report.json.0123abcd.tmp").write_text("half")


OPERATIONS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "write", "fsync")


@contextlib.contextmanager
def watched(see: Callable[[str, Path], Any]) -> Iterator[None]:
    """Call a function before each operation on a file, with its name in `os` and the path: what is renamed, its new one."""

    def seen(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            place = args[1] if name in ("rename", "replace") else args[0]
            see(name, Path(os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fsdecode(place)))
            return operation(*args, **kwargs)

        return inner

    with contextlib.ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(os, name, seen(name, getattr(os, name))))
        yield


def killed(run: Callable[[], Any], at: Callable[[str, Path], bool]) -> None:
    """Run something in a process that dies without a trace before the operation that `at` picks, see `watched`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with watched(lambda name, path: os._exit(9) if at(name, path) else None):
                run()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "it was not killed"


def kill_at_new_key(folders: Folders, **changes: Any) -> None:
    """Kill a run that starts over when it has made its key, and before the log knows it."""
    keys = Path(changes.get("private_state_dir", folders.keys))
    before = {*keys.rglob("*.key")}

    def is_made(name: str, path: Path) -> bool:
        return name == "write" and path.name == "log.jsonl" and {*keys.rglob("*.key")} > before

    killed(lambda: trainer(folders, **changes).train(), is_made)


def _edit_log(folders: Folders) -> None:
    log = folders.key("log.jsonl")
    log.write_text(log.read_text().replace('"step":2', '"step":9'))


def _link(path: Path, folders: Folders, link: Callable[[Path, Path], None] = os.symlink) -> None:
    folders.victim.write_text("of somebody else")
    path.unlink(missing_ok=True)
    link(folders.victim, path)


@contextlib.contextmanager
def _second_writer(folders: Folders) -> Iterator[None]:
    """A run that goes on in this folder, whose lock somebody deletes."""
    with run_files.in_use(next(folders.keys.glob("runs/*/lock"))):
        folders.lock.unlink()
        yield


def _replace_with_copy(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@contextlib.contextmanager
def filesystem(folder: Path, *, lacks: str) -> Iterator[None]:
    """Let everything below a folder lie on a filesystem that lacks an operation.

    Args:
        lacks: ``locks``, ``fsync of folders`` or ``renaming of folders``.
    """
    real = {"flock": fcntl.flock, "fsync": os.fsync, "rename": os.rename}

    def is_there(descriptor: int) -> bool:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder)

    def flock(descriptor: int, operation: int) -> None:
        if lacks == "locks" and is_there(descriptor):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real["flock"](descriptor, operation)

    def fsync(descriptor: int) -> None:
        if lacks == "fsync of folders" and is_there(descriptor) and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real["fsync"](descriptor)

    def rename(source: Any, target: Any) -> None:
        if lacks == "renaming of folders" and Path(source).is_dir() and Path(source).is_relative_to(folder):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real["rename"](source, target)

    log._told.clear()
    with (
        mock.patch("fcntl.flock", flock),
        mock.patch("os.fsync", fsync),
        mock.patch("os.rename", rename),
    ):
        yield


LAST = f"checkpoint-{STOPPED_AT}"
FAULTS = (
    # --- a checkpoint ---
    Fault("torn weights", "`model.safetensors` of the last checkpoint cut to half",
          lambda f: os.truncate(f.last / "model.safetensors", 1000), "older", "is skipped: model.safetensors is not"),
    Fault("flipped weights", "one bit of `model.safetensors` flipped, the checkpoint named",
          lambda f: flip(f.last / "model.safetensors"), "refused", "resume_from_checkpoint=True takes", LAST),
    Fault("flipped optimizer", "one bit of `optimizer.pt` flipped",
          lambda f: flip(f.last / "optimizer.pt"), "refused", "optimizer.pt is not what was saved", LAST),
    Fault("missing optimizer", "`optimizer.pt` deleted",
          lambda f: (f.last / "optimizer.pt").unlink(), "refused", "it has no optimizer.pt", LAST),
    Fault("flipped scheduler", "one bit of `scheduler.pt` flipped",
          lambda f: flip(f.last / "scheduler.pt"), "refused", "scheduler.pt is not what was saved", LAST),
    Fault("flipped filter", "one bit of `released_state.pt` (filters, preconditioner) flipped",
          lambda f: flip(f.last / "released_state.pt"), "refused", "released_state.pt is not what was saved", LAST),
    Fault("edited state", "`global_step` of `trainer_state.json` edited",
          lambda f: edit(f.last / "trainer_state.json", lambda s: s.update(global_step=2)), "refused",
          "trainer_state.json is not what was saved", LAST),
    Fault("added adapter", "a file put in that a resume would read",
          lambda f: (f.last / "adapter_model.bin").write_bytes(b"weights"), "refused", "was put in after", LAST),
    Fault("no manifest", "`privacy_ledger.json` deleted",
          lambda f: (f.last / "privacy_ledger.json").unlink(), "older", "it has no privacy_ledger.json"),
    Fault("torn manifest", "`privacy_ledger.json` cut to half",
          lambda f: os.truncate(f.last / "privacy_ledger.json", 100), "older", "privacy_ledger.json is damaged"),
    Fault("manifest without files", "the list of files taken out of `privacy_ledger.json`",
          lambda f: edit(f.last / "privacy_ledger.json", lambda m: m.pop("files")),
          "refused", "its privacy_ledger.json is damaged", LAST),
    Fault("all torn", "every `model.safetensors` deleted",
          lambda f: [p.unlink() for p in f.out.glob("checkpoint-*/model.safetensors")], "refused",
          "no whole checkpoint in .*, and no journal that leads"),
    Fault("no such checkpoint", "a checkpoint named that is not there",
          lambda f: None, "refused", "there is no such folder.*resume_from_checkpoint=True takes", "checkpoint-5"),
    Fault("half a folder", "a `checkpoint-6` with a `config.json` alone",
          lambda f: shutil.copytree(f.last, f.out / "checkpoint-6", ignore=lambda d, names: {*names} - {"config.json"}),
          "same", "checkpoint-6 is skipped: .*or only in part"),
    # --- what a kill leaves ---
    Fault("half a save", "killed in the middle of a save", _half_saved, "same", "removed checkpoint-6"),
    Fault("save not renamed", "killed before the last step of a save, the renaming",
          _save_not_renamed, "same", "finished checkpoint-4"),
    Fault("temporary files", "killed while it wrote the report, and a key that was never used",
          _temporary_files, "same", "removed .report.json.*"),
    # --- private folder ---
    Fault("other order", "the records in another order", lambda f: None, "refused", "training records are not those",
          True, False, {"train_dataset": tiny.records()[::-1]}),
    Fault("edited log", "the number of a step edited in the log", _edit_log, "refused", "log.jsonl, line 6: it was ed"),
    Fault("log gone", "the log deleted, the key kept", lambda f: f.key("log.jsonl").unlink(), "fresh",
          "There is no log of run"),
    Fault("keys gone", "the private folder deleted", lambda f: shutil.rmtree(f.keys), "fresh",
          "There is no log of run"),
    # --- ledger ---
    Fault("ledger gone", "the ledger deleted", lambda f: f.ledger.unlink(), "same"),
    Fault("ledger and keys gone", "the ledger and the private folder deleted",
          lambda f: (f.ledger.unlink(), shutil.rmtree(f.keys)), "refused", "so what its weights cost is unknown"),
    # --- while the run is going on ---
    Fault("ledger deleted", "the ledger deleted while the run is going on",
          lambda f: f.ledger.unlink(), "refused", "deleted, replaced or changed while", True, True),
    Fault("ledger replaced", "the ledger replaced by a copy while the run is going on",
          lambda f: _replace_with_copy(f.ledger), "refused", "deleted, replaced or changed while", True, True),
    Fault("ledger written to", "a line added to the ledger while the run is going on",
          lambda f: f.ledger.open("a").write("{}\n"), "refused", "deleted, replaced or changed while", True, True),
    Fault("output_dir deleted", "`output_dir` deleted while the run is going on",
          lambda f: shutil.rmtree(f.out), "refused", "deleted, replaced or changed while", True, True),
    Fault("private folder deleted", "the private folder deleted while the run is going on",
          lambda f: shutil.rmtree(f.keys), "refused", "deleted, replaced or changed while", True, True),
    Fault("log replaced", "the log replaced by a copy while the run is going on",
          lambda f: _replace_with_copy(f.key("log.jsonl")), "refused", "deleted, replaced or changed while", True, True),
    Fault("second writer", "the lock deleted while a run is going on, a second one started",
          _second_writer, "refused", "The keys of .* are in use by process"),
    # --- links ---
    Fault("link at the lock", "the lock replaced by a link to another file",
          lambda f: _link(f.lock, f), "refused", "lock is a link"),
    Fault("hard link at the lock", "the lock replaced by a second name of another file",
          lambda f: _link(f.lock, f, os.link), "refused", "not a file of its own"),
    Fault("link at the ledger", "the ledger replaced by a link to a copy",
          lambda f: (shutil.move(f.ledger, f.root / "copy"), f.ledger.symlink_to(f.root / "copy")), "same"),
    # --- filesystems ---
    Fault("output without locks", "`output_dir` on a filesystem without locks",
          lambda f: filesystem(f.out, lacks="locks"), "same", "Start one run at a time"),
    Fault("keys without locks", "the private folder on a filesystem without locks",
          lambda f: filesystem(f.keys, lacks="locks"), "refused", "--private_state_dir a folder on a local disk"),
    Fault("output without fsync", "`output_dir` on a filesystem that cannot fsync folders",
          lambda f: filesystem(f.out, lacks="fsync of folders"), "same", "keep private_state_dir on a local disk"),
    Fault("keys without fsync", "the private folder on a filesystem that cannot fsync folders",
          lambda f: filesystem(f.keys, lacks="fsync of folders"), "refused", "--private_state_dir a folder on a local"),
    Fault("output without renames", "`output_dir` on a filesystem that cannot rename folders (object stores)",
          lambda f: filesystem(f.out, lacks="renaming of folders"), "refused", "Use an output_dir on a local disk"),
)  # fmt: skip


def trainer(folders: Folders, **changes: Any) -> Any:
    """The run, with state in every place: correlated noise, a digest of the records, a filter, an optimizer."""
    options: dict[str, Any] = dict(
        max_steps=NUM_STEPS, save_strategy="steps", save_steps=SAVE_STEPS, private_state_dir=str(folders.keys),
        noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.1}, filter="first_order_v1", optim="sgd",
        model=tiny.model(dropout=0.0), learning_rate=1e-2,
    )  # fmt: skip
    return tiny.trainer(folders.out, **options | changes)


def before_the_end(do: Callable[[], Any]) -> tiny.At:
    return tiny.At("step_begin", lambda state, model: do(), NUM_STEPS)


def stopped_run(root: Path) -> Folders:
    """A run that was stopped between two checkpoints of six steps."""
    folders = Folders(root)
    trainer(folders, callbacks=[tiny.StopAt(STOPPED_AT)]).train()
    return folders


@dataclasses.dataclass(frozen=True)
class Seen:
    """What came of a resume."""

    error: str
    lines: tuple[str, ...]  # of the log, those that only this resume had first
    weights: dict[str, torch.Tensor]
    charged: tuple[int, ...]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        is_told = record.levelno >= logging.WARNING or record.getMessage().startswith("A run was killed")
        if is_told and not record.getMessage().startswith(
            ("The start-up self-check", "This run is expected to learn little", "nu_dpftrl noise leaves")
        ):
            self.lines.append(record.getMessage())


def resume(folders: Folders, fault: Fault | None) -> Seen:
    """Inflict a fault and resume."""
    changes, context = {}, contextlib.nullcontext()
    if fault is not None:
        changes = dict(fault.changes)
        if fault.is_during:
            changes["callbacks"] = [before_the_end(lambda: fault.inflict(folders))]
        elif isinstance(given := fault.inflict(folders), contextlib._GeneratorContextManager):
            context = given
    asked: Any = True if fault is None else fault.asked
    lines, error, weights = _Lines(), "", dict[str, torch.Tensor]()
    log = logging.getLogger("hf_dpopt")
    log.addHandler(lines)
    try:
        made = trainer(folders, **changes)
        with context:
            made.train(resume_from_checkpoint=str(folders.out / asked) if isinstance(asked, str) else asked)
        weights = tiny.weights(made.model)
    except DPConfigError as refused:
        error = str(refused)
    finally:
        log.removeHandler(lines)
    return Seen(error, tuple(lines.lines), weights, run_files.charged(folders.out))


def told(seen: Seen, folders: Folders) -> str:
    """What the user sees, without what differs from machine to machine."""
    text = " ".join((*seen.lines, seen.error)).strip().replace(f"{folders.root}/", "")
    for pattern, name in (
        (r"\b[0-9a-f]{64}\b", "DIGEST"), (r"\b[0-9a-f]{16}\b", "ID"), (r"\.[0-9a-f]{8}\.tmp", ".XXXXXXXX.tmp"),
        (r"process \d+", "process PID"),
    ):  # fmt: skip
        text = re.sub(pattern, name, text)
    return text.replace("|", "\\|")


def rows() -> Iterator[tuple[Fault, str]]:
    """Inflict every fault; what was seen of each."""
    with tempfile.TemporaryDirectory() as temporary:
        stopped = stopped_run(Path(temporary).resolve() / "stopped")
        for number, fault in enumerate(FAULTS):
            folders = Folders(Path(temporary).resolve() / str(number))
            shutil.copytree(stopped.root, folders.root)
            yield fault, told(resume(folders, fault), folders)


def recorded() -> dict[str, str]:
    """What the page says was seen, by what was done."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    cells = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")][1:]
    return {cell[0]: cell[1] for cell in cells}


def main() -> int:
    """Write the table into the page."""
    lines = ["| done to it | what the user saw | what came of it |", "|---|---|---|"]
    lines += [f"| {fault.done} | {saw or '(nothing)'} | {RESULTS[fault.outcome]} |" for fault, saw in rows()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
