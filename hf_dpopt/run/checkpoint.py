"""Checkpoints that are whole: a signed list of their files, and what is wrong with one that is not.

The last file that is written into a checkpoint is its mark, `privacy_ledger.json`: the record of the ledger that it
stands at, size and SHA-256 of each other file, and a signature under the `Seal` of the run. Weights, optimizer,
scheduler and filters are released values, so plain digests of them tell nothing new.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import is_file_name, open_regular, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.seal import Seal

MARK = "privacy_ledger.json"
FOLDER_NAME = re.compile(r"checkpoint-(\d+)")  # what the Trainer looks for
# Files that a resume reads if they are there: one that was added is as good as one that was replaced.
READ = (
    "model*.safetensors*", "pytorch_model*", "adapter_model*", "adapter_config.json", "*/adapter_*", "optimizer*",
    "scheduler*", "scaler*", "released_state*", "trainer_state.json",
)  # fmt: skip

NEEDED = ("optimizer.pt", "scheduler.pt", "trainer_state.json")  # for the Trainer to go on as the run it was
_FOREIGN = "it was not written"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder and what was found in it.

    Attributes:
        folder: its path.
        reasons: reasons why a run cannot go on from it; none for a whole one.
        cautions: reasons why it cannot be told whether the files are those that were saved.
        mark: content of its mark; None if there is none that can be read.
    """

    folder: Path
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]
    mark: dict[str, Any] | None

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


@dataclasses.dataclass(frozen=True)
class Standing:
    """Common part of the checkpoints of a step, on the disks of all machines.

    Attributes:
        ledger_digest: digest of the run's ledger, which has charged every step up to this one.
        seal: the run's; secret.
        data_mark: digest of the training records where the run keeps one; it goes in under the key of the seal.
    """

    ledger_digest: str
    seal: Seal
    data_mark: str | None = dataclasses.field(default=None, repr=False)


def write_mark(folder: Path, standing: Standing) -> None:
    """Finish a checkpoint: list the files that are in it and sign the list. Only the list is durable yet."""
    seal, data_mark = standing.seal, standing.data_mark
    mark: dict[str, Any] = {
        "ledger_digest": standing.ledger_digest,
        "files": {name: _entry(folder / name) for name in _files(folder) if name != MARK},
        "data": None if data_mark is None else seal.sign(data_mark.encode(), "data"),
        "key": seal.key_id,
    }
    mark["seal"] = seal.sign(_signed_part(mark), "checkpoint")
    write_durably(folder / MARK, (json.dumps(mark, indent=1, sort_keys=True) + "\n").encode(), mode=0o644)


def examine(folder: Path, ledger: Ledger | None, seal: Seal | None, *, needed: Iterable[str] = ()) -> Checkpoint:
    """Find out whether a checkpoint is whole, and one that this run saved.

    Args:
        ledger: ledger of the run; None if there is none.
        seal: seal of the run; None if its private folder is not here.
        needed: names of files without which there is nothing to go on from.
    """
    if not folder.is_dir():
        return Checkpoint(folder, ("there is no such folder",), (), None)
    try:
        with open_regular(folder / MARK) as file:
            mark = parse_json(file.read())
        digest = mark["ledger_digest"]
        listed = {str(name): dict(entry) for name, entry in mark["files"].items()}
    except FileNotFoundError:
        mark, digest, listed = None, None, {}
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return Checkpoint(folder, (f"its {MARK} is damaged",), (), None)
    reasons, cautions = list(_origin(digest, mark, ledger)), list[str]()
    if mark is not None and not reasons:
        forged, unknown = _signature(mark, ledger, seal)
        reasons += forged
        cautions += unknown
    reasons += _differences(folder, listed, needed, is_listed=mark is not None)
    return Checkpoint(folder, tuple(reasons), tuple(cautions), mark)


def _origin(digest: Any, mark: dict[str, Any] | None, ledger: Ledger | None) -> Iterator[str]:
    """Reasons to think that another run, or none, wrote a checkpoint."""
    where = f" by a run of {ledger.path}" if ledger is not None else ""
    if mark is None:
        yield f"{_FOREIGN}{where}, or only in part: it has no {MARK}, so what its weights cost is unknown"
    elif ledger is not None and not ledger.contains(digest):
        yield f"{_FOREIGN}{where}, so what its weights cost is unknown"


def _signature(mark: dict[str, Any], ledger: Ledger | None, seal: Seal | None) -> tuple[list[str], list[str]]:
    """Reasons to refuse the list of files, and reasons to doubt it."""
    if seal is not None and mark.get("key") == seal.key_id:
        is_signed = seal.is_signed(_signed_part(mark), "checkpoint", mark.get("seal"))
        return ([] if is_signed else [f"its {MARK} was edited: the signature does not fit"]), []
    if seal is not None and ledger is not None and seal.covers(ledger, mark["ledger_digest"]):
        return [f"its {MARK} was replaced: it has no signature of this run"], []
    return [], ["the private folder that has the key of its signature is not here"]


def _differences(
    folder: Path, listed: dict[str, dict[str, Any]], needed: Iterable[str], *, is_listed: bool
) -> Iterator[str]:
    """Differences between a folder and the list of its files."""
    there = set(_files(folder)) - {MARK}
    for name in sorted(there):
        if not (folder / name).is_file():
            yield f"{name} is not a regular file"
        elif name.endswith(".index.json") and not all(map(is_file_name, _names_in(folder / name))):
            yield f"{name} names files outside of its folder"
    for name in sorted({*listed, *needed} - there):
        yield f"it has no {name}"
    for name in sorted(there & listed.keys()):
        try:
            is_same = _entry(folder / name) == listed[name]
        except OSError:
            is_same = False
        if not is_same:
            yield f"{name} is not what was saved"
    if is_listed:
        for name in sorted(there - listed.keys()):
            if any(fnmatch.fnmatch(name, pattern) for pattern in READ):
                yield f"{name} was put in after it was saved"


def refuse(found: Checkpoint, instead: str = "") -> DPConfigError:
    """Error for a checkpoint that a run cannot go on from.

    Args:
        instead: sentence that says from where it can.
    """
    message = (
        f"{found.folder} is no checkpoint to resume from: {'; '.join(found.reasons)}. "
        f"{instead or 'Resume from a whole checkpoint of this output_dir (save_only_model=False).'}"
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


def last_whole(
    output_dir: Path,
    ledger: Ledger | None,
    seal: Seal | None,
    *,
    needed: Sequence[str] = (),
    without: Collection[int] = (),
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that a run can go on from, and those after it that it cannot.

    Args:
        without: steps of checkpoints that are left out.
    """
    skipped: list[Checkpoint] = []
    for folder in checkpoints(output_dir):
        if step_of(folder) in without:
            continue
        found = examine(folder, ledger, seal, needed=needed)
        if found.is_whole:
            return found, skipped
        skipped.append(found)
    return None, skipped


def _signed_part(mark: dict[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in mark.items() if key != "seal"}, sort_keys=True).encode()


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, with forward slashes, and of links to folders."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in files + links)


def _names_in(index: Path) -> list[Any]:
    """Names of the files that an index of weights distributes them to."""
    try:
        with open_regular(index) as file:
            return list(parse_json(file.read())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [None]


def _entry(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "sha256": _sha256(path, status.st_ino, status.st_size, status.st_ctime_ns)}


@functools.lru_cache(maxsize=4096)  # what was just written, or was just checked, is not read a second time
def _sha256(path: Path, inode: int, size: int, changed_ns: int) -> str:
    """SHA-256 of a file; the other arguments tell one state of it from the next, and nobody can set the last one."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
