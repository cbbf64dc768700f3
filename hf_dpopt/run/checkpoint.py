"""Checkpoints that are whole: a list of their files with checksums, and what is wrong with one that is not.

The last file that is written into a checkpoint is its manifest, `privacy_ledger.json`: the run, the chain and the step
that its weights come from, size and SHA-256 of each other file. It finds what a kill or a disk tore. Whoever can write
to ``output_dir`` can write another manifest as well: he may spoil the model, and gets no step for less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import is_file_name, move_into_place, open_regular, parse_json, remove, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.run.journal import JOURNAL
from hf_dpopt.run.ledger import LEDGER, Ledger, is_run_id

MANIFEST = "privacy_ledger.json"
FOLDER_NAME = re.compile(r"checkpoint-(\d+)")  # what the Trainer looks for
# Files that a resume reads if they are there: one that was added is as good as one that was replaced.
READ = (
    "model*.safetensors*", "pytorch_model*", "adapter_model*", "adapter_config.json", "*/adapter_*", "optimizer*",
    "scheduler*", "scaler*", "released_state*", "trainer_state.json",
)  # fmt: skip

STATE = "trainer_state.json"  # names the step that the Trainer goes on after
NEEDED = ("optimizer.pt", "scheduler.pt", STATE)  # for the Trainer to go on as the run it was
# In output_dir, while a checkpoint is written or deleted. The Trainer does not take what is in there for a checkpoint,
# and does not push a folder of this name.
UNFINISHED = "_unfinished_checkpoints"
UNPUBLISHED = (JOURNAL, UNFINISHED)  # folders in output_dir that no push takes
_REMOVED = re.compile(r"removed-checkpoint-.+\.[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.(ledger\.jsonl|report\.json|statement\.md)\.[0-9a-f]{8}\.tmp")  # see `write_durably`
_FOREIGN = "it was not written"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Origin of a checkpoint, and its files.

    Attributes:
        run: id of the run that wrote it.
        chain: name of the chain whose steps led to it; empty before the first.
        step: the last of these steps.
        files: name -> size and SHA-256.
    """

    run: str
    chain: str
    step: int
    files: Mapping[str, Mapping[str, Any]]

    @property
    def origin(self) -> str:
        """Chain and step: the weights of two checkpoints with the same ones are the same."""
        return f"{self.chain}:{self.step}"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder and what was found in it.

    Attributes:
        folder: its path.
        reasons: reasons why a run cannot go on from it; none for a whole one.
        manifest: None if there is none that can be read.
    """

    folder: Path
    reasons: tuple[str, ...]
    manifest: Manifest | None

    @property
    def is_whole(self) -> bool:
        """Whether a run may go on from it."""
        return not self.reasons

    @property
    def step(self) -> int:
        """Optimizer step that its name says."""
        return step_of(self.folder)


def step_of(folder: Path) -> int:
    """Optimizer step that the name of a checkpoint says."""
    match = FOLDER_NAME.fullmatch(folder.name)
    return int(match[1]) if match else 0


def write_manifest(folder: Path, run: str, chain: str, step: int) -> None:
    """Finish a checkpoint: list the files that are in it. Only the list is durable yet."""
    files = {name: _entry(folder / name) for name in _files(folder) if name != MANIFEST}
    made = dataclasses.asdict(Manifest(run, chain, step, files))
    write_durably(folder / MANIFEST, (json.dumps(made, indent=1, sort_keys=True) + "\n").encode(), mode=0o644)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if there is none, or it is damaged."""

    def made_of(read: Any) -> Manifest:
        files = {str(name): dict(entry) for name, entry in read["files"].items()}
        return Manifest(read["run"], read["chain"], read["step"], files)

    made = _read_json(folder / MANIFEST, made_of)
    is_one = made is not None and is_run_id(made.run) and isinstance(made.chain, str) and type(made.step) is int
    return made if is_one else None


def examine(folder: Path, ledger: Ledger | None, *, needed: Iterable[str] = (), step: int | None = None) -> Checkpoint:
    """Find out whether a checkpoint is whole, and what it costs is known.

    Args:
        ledger: record of the run; None to look at the files alone.
        step: that of the weights that are wanted; None for any.
        needed: names of files without which there is nothing to go on from.
    """
    if not folder.is_dir():
        return Checkpoint(folder, ("there is no such folder",), None)
    manifest = read_manifest(folder)
    if manifest is None and os.path.lexists(folder / MANIFEST):
        return Checkpoint(folder, (f"its {MANIFEST} is damaged",), None)
    reasons = [*_origin(folder, manifest, ledger), *_differences(folder, manifest, needed)]
    if manifest is not None and step not in (None, manifest.step):
        reasons.append(f"its weights are those of step {manifest.step}, and its {STATE} says {step}")
    return Checkpoint(folder, tuple(reasons), manifest)


def _origin(folder: Path, manifest: Manifest | None, ledger: Ledger | None) -> Iterator[str]:
    """Reasons to think that another run, or none, wrote a checkpoint."""
    where = f" by a run of {ledger.path}" if ledger is not None else ""
    if manifest is None:
        yield f"{_FOREIGN}{where}, or only in part: it has no {MANIFEST}, so what its weights cost is unknown"
        return
    if FOLDER_NAME.fullmatch(folder.name) and manifest.step != step_of(folder):
        yield f"its {MANIFEST} is that of step {manifest.step}"
    if (folder / STATE).is_file() and _read_json(folder / STATE, lambda read: read["global_step"]) != manifest.step:
        yield f"its {STATE} is not that of step {manifest.step}"
    if ledger is not None:
        chain = ledger.chain(manifest.chain)
        if chain is None or not chain.start_step <= manifest.step <= chain.reached:
            yield f"{_FOREIGN}{where}, so what its weights cost is unknown"


def _differences(folder: Path, manifest: Manifest | None, needed: Iterable[str]) -> Iterator[str]:
    """Differences between a folder and the list of its files."""
    there, listed = set(_files(folder)) - {MANIFEST}, {} if manifest is None else manifest.files
    for name in sorted({*listed, *needed} - there):
        yield f"it has no {name}"
    for name in sorted(there):
        path = folder / name
        if not path.is_file():
            yield f"{name} is not a regular file"
        elif name.endswith(".index.json") and not _read_json(path, _names_files):
            yield f"{name} names files outside of its folder"
        elif name in listed and not _is_as_listed(path, listed[name]):
            yield f"{name} is not what was saved"
        elif manifest is not None and name not in listed and any(fnmatch.fnmatch(name, one) for one in READ):
            yield f"{name} was put in after it was saved"


def _is_as_listed(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        return _entry(path) == entry
    except OSError:
        return False


def refuse(found: Checkpoint) -> DPConfigError:
    """Error for a checkpoint that a run cannot go on from."""
    message = (
        f"{found.folder} is no checkpoint to resume from: {'; '.join(found.reasons)}. "
        "resume_from_checkpoint=True takes the last whole one of output_dir, which needs save_only_model=False."
    )
    if any(reason.startswith(_FOREIGN) for reason in found.reasons):
        message += (
            " To start from a model that was trained elsewhere, load it as the initial model (its own privacy cost, "
            "if any, adds up)."
        )
    return DPConfigError(message)


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders that the Trainer takes for checkpoints, newest step first."""
    try:
        names = os.listdir(output_dir)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), name) for name in names if (match := FOLDER_NAME.fullmatch(name))]
    return [output_dir / name for _, name in sorted(found, reverse=True) if (output_dir / name).is_dir()]


def last_whole(output_dir: Path, ledger: Ledger | None) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that a run can go on from, and those after it that it cannot."""
    skipped: list[Checkpoint] = []
    for folder in checkpoints(output_dir):
        found = examine(folder, ledger, needed=NEEDED)
        if found.is_whole:
            return found, skipped
        skipped.append(found)
    return None, skipped


# --- what killed runs left ---


def clean(output_dir: Path, ledger: Ledger) -> None:
    """Remove what killed runs left in a folder, under the locks of a run, and say so; finish whole saves.

    What a person may have to decide on (a torn checkpoint, a lock that leads elsewhere) is left, and
    `hf-dpopt doctor` names it.

    Args:
        output_dir: folder of the run.
        ledger: record of the run.
    """
    done = []
    for path in _entries(output_dir / UNFINISHED):
        is_due = FOLDER_NAME.fullmatch(path.name) and not os.path.lexists(output_dir / path.name)
        if is_due and not path.is_symlink() and examine(path, ledger).is_whole:
            move_into_place(path, output_dir / path.name)  # the run was killed before it renamed it
            done.append(f"finished {path.name}")
    for path in leftovers(output_dir):
        remove(path)
        done.append(f"removed {path.name}")
    with contextlib.suppress(OSError):  # it is not there, a link, or something of another save is left in it
        (output_dir / UNFINISHED).rmdir()
    if done:
        logger.info(f"A run was killed here and left unfinished work: {', '.join(done)}.")


def leftovers(output_dir: Path) -> list[Path]:
    """Files and folders of killed runs that nothing can need any more, or that are whole but for their place."""
    found = [
        path
        for path in _entries(output_dir / UNFINISHED)
        if FOLDER_NAME.fullmatch(path.name) or _REMOVED.fullmatch(path.name)
    ]
    return found + [path for path in _entries((output_dir / LEDGER).parent) if _TEMPORARY.fullmatch(path.name)]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, with forward slashes, and of links to folders."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in files + links)


def _names_files(index: Any) -> bool:
    """Whether an index of weights names files of its own folder alone."""
    return all(map(is_file_name, index["weight_map"].values()))


def _read_json(path: Path, read: Callable[[Any], Any]) -> Any:
    """A part of a JSON file; None if it is not there, or of another form."""
    try:
        with open_regular(path) as file:
            return read(parse_json(file.read()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entry(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "sha256": _sha256(path, status.st_ino, status.st_size, status.st_ctime_ns)}


@functools.lru_cache(maxsize=4096)  # what was just written, or was just checked, is not read a second time
def _sha256(path: Path, inode: int, size: int, changed_ns: int) -> str:
    """SHA-256 of a file; the other arguments tell one state of it from the next, and nobody can set the last one."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
