"""Files of a run, read by their documented names: `output_dir/privacy` and the private folder. Tests of the trainer and
of the command line read them here alone."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEDGER = "privacy/ledger.jsonl"
MANIFEST = "privacy_ledger.json"  # in a checkpoint: its run, chain and step, and its files
UNFINISHED = "_unfinished_checkpoints"
JOURNAL = "_journal"


@dataclasses.dataclass(frozen=True)
class Records:
    """Records of a ledger.

    Attributes:
        lines: all of them, oldest first.
    """

    lines: tuple[dict[str, Any], ...]

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that was recorded last."""
        return [line["plan"] for line in self.lines if line["kind"] == "plan"][-1]

    @property
    def keys(self) -> list[dict[str, Any]]:
        """Noise keys, in the order of their first use."""
        return [line for line in self.lines if line["kind"] == "chain"]

    @property
    def charged(self) -> tuple[int, ...]:
        """Steps that were charged under each key."""
        return self._counts("step")

    @property
    def lost(self) -> tuple[int, ...]:
        """Charged steps without an update, under each key."""
        return self._counts("lost")

    @property
    def digest(self) -> str:
        """Digest of the last record, and through it of all."""
        return self.lines[-1]["sha256"]

    def _counts(self, kind: str) -> tuple[int, ...]:
        steps = [line["chain_id"] for line in self.lines if line["kind"] == kind]
        return tuple(steps.count(key["chain_id"]) for key in self.keys)


def ledger(output_dir: Path) -> Records:
    """Read the ledger of a run, up to a line that is not a record."""
    found = []
    for line in (output_dir / LEDGER).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if "kind" not in record:
            break
        found.append(record)
    return Records(tuple(found))


def charged(output_dir: Path) -> tuple[int, ...]:
    """Steps that were charged under each key; none where there is no ledger."""
    return ledger(output_dir).charged if (output_dir / LEDGER).exists() else ()


def charged_in_log(private_dir: Path) -> int:
    """Steps that the logs in a private folder know, of all runs and keys."""
    logs = (path.read_text() for path in private_dir.glob("runs/*/log.jsonl"))
    return sum(log.count('"kind":"step"') for log in logs)


@contextmanager
def in_use(lock: Path) -> Iterator[None]:
    """Hold a lock, as another run does."""
    with open(lock, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
