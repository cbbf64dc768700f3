"""The log of a run: write-ahead, in the private folder, beside the keys that it is about. The ledger is its export.

``runs/<id>/log.jsonl`` in the private folder decides which step, key and evaluation was used; people copy
``output_dir``, move it and put it back, and none of that reaches the log. ``output_dir/privacy/ledger.jsonl`` is
written from it whenever a run opens, and extended after every charge: first the log is on the disk, then the ledger,
then records are read. What only the ledger knows (it was written elsewhere, or the private folder was put back) is
taken in, so the larger cost counts: neither file ever shrinks the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.chained import ChainedFile, canonical
from hf_dpopt.common.durable import make_folder
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import FileLock, LockHeld, is_held
from hf_dpopt.common.log import logger, warn_once
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.run.checkpoint import checkpoints, read_manifest
from hf_dpopt.run.keys import RUNS, Chain, Keys
from hf_dpopt.run.ledger import LEDGER, PUBLIC, TAKEN_IN, VERSION, ChainRecord, Ledger, differences

LOG, LOCK = "log.jsonl", "lock"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # see `write_durably`


@dataclasses.dataclass(frozen=True)
class Found:
    """Records of the run in a folder, as they lie on the disk; nothing is locked or written.

    Attributes:
        ledger: what was published; None for none.
        log: what the private folder knows; None if it has no log of this run.
        keys: keys of the run, where there is a log.
        others: logs of other runs that wrote checkpoints in the folder.
    """

    ledger: Ledger | None
    log: Ledger | None
    keys: Keys | None
    others: tuple[Ledger, ...] = ()

    @property
    def known(self) -> Ledger | None:
        """The record that counts."""
        return self.log or self.ledger

    @property
    def num_unknown(self) -> int:
        """Steps and private evaluations that the logs have charged, and the ledger does not know."""
        logs = self.others if self.log is None else (self.log, *self.others)
        published = set() if self.ledger is None else set(_charges(self.ledger))
        return len({charge for log in logs for charge in _charges(log)} - published)

    @property
    def is_in_use(self) -> bool:
        """Whether a process has the log open for writing, as far as this machine's locks tell."""
        return self.keys is not None and is_held(self.keys.folder / LOCK)


def find_run(output_dir: Path, directory: Path) -> Found:
    """Read what is known of the run in a folder.

    Args:
        output_dir: folder of the run.
        directory: private folder.

    Raises:
        DPConfigError: for a ledger or log that was changed, or a ledger of another mechanism.
    """
    ledger = Ledger.find(output_dir)
    own, others = _logs(ledger, output_dir, directory)
    if own is None:
        return Found(ledger, None, None, others)
    log = Ledger.read(own / LOG)
    if ledger is not None:
        _check_same_mechanism(log, ledger)
    return Found(ledger, log, Keys(own), others)


def _logs(ledger: Ledger | None, output_dir: Path, directory: Path) -> tuple[Path | None, tuple[Ledger, ...]]:
    """Folder of the log of a run, if it is here; and logs of the runs that it descends from, or took checkpoints of.

    Ids that were read from files have the form of `is_run_id`, so none leads elsewhere.
    """
    named = [manifest.run for folder in checkpoints(output_dir) if (manifest := read_manifest(folder)) is not None]
    if ledger is not None:
        named = [ledger.run, *named, *filter(None, [ledger.parent])]
    own, others = None, dict[str, Ledger]()
    for run in named:  # grows by the parents of what is found
        folder = directory / RUNS / run
        if run in others or not os.path.lexists(folder / LOG):
            continue
        if own is None and (ledger is None or run == ledger.run):
            own = folder
        elif folder != own:
            others[run] = Ledger.read(folder / LOG)
            named.extend(filter(None, [others[run].parent]))
    return own, tuple(others.values())


class RunLog:
    """The log of a run, open for writing by one process; made by `open`.

    Formal guarantee: when `charge` returns, the step is on the disk, in the log and then in the ledger; no
    (chain, step) is charged twice, in no folder that shares this log; the log holds every charge that the ledger
    held when it was opened. It fails if the private folder is put back to an earlier state together with the ledger.

    Attributes:
        state: what all records add up to.
        keys: keys of the run.
        output_dir: folder of the run.
    """

    def __init__(self, output_dir: Path, log: ChainedFile, held: contextlib.ExitStack):
        """Use `RunLog.open`."""
        self.output_dir, self.keys = output_dir, Keys(log.path.parent)
        self._log, self._held = log, held
        self.state = Ledger(output_dir / LEDGER)
        for record in log.records:
            self.state.apply(record)
        self._ledger: ChainedFile | None = None  # until it is written, records go to the log alone

    @classmethod
    def open(cls, output_dir: str | os.PathLike[str], directory: Path) -> RunLog:
        """Open the log of the run in a folder, or begin one, and write the ledger from it.

        Args:
            output_dir: folder of the run.
            directory: private folder, see `hf_dpopt.run.keys.private_dir`.

        Raises:
            DPConfigError: if another process has it open, if a file was changed, or if the ledger is that of another
                mechanism or contradicts the log.
        """
        path = Path(output_dir) / LEDGER
        make_folder(path.parent)
        with contextlib.ExitStack() as held:
            held.enter_context(contextlib.closing(lock_ledger(path)))
            ledger = Ledger.find(output_dir)
            folder, others = _logs(ledger, Path(output_dir), directory)
            parent = None
            if folder is None:
                if ledger is not None and ledger.num_charged:
                    parent = ledger.run
                    logger.warning(
                        f"There is no log of run {parent} in {directory}: it is on another machine, in another "
                        f"private_state_dir, or lost. Its {ledger.num_charged} steps stay charged, the next ones get "
                        "a fresh key, and what ran elsewhere and is not in the ledger cannot be known here."
                    )
                folder = directory / RUNS / secrets.token_hex(8)
                folder.mkdir(mode=0o700)
            held.enter_context(contextlib.closing(_lock_log(folder, path)))
            log = held.enter_context(contextlib.closing(ChainedFile.open(folder / LOG, mode=0o600)))
            if not log.records:
                log.append({"kind": "header", "version": VERSION, "run": folder.name, "parent": parent})
            made = cls(Path(output_dir), log, held)
            for other in others if ledger is None else (ledger, *others):
                made._take_in(other)
            made._write_ledger(ledger)
            made._clean()
            made._held = held.pop_all()
        return made

    def close(self) -> None:
        """Let other processes go on."""
        self._held.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_in(self, other: Ledger) -> None:
        """Take in what another record of the run, or one of a run that this one descends from, knows alone."""
        if self.state.plan is None:
            self._append(*({"kind": "plan", "plan": plan} for plan in other.plans))
        _check_same_mechanism(self.state, other)
        for chain in other.chains:
            self._append(*self._unknown(other, chain))
        for name, one in other.evaluations.items():
            if name not in self.state.evaluations:
                self.charge_evaluation(one.noise_multiplier, one.adjacency, one.query, name)

    def _unknown(self, other: Ledger, chain: ChainRecord) -> Iterator[dict[str, Any]]:
        """Records of steps that only the other one knows; a key of this log whose use it forgot is destroyed."""
        mine = self.state.chain(chain.chain_id)
        same_key = (one for one in self.state.chains if one.key_id == chain.key_id and not chain.unsafe)
        is_other = mine is not None and (mine.key_id, mine.start_step) != (chain.key_id, chain.start_step)
        if is_other or (mine is None and any(same_key)):
            raise DPConfigError(
                f"{other.path} contradicts the log of the run about chain {chain.chain_id}: another key, or another "
                "start. It was edited. Put the original file back; or delete it: it is written again from the log."
            )
        unknown = [step for step in chain.steps if mine is None or step not in mine.steps]
        if unknown and mine is None:
            yield _record_of(dataclasses.replace(chain, note=TAKEN_IN, parent=None))
        elif unknown and mine is not None and mine.is_own:
            # This private folder was put back to an earlier state: noise of later steps was used.
            self.keys.destroy(chain.chain_id)
            logger.warning(
                f"{other.path} has charged {len(unknown)} steps that the private folder {self.keys.folder} does not "
                "know: it was put back to an earlier state, or the ledger was edited. The steps count, and the next "
                "ones get a fresh key."
            )
        for step in unknown:  # a lost one is noted before the next is charged, as a run does
            yield {"kind": "step", "chain_id": chain.chain_id, "step": step}
            if step in chain.lost:
                yield {"kind": "lost", "chain_id": chain.chain_id, "step": step}

    def _write_ledger(self, before: Ledger | None) -> None:
        """Write the ledger from the log, and say so if it was behind by more than a kill leaves."""
        unknown = set(_charges(self.state)) - (set() if before is None else set(_charges(before)))
        if before is not None and len(unknown) > 1:
            logger.warning(
                f"{len(unknown)} steps or evaluations ran under keys of this run that {self.output_dir / LEDGER} did "
                "not know: it was put back to an earlier state, or a copy of it went on. They may have been "
                "observed, so they are charged, and their noise is not used again."
            )
        records = [public for record in self._log.records if (public := _public_part(record)) is not None]
        self._ledger = ChainedFile.rewrite(self.output_dir / LEDGER, records)
        self._held.callback(self._ledger.close)
        self._log.records.clear()  # they are in `state`

    def _clean(self) -> None:
        """Delete what a kill left in the folder: half-written files, and keys that the log does not name."""
        known = {chain.chain_id for chain in self.state.chains}
        for path in self.keys.folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) or (path.suffix == ".key" and path.stem not in known):
                path.unlink()

    # --- what is added ---

    @property
    def is_intact(self) -> bool:
        """Whether both files are still at their places, as this writer left them."""
        return self._log.is_intact and (self._ledger is None or self._ledger.is_intact)

    def check_intact(self) -> None:
        """Stop a run whose log or ledger was taken from under it.

        Raises:
            DPConfigError: if a file was deleted, replaced or changed since it was opened.
        """
        self._log.check_intact()
        if self._ledger is not None:
            self._ledger.check_intact()

    def digest(self) -> str:
        """Digest of the ledger."""
        assert self._ledger is not None
        return self._ledger.digest

    def _append(self, *records: Mapping[str, Any]) -> None:
        """Take records in, and write them to the log, then to the ledger.

        What cannot be taken in is not written: it would be refused whenever the log is read. If a write fails, no
        further one is possible.
        """
        made = [json.loads(canonical(dict(record))) for record in records]
        if not made:
            return
        self.check_intact()
        for record in made:
            self.state.apply(record)
        self._log.append(*made)
        public = [part for record in made if (part := _public_part(record)) is not None]
        if self._ledger is not None:
            self._log.records.clear()
            if public:
                self._ledger.append(*public)
                self._ledger.records.clear()

    def record_plan(self, plan: Mapping[str, Any], *, must_match: Sequence[str]) -> None:
        """Record the plan of a run, or check that a later run is the same mechanism; see `Ledger.check_plan`.

        Raises:
            DPConfigError: if a field of ``must_match`` differs from the plan recorded last.
        """
        self.state.check_plan(plan, must_match=must_match)
        if self.state.plan is None or differences(self.state.plan, plan, sorted({*self.state.plan, *plan})):
            self._append({"kind": "plan", "plan": plan})

    def start_chain(self, chain: Chain, start_step: int, note: str) -> None:
        """Begin a chain of steps under a key of its own, which is on the disk before the chain has a name here."""
        if not chain.unsafe:
            self.keys.add(chain)
        last = self.state.last_chain
        parent = None if last is None else last.chain_id
        made = ChainRecord(
            chain_id=chain.chain_id, key_id=chain.key_id, start_step=start_step, parent=parent, note=note,
            unsafe=chain.unsafe,
        )  # fmt: skip
        self._append(_record_of(made))

    def charge(self, chain_id: str, step: int) -> None:
        """Charge one optimizer step, durably, before anything of it is computed.

        Args:
            chain_id: a chain of this log.
            step: the step about to run, counted from 1; larger than every step charged to the chain before.

        Raises:
            DPConfigError: if the step, or a later one, was charged to the chain: its noise may have been used.
        """
        chain = self.state.chain(chain_id)
        if chain is not None and step <= chain.reached:
            raise DPConfigError(
                f"Step {step} cannot run on chain {chain_id}, which has reached step {chain.reached}: "
                "the noise of a step would be used for a second batch and could be subtracted out. Steps that are run "
                "again need a new chain with a fresh key."
            )
        self._append({"kind": "step", "chain_id": chain_id, "step": step})

    def lose(self, chain_id: str, step: int) -> None:
        """Note that the release of a charged step is gone; the step stays charged and makes no update."""
        self._append({"kind": "lost", "chain_id": chain_id, "step": step})

    def charge_evaluation(
        self, noise_multiplier: float, adjacency: str, query: Mapping[str, Any], name: str | None = None
    ) -> str:
        """Charge a private evaluation, durably, before a record is looked at; return its id, a new one by default."""
        name = name or secrets.token_hex(8)
        charged = {"noise_multiplier": noise_multiplier, "adjacency": adjacency, "query": dict(query)}
        self._append({"kind": "evaluation", "evaluation": name, **charged})
        return name

    def note_answer(self, evaluation: str, metrics: Mapping[str, float]) -> None:
        """Note what was released for an evaluation."""
        self._append({"kind": "answer", "evaluation": evaluation, "metrics": dict(metrics)})

    def check_data(self, chain_id: str, mark: str) -> None:
        """Note the data of a chain, or check that it is still the same. The mark is private and stays in the log.

        A sampler draws numbers of records or users: where it relies on the steps that each was part of, these numbers
        must not change while the key is the same.

        Raises:
            DPConfigError: if it is another one than the chain began with.
        """
        if self.state.data.get(chain_id, mark) != mark:
            raise DPConfigError(
                "The training records are not those that this run began with, or their order is another one, so "
                "records would be sampled more often than the noise was calibrated for. Resume with the same dataset "
                "(not shuffled, or with a fixed seed), or start over in another output_dir, whose epsilon is added to "
                "that of this run."
            )
        if chain_id not in self.state.data:
            self._append({"kind": "data", "chain_id": chain_id, "mark": mark})

    def note_dataset(self, name: str, digest: str) -> None:
        """Note the digest of a dataset's ledger after the run was charged there; one that lacks it was put back."""
        if self.state.datasets.get(name) != digest:
            self._append({"kind": "dataset", "name": name, "digest": digest})


def _check_same_mechanism(log: Ledger, other: Ledger) -> None:
    """Refuse a record whose plan says something else of what a step costs."""
    if log.plan is None or other.plan is None:
        return
    # a convex head is charged as a whole, by all of its plan
    names = PlanRecord.mechanism_fields() if "noise_strategy" in log.plan else sorted({*log.plan, *other.plan})
    if differing := differences(log.plan, other.plan, names):
        raise DPConfigError(
            f"The plan in {other.path} is not the one that the keys of this run were used for "
            f"({'; '.join(differing)}): it was edited, or is that of another run, and what the steps cost would be "
            "misread. Put the original file back, or use another output_dir; its epsilon adds up."
        )


def _charges(ledger: Ledger) -> Iterator[tuple[str, int]]:
    yield from ((chain.chain_id, step) for chain in ledger.chains for step in chain.steps)
    yield from ((name, 0) for name in ledger.evaluations)


def _public_part(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Part of a record that is published; None for none."""
    if record["kind"] not in PUBLIC:
        return None
    return {"kind": record["kind"]} | {name: record[name] for name in PUBLIC[record["kind"]]}


def _record_of(chain: ChainRecord) -> dict[str, Any]:
    return {"kind": "chain"} | {name: getattr(chain, name) for name in PUBLIC["chain"]}


def lock_ledger(path: Path) -> FileLock:
    """Keep other runs out of a folder.

    Raises:
        DPConfigError: if one is going on there.
    """
    try:
        lock = FileLock.take(Path(f"{path}.lock"), mode=0o644)
    except LockHeld as held:
        raise DPConfigError(
            f"{path} is in use by process {held}; two runs writing one ledger could charge a step once and run it "
            "twice. Wait for that run, stop it, or choose another output_dir."
        ) from None
    if not lock.is_enforced:
        warn_once(
            f"locks {path}",
            f"The filesystem of {path} has no file locks, so it cannot keep a second run out of this folder; the lock "
            "beside the keys does, on machines that share private_state_dir. Start one run at a time.",
        )
    return lock


def _lock_log(folder: Path, path: Path) -> FileLock:
    try:
        lock = FileLock.take(folder / LOCK, mode=0o600)
    except LockHeld as held:
        raise DPConfigError(
            f"The keys of {path} are in use by process {held}, a run on a copy of this folder: what it will use is "
            "not known yet, so this run could draw the same noise. Wait for that run, stop it, or give this one a "
            "private_state_dir of its own; it then takes a fresh key."
        ) from None
    if not lock.is_enforced:
        lock.close()
        raise DPConfigError(
            f"The filesystem of {folder} has no file locks, so two runs could use one noise key. Give "
            "--private_state_dir a folder on a local disk, or on a network disk that is mounted with locks (NFS with "
            "lockd, Lustre with -o flock)."
        )
    return lock
