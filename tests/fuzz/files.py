"""Files of a run that were damaged before it is resumed or read."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import TrainerCallback

from tests import tiny
from tests.fuzz.outcome import Case, quiet

STEPS, STOPPED = 6, 3  # planned and taken by the run that is damaged; it has a checkpoint at each
WAYS = (
    "deleted", "emptied", "cut in half", "zeros", "random bytes", "{", "{}", "[]", "null", "5", '"text"', "NaN",
    "a folder", "unreadable text", "a field less", "a field of another type", "last byte changed", "a line twice",
    "a link to itself",
)  # fmt: skip
RESUMES: tuple[Any, ...] = (
    True, True, True, "checkpoint-3", "checkpoint-3", "checkpoint-2", "checkpoint-1", "missing", "", 5, ["x"], ".", False,
)  # fmt: skip


class Stop(TrainerCallback):
    """Ends a run after some steps."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = state.global_step >= self.steps
        return control


@dataclasses.dataclass(frozen=True)
class Damage:
    """A file of the finished run, by its number among all, and what is done to it."""

    number: int
    way: str

    def apply(self, folder: Path) -> None:
        """Copy the run into the folder, and damage it there."""
        shutil.copytree(template(), folder, dirs_exist_ok=True, symlinks=True)
        spoil(self.file(folder), self.way)

    def file(self, folder: Path) -> Path:
        """The file that is damaged."""
        names = sorted(path.relative_to(template()) for path in template().rglob("*") if path.is_file())
        return folder / names[self.number % len(names)]

    def __str__(self) -> str:
        names = sorted(str(path.relative_to(template())) for path in template().rglob("*") if path.is_file())
        return f"{_without_ids(names[self.number % len(names)])} {self.way}"


def _without_ids(name: str) -> str:
    return re.sub(r"[0-9a-f]{16,}", "ID", name)


@functools.cache
def template() -> Path:
    """Folder with a run of three steps: `out` and its keys."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz_run_"))
    with quiet(io.StringIO()):
        make(folder, callbacks=[Stop(STOPPED)]).train()
    return folder


def make(folder: Path, **changes: Any) -> Any:
    """The trainer of that run, in another folder."""
    given = dict(
        max_steps=STEPS, save_strategy="steps", save_steps=1, private_state_dir=str(folder / "keys"),
        noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.5}, sampling="fixed_order", filter="momentum",
    )  # fmt: skip
    return tiny.trainer(folder / "out", **given | changes)


def spoil(path: Path, way: str) -> None:
    """Damage one file."""
    content, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    match way:
        case "deleted":
            return
        case "a folder":
            path.mkdir()
            return
        case "a link to itself":
            path.symlink_to(path.name)
            return
        case "emptied":
            content = b""
        case "cut in half":
            content = content[: len(content) // 2]
        case "zeros":
            content = bytes(len(content))
        case "random bytes":
            content = bytes((i * 97 + 13) % 256 for i in range(max(64, min(len(content), 4096))))
        case "unreadable text":
            content = b"\xff\xfe" + content
        case "last byte changed":
            content = content[:-2] + bytes([(content[-2] + 1) % 256]) + content[-1:] if len(content) > 1 else b"x"
        case "a line twice":
            content += content.splitlines(keepends=True)[-1] if content else b"x"
        case "a field less" | "a field of another type":
            content = _without_a_field(content, retyped=way.endswith("type"))
        case _:
            content = way.encode()
    path.write_bytes(content)
    path.chmod(mode)


def _without_a_field(content: bytes, *, retyped: bool) -> bytes:
    lines = content.decode("utf-8", errors="replace").splitlines() or [""]
    for number, text in enumerate((*lines, "\n".join(lines))):
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if isinstance(record, dict) and record:
            name = sorted(record)[len(record) // 2]
            if retyped:
                record[name] = [record[name], None]
            else:
                del record[name]
            if number == len(lines):
                return json.dumps(record).encode()
            lines[number] = json.dumps(record, sort_keys=True, separators=(",", ":"))
            return ("\n".join(lines) + "\n").encode()
    return content + b"\x00"


def damages() -> st.SearchStrategy[Damage]:
    """Any file, any damage."""
    template()
    return st.builds(Damage, st.integers(0, 200), st.sampled_from(WAYS))


def any_case() -> st.SearchStrategy[Case]:
    """A run whose files were damaged is resumed, or begun once more."""

    def case(damage: Damage, resume: Any) -> Case:
        def run(folder: Path) -> None:
            where = str(folder / "out" / resume) if isinstance(resume, str) and resume else resume
            trainer = make(folder, callbacks=[Stop(STOPPED + 1)])
            trainer.train(resume_from_checkpoint=where)

        return Case("files", f"{damage}, resume_from_checkpoint={resume!r}", run, damage.apply)

    return st.builds(case, damages(), st.sampled_from(RESUMES))
