"""The ledger, read byte by byte: its chain of hashes, and the steps that it charges.

A line is a JSON object with sorted names and without spaces. Its ``sha256`` is that of the line without this very
entry, and its ``prev`` that of the line before. Here the entry is cut out of the bytes, where the run's own reader
writes the record again: two ways to the same digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from hf_dpopt.verify.outcome import Contradiction
from hf_dpopt.verify.reading import MOST_BYTES, Fields, read_regular, strict_json

FORMAT = 1


@dataclasses.dataclass
class Chain:
    """Steps under one key.

    Attributes:
        start: the first step is the one after this.
        steps: steps charged, in order.
        lost: those whose release was lost.
        is_unsafe: whether the user fixed the key.
    """

    start: int
    is_unsafe: bool
    steps: list[int] = dataclasses.field(default_factory=list)
    lost: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class LedgerFile:
    """Content of a verified ledger."""

    plans: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    chains: dict[str, Chain] = dataclasses.field(default_factory=dict)
    keys: set[str] = dataclasses.field(default_factory=set)
    digests: list[str] = dataclasses.field(default_factory=list)
    num_torn: int = 0

    @property
    def charged(self) -> tuple[int, ...]:
        """Steps charged to each chain."""
        return tuple(len(chain.steps) for chain in self.chains.values())

    @property
    def is_unsafe(self) -> bool:
        """Whether a key was fixed by hand."""
        return any(chain.is_unsafe for chain in self.chains.values())

    @property
    def num_lost(self) -> int:
        """Steps that were charged and made no update."""
        return sum(len(chain.lost) for chain in self.chains.values())


def read_ledger(path: Path) -> LedgerFile:
    """The ledger at a path, every line of it verified.

    Raises:
        Contradiction: naming the first line that is not what was written, and why.
    """
    *lines, tail = read_regular(path, MOST_BYTES).split(b"\n")
    found = LedgerFile()
    for number, line in enumerate(lines, start=1):
        _take(found, *_unsealed(line, f"line {number}"))
    if tail:  # of a write that a kill tore: a step that did not run; or a whole record, which counts
        try:
            last = _unsealed(tail, "the last line")
        except Contradiction:
            found.num_torn = len(tail)
        else:
            _take(found, *last)
    if not found.digests:
        raise Contradiction("it is empty")
    return found


def _unsealed(line: bytes, where: str) -> tuple[Fields, str]:
    """The record of a line, and its digest, which is that of its bytes without the entry itself."""
    try:
        record = Fields(strict_json(line), where)
    except Contradiction as error:
        raise Contradiction(f"{where}: {error}") from None
    digest = record.text("sha256")
    entry = f',"sha256":"{digest}"'.encode(errors="replace")  # names are sorted: never the first
    if line.count(entry) != 1 or hashlib.sha256(line.replace(entry, b"")).hexdigest() != digest:
        raise Contradiction(f"{where} does not have the digest that it carries: it was edited")
    return record, digest


def _take(found: LedgerFile, record: Fields, digest: str) -> None:
    """Take in the record of the next line."""
    if record.text("prev") != (found.digests[-1] if found.digests else "0" * 64):
        raise Contradiction(f"{record.where} does not follow the line before it: lines were removed, added or moved")
    _apply(found, record)
    found.digests.append(digest)


def _apply(found: LedgerFile, record: Fields) -> None:
    where, kind = record.where, record.text("kind")
    if (kind == "header") == bool(found.digests):
        raise Contradiction(f"{where}: a header belongs into the first line, and nowhere else")
    if kind == "header" and record.count("version") > FORMAT:
        raise Contradiction(f"{where}: format {record.count('version')} is newer than this release knows")
    if kind == "plan":
        found.plans.append(dict(record.inner("plan").content))
    elif kind == "chain":
        _begin(found, record)
    elif kind in ("step", "lost"):
        name, step = record.text("chain_id"), record.count("step")
        if (chain := found.chains.get(name)) is None:
            raise Contradiction(f"{where}: it is of chain {name:.40}, which the ledger does not know")
        reached = chain.steps[-1] if chain.steps else chain.start
        if kind == "step" and step <= reached:
            raise Contradiction(f"{where}: step {step} is charged after step {reached} of its chain")
        if kind == "lost" and (step not in chain.steps[-1:] or step in chain.lost):
            raise Contradiction(f"{where}: step {step} is noted as lost, and is not the last one charged")
        if kind == "step":
            chain.steps.append(step)
        else:
            chain.lost.add(step)
    elif kind not in ("header", "evaluation", "answer"):
        raise Contradiction(f"{where}: records of kind {kind!r:.40} are unknown here")


def _begin(found: LedgerFile, record: Fields) -> None:
    name, key, is_unsafe = record.text("chain_id"), record.text("key_id"), record.flag("unsafe")
    if name in found.chains:
        raise Contradiction(f"{record.where}: chain {name:.40} begins twice")
    if key in found.keys and not is_unsafe:
        raise Contradiction(f"{record.where}: the noise key {key:.40} is used by two chains, whose noise is the same")
    if not found.plans:
        raise Contradiction(f"{record.where}: a chain begins before there is a plan")
    found.keys.add(key)
    found.chains[name] = Chain(record.count("start_step", 0), is_unsafe)
