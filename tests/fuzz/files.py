"""Files of a run that were damaged before it is resumed or read."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests import tiny
from tests.fuzz.outcome import Case, quiet

STEPS, STOPPED = 6, 3  # planned and taken by the run that is damaged; it has a checkpoint at each
DEEP = 100_000  # brackets, more than a reader of JSON can follow
WAYS = (
    "deleted", "emptied", "cut in half", "zeros", "random bytes", "{", "{}", "[]", "null", "5", '"text"', "NaN",
    "a folder", "unreadable text", "a field less", "a field of another type", "last byte changed", "a line twice",
    "a link to itself", "a link to a folder", "brackets",
)  # fmt: skip
RESUMES: tuple[Any, ...] = (
    True, True, True, "checkpoint-3", "checkpoint-3", "checkpoint-2", "checkpoint-1", "missing", "", 5, ["x"], ".", False,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Damage:
    """A file of a run, by its number among all, and what is done to it.

    Attributes:
        kind: name of the run in `RUNS`.
        number: of the file, modulo how many there are.
        way: one of `WAYS`.
    """

    kind: str
    number: int
    way: str

    def apply(self, folder: Path) -> None:
        """Copy the run into the folder, and damage it there."""
        shutil.copytree(template(self.kind), folder, dirs_exist_ok=True, symlinks=True)
        spoil(self.file(folder), self.way)

    def file(self, folder: Path) -> Path:
        """The file that is damaged."""
        return folder / self._name

    @property
    def _name(self) -> str:
        names = names_of(self.kind)
        return names[self.number % len(names)]

    def __str__(self) -> str:
        return f"{self.kind}: {_without_ids(self._name)} {self.way}"


def _without_ids(name: str) -> str:
    return re.sub(r"[0-9a-f]{16,}", "ID", name)


def names_of(kind: str) -> list[str]:
    """Names of all files of a run, in the order of their names without ids, which are drawn anew every time."""
    made = template(kind)
    names = [path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()]
    return sorted(names, key=lambda name: (_without_ids(name), name))


@functools.cache
def template(kind: str) -> Path:
    """Folder with a run: `out` and its `keys`."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz_run_"))
    with quiet(io.StringIO()):
        BEGUN[kind](folder)
    return folder


# --- the runs: how they began, and how they are gone on with ---


def make(folder: Path, **changes: Any) -> Any:
    """A trainer of records with checkpoints and a filter, in any folder."""
    given = dict(
        max_steps=STEPS, save_strategy="steps", save_steps=1, private_state_dir=str(folder / "keys"),
        noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.5}, sampling="fixed_order", filter="momentum",
    )  # fmt: skip
    return tiny.trainer(folder / "out", **given | changes)


def make_of_users(folder: Path, **changes: Any) -> Any:
    """A trainer of users, whose index is kept beside the keys."""
    import datasets

    rows = [{**row, "who": f"u{number % 8}"} for number, row in enumerate(tiny.records())]
    given = dict(
        max_steps=STEPS, save_strategy="steps", save_steps=STOPPED, private_state_dir=str(folder / "keys"),
        privacy_unit="user", user_id_column="who", records_per_user=3, expected_batch_size=3, sampling="poisson",
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip
    return tiny.trainer(folder / "out", **given | changes)


BEGUN: dict[str, Callable[[Path], Any]] = {  # what a folder holds -> how it came to be
    "run": lambda folder: make(folder, callbacks=[tiny.StopAt(STOPPED)]).train(),
    "run of users": lambda folder: make_of_users(folder, callbacks=[tiny.StopAt(STOPPED)]).train(),
}


def go_on(kind: str, folder: Path, resume: Any) -> None:
    """Go on with a run, or begin it once more, for a step more."""
    where = str(folder / "out" / resume) if isinstance(resume, str) and resume else resume
    make_again = {"run": make, "run of users": make_of_users}[kind]
    make_again(folder, callbacks=[tiny.StopAt(STOPPED + 1)]).train(resume_from_checkpoint=where)


# --- damages ---


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
        case "a link to a folder":
            path.symlink_to(path.parent)
            return
        case "emptied":
            content = b""
        case "cut in half":
            content = content[: len(content) // 2]
        case "zeros":
            content = bytes(len(content))
        case "brackets":
            content = b"[" * DEEP
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


def damages(kinds: Sequence[str] = tuple(BEGUN)) -> st.SearchStrategy[Damage]:
    """Any file of these runs, any damage."""
    return st.builds(Damage, st.sampled_from(kinds), st.integers(0, 200), st.sampled_from(WAYS))


def any_case() -> st.SearchStrategy[Case]:
    """A run of a trainer whose files were damaged is resumed, or begun once more."""

    def case(damage: Damage, resume: Any) -> Case:
        what = f"{damage}, resume_from_checkpoint={resume!r}"
        return Case("files", what, lambda folder: go_on(damage.kind, folder, resume), damage.apply)

    return st.builds(case, damages(("run", "run", "run of users")), st.sampled_from(RESUMES))
