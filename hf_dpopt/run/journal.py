"""The journal of releases: what each step released since the last checkpoint, on the disk before the optimizer steps.

Released values are public, so a run that was killed takes them again after its last checkpoint: no record is read,
nothing is charged, and the weights are those of the undisturbed run, bit for bit (`hf_dpopt.run.resume`).

Each entry is a file in ``output_dir/_journal`` (transformers uploads nothing that begins with an underscore), which
appears there whole, with a checksum for what a disk may do to it later. A chain or a checkpoint begins with an entry
that says what is continued. Whoever can write to ``output_dir`` can write other entries, too: he may spoil the model,
which is then a function of what he wrote and of releases. Ranks hold the same sums, so rank 0 writes all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.durable import fsync_directory, make_folder
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.types import Released
from hf_dpopt.run.keys import read_state, write_state

JOURNAL = "_journal"  # in output_dir
SUFFIX = ".release"
LEAST_STEPS = 10  # that have to fit into the limit, else checkpoints would be all that a run does
GIGABYTE = 10**9

BASE, OPENING, STEP = "base", "opening", "step"
_NAME = re.compile(rf"([0-9a-z]+)-(\d{{9,}})-({BASE}|{OPENING}|{STEP}){re.escape(SUFFIX)}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Contents:
    """Entries of a chain.

    Attributes:
        bases: step -> what was continued after it.
        openings: step -> entry with the answer to the query before it.
        steps: step -> entry with its release.
        damaged: steps with an entry that is not as it was written.
    """

    bases: dict[int, str] = dataclasses.field(default_factory=dict)
    openings: dict[int, Path] = dataclasses.field(default_factory=dict)
    steps: dict[int, Path] = dataclasses.field(default_factory=dict)
    damaged: set[int] = dataclasses.field(default_factory=set)


class Journal:
    """The journal of one chain of steps.

    Formal guarantee: when `write` returns, the entry is on the disk. `read` and `contents` return no damaged one.

    Args:
        output_dir: folder of the run.
        chain_id: public name of the chain.
        limit: bytes that the files may fill before a checkpoint is wanted; 0 for a journal that is only read.
    """

    def __init__(self, output_dir: Path, chain_id: str, *, limit: float = 0.0):
        self.folder, self.chain_id, self._limit = output_dir / JOURNAL, chain_id, limit
        self._sizes = {path: path.lstat().st_size for path in self._entries()}  # bytes

    def _entries(self) -> dict[Path, tuple[int, str]]:
        """Path of each entry of the chain -> its step and kind, in the order of steps."""
        named = ((path, _NAME.fullmatch(path.name)) for path in sorted(self.folder.glob(f"{self.chain_id}-*{SUFFIX}")))
        return {path: (int(match[2]), match[3]) for path, match in named if match and match[1] == self.chain_id}

    # --- writing ---

    def begin(self, step: int, base: str) -> None:
        """Write what is continued, and remove what lies before it: a chain or the time after a checkpoint begins.

        Args:
            step: steps done so far.
            base: digest of the initial weights, or the origin of the checkpoint.
        """
        made = self._append(BASE, step, base=base) if self._limit > 0 else None
        if self.folder.is_symlink():  # what lies behind it belongs to somebody else
            return
        kept = {path for path, (of_step, _) in self._entries().items() if of_step > step or path == made}
        for path in sorted(self.folder.glob(f"*{SUFFIX}*")):  # the oldest first: a kill leaves no gap
            if path not in kept:
                path.unlink(missing_ok=True)
        self._sizes = {path: size for path, size in self._sizes.items() if path in kept}
        with contextlib.suppress(OSError):  # it is not there, or something is left in it
            self.folder.rmdir()

    def write(self, kind: str, step: int, values: Released) -> None:
        """Make what a step released durable.

        Args:
            kind: `STEP` or `OPENING`.
            step: the step, 1-based.
            values: name -> released tensor, float32.
        """
        if self._limit <= 0:
            return
        if self.takes(values):
            self._append(kind, step, values=values)
            return
        logger.warning(
            f"No journal is kept: a step has {_size_of(values) / GIGABYTE:.3g} GB, and "
            f"journal_limit={self._limit / GIGABYTE:g} holds fewer than {LEAST_STEPS}. A killed run would pay for the "
            "steps since its last checkpoint again. Raise --journal_limit, or save more often (--save_steps)."
        )
        self._limit = 0.0
        self.remove()

    def takes(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether a step of these values would be written, and not be too large for the limit."""
        return _size_of(values) * LEAST_STEPS <= self._limit

    def _append(
        self, kind: str, step: int, *, values: Mapping[str, torch.Tensor] | None = None, base: str = ""
    ) -> Path:
        """Write an entry, and wait for the disk."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            make_folder(self.folder)
            fsync_directory(self.folder.parent)
        path = self.folder / f"{self.chain_id}-{step:09d}-{kind}{SUFFIX}"
        # the order of names tells the queries of a step apart
        on_host = {name: _alone(value.detach().cpu()) for name, value in (values or {}).items()}
        write_state(path, {"entry": path.name, "base": base, "values": on_host})
        self._sizes[path] = path.stat().st_size
        return path

    @property
    def is_full(self) -> bool:
        """Whether the next entry would not fit into the limit, or an earlier one was deleted."""
        needed = sum(self._sizes.values()) + max(self._sizes.values(), default=0)
        return self._limit > 0 and (needed > self._limit or not all(path.exists() for path in self._sizes))

    def remove(self) -> None:
        """Delete the journals of all chains in the folder of the run."""
        self._sizes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- reading ---

    def contents(self) -> Contents:
        """Look through the entries of the chain, checking every one.

        Raises:
            DPConfigError: for something else than a file, or a file that cannot be read.
        """
        found = Contents()
        for path, (step, kind) in self._entries().items():
            entry = self._read(path)
            if entry is None:
                found.damaged.add(step)
            elif kind == BASE:
                found.bases[step] = entry["base"]
            else:
                (found.steps if kind == STEP else found.openings)[step] = path
        return found

    def read(self, path: Path) -> Released:
        """Read what was released, on the CPU.

        Raises:
            DPConfigError: if the file has changed since it was looked through.
        """
        entry = self._read(path)
        if entry is None:
            raise DPConfigError(
                f"{path} was changed while it was read. Put the file back, or remove the folder: the run then goes on "
                "as one that kept no journal."
            )
        return Released(entry["values"])

    def _read(self, path: Path) -> dict[str, Any] | None:
        """An entry, or None if it is not as it was written."""
        try:
            entry = read_state(path)
            if entry is None or entry["entry"] != path.name or not isinstance(entry["base"], str):
                return None
            is_plain = all(isinstance(name, str) and _is_plain(value) for name, value in entry["values"].items())
        except DPConfigError:
            raise
        except Exception:  # of torch, for a file with a right checksum that no run wrote
            return None
        return entry if is_plain else None


def _alone(value: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own: torch saves all of the memory that a tensor shares."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.layout == torch.strided


def _size_of(values: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the values in an entry."""
    return 4 * sum(value.numel() for value in values.values())
