"""The privacy ledger: which steps ran on the private data, written before they run.

The file outlives processes and checkpoints: resuming, crashing, branching from an older checkpoint and calling
``train()`` again all add records, and nothing removes one. It holds public values only and may be published.

Each line is a JSON record. ``prev`` is the ``sha256`` of the record before it, ``sha256`` that of the record itself,
so the last one commits to the whole file: a line edited, removed or moved is found when the file is read. Lines that
were removed *from the end* are not found from the file alone; the digest that a privacy report quotes tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.chained import GENESIS, canonical, seal_record
from hf_dpopt.common.durable import is_open_at, make_folder, read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.common.locks import FileLock, LockHeld, is_held, open_plain
from hf_dpopt.common.log import warn_once
from hf_dpopt.common.storage import naming

VERSION = 1  # of the format; a file of another one is refused
LEDGER = Path("privacy") / "ledger.jsonl"  # in the output_dir of a run

_FIX = (
    "A ledger that was changed no longer proves what was spent. Put the original file back. If it is lost, so is the "
    "privacy statement of that run; a new run in another output_dir has its own, which does not cover the old one."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainRecord:
    """An uninterrupted sequence of steps under one noise key, as the ledger knows it.

    Attributes:
        chain_id: public name of the chain.
        key_id: commitment to its key; tells two keys apart and reveals neither.
        start_step: the chain's first step is the one after this.
        parent: the chain it branched from or came after; None for the first one.
        note: why the chain began.
        unsafe: the key was fixed by the user, so nothing is private.
    """

    chain_id: str
    key_id: str
    start_step: int
    parent: str | None
    note: str
    unsafe: bool


_CHAIN_FIELDS = tuple(field.name for field in dataclasses.fields(ChainRecord))
_CHAIN_ID = re.compile(r"(unsafe)?[0-9a-f]{16}")
_KEY_ID = re.compile(r"[0-9a-f]{32}")


def _is_chain(record: dict[str, Any]) -> bool:
    """Whether a record has the fields of a chain, in the form that a run writes them."""
    match record:
        case {
            "chain_id": str(chain_id), "key_id": str(key_id), "start_step": start, "note": str(),
            "parent": str() | None, "unsafe": bool(unsafe),
        }:  # fmt: skip
            named, starts = _CHAIN_ID.fullmatch(chain_id), type(start) is int and start >= 0
            return starts and named is not None and bool(named[1]) == unsafe and bool(_KEY_ID.fullmatch(key_id))
    return False


class Ledger:
    """Append-only, write-ahead record of the steps charged; made by `open` (one writer) or `read` (any number).

    Formal guarantee: when `charge` returns, the step is on the disk, so at every moment, killed or not, the steps the
    file charges include all steps that ran; and no (chain, step) is charged twice, so no step's noise hides two
    batches. Both hold as long as the file is not tampered with and no step runs before `charge` returns.
    """

    def __init__(self, path: Path):
        """Use `Ledger.open` or `Ledger.read`."""
        self.path = path
        self._digest = GENESIS
        self._positions: dict[str, int] = {}  # digest of each record -> its number
        self._charges: dict[tuple[str, int], str] = {}  # digests of the steps' records
        self._lost: dict[str, list[int]] = {}
        self._plan: dict[str, Any] | None = None
        self._chains: dict[str, ChainRecord] = {}
        self._steps: dict[str, list[int]] = {}
        self._file: int | None = None
        self._size = 0  # of the file, as far as this writer knows
        self._lock: FileLock | None = None

    # --- opening ---

    @classmethod
    def open(cls, path: str | os.PathLike[str], create: bool = True) -> Ledger:
        """Open for writing, alone; verify what is there, and cut off a last line that a crash left unfinished.

        Args:
            path: the file; a lock file ``<path>.lock`` is kept beside it.
            create: start a ledger if there is none; the directories above it too.

        Raises:
            DPConfigError: if another run has it open, if it is missing and not ``create``, or if a line was changed.
        """
        ledger = cls(Path(path))
        if not create and not ledger.path.exists():
            raise DPConfigError(_missing(ledger.path))
        make_folder(ledger.path.parent)
        ledger._acquire_lock()
        try:
            if not ledger.path.exists():
                _, header = seal_record({"kind": "header", "version": VERSION}, GENESIS)
                write_durably(ledger.path, header + b"\n", mode=0o644)
            ledger._file = open_plain(ledger.path, os.O_RDWR | os.O_APPEND)
            ledger._settle_tail(ledger._load())
            ledger._size = os.fstat(ledger._file).st_size
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read and verify without locking; safe while a run is writing. What writes is then not available.

        Raises:
            DPConfigError: if there is no ledger, or if a line was changed.
        """
        ledger = cls(Path(path))
        if not ledger.path.exists():
            raise DPConfigError(_missing(ledger.path))
        end = ledger._load()
        with contextlib.suppress(DPConfigError):  # half a record is one that did not run, or that is being written
            ledger._replay(read_whole(ledger.path)[end:].partition(b"\n")[0], number=-1)
        return ledger

    @classmethod
    def find(cls, output_dir: str | os.PathLike[str]) -> Ledger | None:
        """Read the ledger of the run in a folder; None if there is none.

        Raises:
            DPConfigError: if a line was changed.
        """
        path = Path(output_dir) / LEDGER
        return cls.read(path) if path.exists() else None

    @staticmethod
    def is_in_use(path: str | os.PathLike[str]) -> bool:
        """Whether a run has the ledger open for writing, as far as this machine's locks tell."""
        return is_held(Path(f"{path}.lock"))

    def close(self) -> None:
        """Give up the lock; the ledger can still be read from."""
        if self._file is not None:
            os.close(self._file)
        if self._lock is not None:
            self._lock.close()
        self._file = self._lock = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what it says ---

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan recorded last, or None."""
        return self._plan

    @property
    def chains(self) -> tuple[ChainRecord, ...]:
        """All chains, oldest first."""
        return tuple(self._chains.values())

    @property
    def last_chain(self) -> ChainRecord | None:
        """The chain started last, or None."""
        return self.chains[-1] if self._chains else None

    @property
    def num_charged(self) -> int:
        """Steps charged over all chains."""
        return sum(self.charged)

    @property
    def charged(self) -> tuple[int, ...]:
        """Steps charged to each chain, oldest first. Chains draw apart, so their sum may not tell the cost."""
        return tuple(len(steps) for steps in self._steps.values())

    def last_step(self, chain_id: str) -> int | None:
        """The last step charged to a chain, or None if none was."""
        steps = self._steps[chain_id]
        return steps[-1] if steps else None

    def digest(self) -> str:
        """SHA-256 of the last record, and through it of all: quote it, and no record can be changed or removed."""
        return self._digest

    def contains(self, digest: str) -> bool:
        """Whether the ledger had that digest at some moment."""
        return digest in self._positions

    def position(self, digest: str) -> int | None:
        """Number of the record with that digest, oldest first; None if there is none."""
        return self._positions.get(digest)

    @property
    def is_intact(self) -> bool:
        """Whether the file is still at its place and, where it is open for writing, as this writer left it."""
        if self._file is None:
            return self.path.exists()
        return is_open_at(self._file, self.path) and os.fstat(self._file).st_size == self._size

    def charge_digest(self, chain_id: str, step: int) -> str | None:
        """Digest of the record that charged a step to a chain; None if none did."""
        return self._charges.get((chain_id, step))

    def is_not_before(self, digest: str, other: str) -> bool:
        """Whether the ledger had a digest when, or after, it had another one; both must be its own."""
        return self._positions[digest] >= self._positions[other]

    def lost(self, chain_id: str) -> tuple[int, ...]:
        """Charged steps of a chain whose release was lost: they made no update, and are not drawn again."""
        return tuple(self._lost[chain_id])

    @property
    def num_lost(self) -> int:
        """Charged steps without an update, over all chains."""
        return sum(len(steps) for steps in self._lost.values())

    # --- adding to it ---

    def check_intact(self) -> None:
        """Stop a run whose ledger was taken from under it: what it writes would be on no disk that anybody reads.

        Raises:
            DPConfigError: if the file was deleted, replaced or changed since it was opened.
        """
        if self._file is not None and not self.is_intact:
            raise DPConfigError(
                f"{self.path} was deleted, replaced or changed while the run was going on, so no further step was "
                f"charged, and none was run. {self.num_charged} steps had been charged, the last record is "
                f"{self._digest}. Put the file back as it was and resume; without it the cost of this run is known "
                "from the keys' memory alone. Something else writes to output_dir: keep it out."
            )

    def record_plan(self, plan: dict[str, Any], *, must_match: Sequence[str]) -> None:
        """Write the plan of a run, or check that a later run on this ledger is the same mechanism.

        Args:
            plan: public values, JSON-able.
            must_match: the fields that make the mechanism. The others (``num_steps``, ``target_epsilon``) may change:
                the new plan is then recorded too.

        Raises:
            DPConfigError: if a field of ``must_match`` differs from the plan recorded last.
        """
        plan = json.loads(canonical(plan))  # as it would be read back: tuples are lists, keys are strings
        self.check_plan(plan, must_match=must_match)
        if self._plan is None or canonical(self._plan) != canonical(plan):
            self._append({"kind": "plan", "plan": plan})

    def check_plan(self, plan: dict[str, Any], *, must_match: Sequence[str]) -> None:
        """Check that a plan has the mechanism that is recorded, if one is; arguments as for `record_plan`.

        Raises:
            DPConfigError: if a field of ``must_match`` differs from the plan recorded last.
        """
        if self._plan is None:
            return
        differing = list(_differences(self._plan, json.loads(canonical(plan)), must_match))
        if differing:
            raise DPConfigError(
                f"The run recorded in {self.path} used another private mechanism ({'; '.join(differing)}). Continue "
                "with the same options, or choose another output_dir for a new run; on the same data its epsilon "
                "comes on top of this one's."
            )

    def start_chain(
        self,
        *,
        chain_id: str,
        key_id: str,
        start_step: int,
        parent: str | None = None,
        note: str = "",
        unsafe: bool = False,
    ) -> ChainRecord:
        """Begin a chain of steps under a key of its own; see `ChainRecord`.

        Raises:
            DPConfigError: if the chain or (unless ``unsafe``) its key was used before.
        """
        assert start_step >= 0 and (parent is None or parent in self._chains), (start_step, parent)
        if chain_id in self._chains:
            raise DPConfigError(f"Chain {chain_id} is already in {self.path}. Start a chain with a fresh id and key.")
        if not unsafe and any(chain.key_id == key_id for chain in self.chains):
            raise DPConfigError(
                f"The noise key {key_id} was used by another chain in {self.path}; using it again would let two "
                "releases be subtracted. Start the chain with a fresh key."
            )
        record = ChainRecord(
            chain_id=chain_id, key_id=key_id, start_step=start_step, parent=parent, note=note, unsafe=unsafe
        )
        self._append({"kind": "chain"} | dataclasses.asdict(record))
        return record

    def charge(self, chain_id: str, step: int) -> None:
        """Charge one optimizer step, durably, before anything of it is computed.

        Args:
            chain_id: a chain of this ledger.
            step: the step about to run, counted from 1; larger than every step charged to the chain before.

        Raises:
            DPConfigError: if the step, or a later one, was charged to the chain: its noise may have been used.
        """
        reached = self._reached(chain_id)
        if step <= reached:
            raise DPConfigError(
                f"Step {step} cannot run on chain {chain_id}, which has reached step {reached}: the noise of a step "
                "would be used for a second batch and could be subtracted out. Steps that are run again need a new "
                "chain with a fresh key."
            )
        self._append({"kind": "step", "chain_id": chain_id, "step": step})

    def charge_up_to(self, chain_id: str, step: int) -> None:
        """Charge the steps of a chain up to `step` that are not charged yet: they ran, and this file forgot them."""
        reached = self._reached(chain_id)
        self._append(*({"kind": "step", "chain_id": chain_id, "step": t} for t in range(reached + 1, step + 1)))

    def lose(self, chain_id: str, step: int) -> None:
        """Note that the release of a charged step is gone; the step stays charged and makes no update.

        Raises:
            DPConfigError: if the step is not the last one that was charged to the chain.
        """
        if step != self.last_step(chain_id) or step in self._lost[chain_id]:
            raise DPConfigError(
                f"Step {step} of chain {chain_id} cannot be noted as lost: the last step charged is "
                f"{self.last_step(chain_id)}, and only its release can be missing. Note it before the next step."
            )
        self._append({"kind": "lost", "chain_id": chain_id, "step": step})

    # --- the file ---

    def _acquire_lock(self) -> None:
        try:
            self._lock = FileLock.take(Path(f"{self.path}.lock"), mode=0o644)
        except LockHeld as held:
            raise DPConfigError(
                f"{self.path} is in use by process {held}; two runs writing one ledger could charge a step once and "
                "run it twice. Wait for that run, stop it, or choose another output_dir."
            ) from None
        if not self._lock.is_enforced:
            warn_once(
                f"locks {self.path}",
                f"The filesystem of {self.path} has no file locks, so it cannot keep a second run out of this folder; "
                "the lock beside the keys does, on machines that share private_state_dir. Start one run at a time.",
            )

    def _load(self) -> int:
        """Replay the file; return the position behind the last whole record."""
        *lines, tail = read_whole(self.path).split(b"\n")
        if not lines:
            raise DPConfigError(f"{self.path} is empty or has no whole line, not even the header. {_FIX}")
        end = 0
        for number, line in enumerate(lines, start=1):
            self._replay(line, number)
            end += len(line) + 1
        return end

    def _replay(self, line: bytes, number: int) -> None:
        """Verify one line and take it in."""
        where = f"{self.path}, line {number}:"
        try:
            record = parse_json(line)
            sealed = {key: value for key, value in record.items() if key not in ("prev", "sha256")}
            digest, expected = seal_record(sealed, record["prev"])
        except (ValueError, KeyError, AttributeError):
            raise DPConfigError(f"{where} is no record of a ledger; it was edited or damaged. {_FIX}") from None
        if expected != line:
            raise DPConfigError(f"{where} the record does not have the digest it carries; it was edited. {_FIX}")
        if record["prev"] != self._digest:
            raise DPConfigError(f"{where} it does not follow line {number - 1}; lines were removed or moved. {_FIX}")
        if number == 1:
            _check_header(sealed, where)
        self._apply(sealed, digest)

    def _apply(self, record: dict[str, Any], digest: str) -> None:
        """Take a record in whose hash was verified.

        The hash has no key, so whoever can write to `output_dir` can make any record. What a run could not have
        written is refused; names of chains become names of files (`hf_dpopt.run.keys`), so only their form is let in.
        """
        if not self._is_valid(record):
            raise DPConfigError(f"{self.path} has a record that no run writes: {canonical(record):.200}. {_FIX}")
        match record["kind"]:
            case "header":
                pass
            case "plan":
                self._plan = record["plan"]
            case "chain":
                chain = ChainRecord(**{name: record[name] for name in _CHAIN_FIELDS})
                self._chains[chain.chain_id], self._steps[chain.chain_id] = chain, []
                self._lost[chain.chain_id] = []
            case "step":
                self._steps[record["chain_id"]].append(record["step"])
                self._charges[record["chain_id"], record["step"]] = digest
            case "lost":
                self._lost[record["chain_id"]].append(record["step"])
            case kind:
                raise DPConfigError(
                    f"{self.path} has a record of kind {kind!r}, which this release does not know. Use the release of "
                    "hf_dpopt that wrote it, or a newer one."
                )
        self._digest = digest
        self._positions[digest] = len(self._positions)

    def _is_valid(self, record: dict[str, Any]) -> bool:
        """Whether a run could have written a record here; True for a kind that a newer release may write."""
        match record:
            case {"kind": "header"}:
                return self._digest == GENESIS
            case {"kind": "plan", "plan": dict()}:
                return True
            case {"kind": "chain", "parent": parent, "key_id": key_id, "unsafe": unsafe}:
                is_new = _is_chain(record) and record["chain_id"] not in self._chains
                is_fresh = unsafe or all(chain.key_id != key_id for chain in self.chains)
                return is_new and is_fresh and (parent is None or parent in self._chains)
            case {"kind": "step", "chain_id": str(chain_id), "step": step}:
                return chain_id in self._chains and type(step) is int and step > self._reached(chain_id)
            case {"kind": "lost", "chain_id": str(chain_id), "step": step}:
                is_last = chain_id in self._chains and type(step) is int and step == self.last_step(chain_id)
                return is_last and step not in self._lost[chain_id]
        return record.get("kind") not in ("plan", "chain", "step", "lost", None)

    def _reached(self, chain_id: str) -> int:
        """The last step charged to a chain, or where it starts."""
        return self.last_step(chain_id) or self._chains[chain_id].start_step

    def _settle_tail(self, end: int) -> None:
        """Settle what follows the last newline, which a kill in mid-write leaves.

        Half a record is cut off: its step did not run, for `charge` had not returned. A whole one that only lacks its
        newline (an editor may strip it) stays: charging a step that did not run is the safe side.
        """
        assert self._file is not None
        tail = os.pread(self._file, os.fstat(self._file).st_size - end, end)
        if not tail:
            return
        try:
            self._replay(tail, number=-1)
        except DPConfigError:
            os.ftruncate(self._file, end)
        else:
            os.write(self._file, b"\n")
        os.fsync(self._file)

    def _append(self, *records: dict[str, Any]) -> None:
        """Write records to the disk, then take them in."""
        assert self._file is not None, f"{self.path} is not open for writing"
        self.check_intact()
        sealed, prev = [], self._digest
        for record in records:
            prev, line = seal_record(record, prev)
            sealed.append((record, prev, line + b"\n"))
        content = b"".join(line for _, _, line in sealed)
        try:
            with naming(self.path):
                written = os.write(self._file, content)
                if written < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._size += written
                os.fsync(self._file)
            for record, digest, _ in sealed:
                self._apply(json.loads(canonical(record)), digest)
        except BaseException:
            # A full disk, or Ctrl-C between the write and the book-keeping: the file may hold more than this object
            # knows, and a further record would not fit onto it. The next `open` settles it.
            self.close()
            raise


def _check_header(header: dict[str, Any], where: str) -> None:
    version = header.get("version")
    if header.get("kind") != "header" or type(version) is not int or version < 1:
        raise DPConfigError(f"{where} expected the header of a ledger, found {header!r}. {_FIX}")
    if version > VERSION:
        raise DPConfigError(
            f"{where} the ledger has format {version}, and this release of hf_dpopt knows format {VERSION}: "
            "what it charges would be misread. Use the release that wrote it, or a newer release."
        )


def _differences(old: dict[str, Any], new: dict[str, Any], names: Iterable[str], inside: str = "") -> Iterator[str]:
    """Differences between two plans, in mappings entry by entry. A missing field counts as None."""
    for name in names:
        then, now = old.get(name), new.get(name)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, sorted({*then, *now}), f"{inside}{name}.")
        elif canonical({"": then}) != canonical({"": now}) or (inside and (name in old) != (name in new)):
            was, is_now = old.get(name, "absent"), new.get(name, "absent")
            yield f"{inside}{name}: {was!r} in the ledger, {is_now!r} now"


def _missing(path: Path) -> str:
    return (
        f"There is no ledger at {path}, so what was spent on the data is unknown. Give the path of the run's ledger; "
        "if it was deleted, put it back before going on with that run."
    )
