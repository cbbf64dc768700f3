"""Records of what a run was charged, in the log beside the keys and in the ledger that is published.

Both hold the same records in the same order; `hf_dpopt.run.run_log` writes them. A step is recorded before it runs,
and nothing removes a record: resuming, crashing, branching from an older checkpoint and calling ``train()`` again all
add. The ledger holds public values only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.chained import GENESIS, ChainedFile, canonical
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import is_held

VERSION = 1  # of the format; a file of another one is refused
LEDGER = Path("privacy") / "ledger.jsonl"  # in the output_dir of a run
TAKEN_IN = "taken in from another record of this run"  # note of a chain that the log did not begin
LEAST_NOISE = 1e-9  # noise multiplier of an evaluation that anybody would ask
RUN_ID = re.compile(r"[0-9a-f]{16}")
_CHAIN_ID = re.compile(r"(unsafe)?[0-9a-f]{16}")
_KEY_ID = re.compile(r"[0-9a-f]{32}")
# Fields of the records that are published; records of other kinds stay in the log.
PUBLIC: Mapping[str, tuple[str, ...]] = {
    "header": ("version", "run", "parent"),
    "plan": ("plan",),
    "chain": ("chain_id", "key_id", "start_step", "parent", "note", "unsafe"),
    "step": ("chain_id", "step"),
    "lost": ("chain_id", "step"),
    "evaluation": ("evaluation", "noise_multiplier", "adjacency", "query"),
    "answer": ("evaluation", "metrics"),
}
_FIX = "Put the original file back; or delete a ledger whose checkpoint and log are here, and it is made again."


@dataclasses.dataclass(kw_only=True, eq=False)
class ChainRecord:
    """An uninterrupted sequence of steps under one noise key.

    Attributes:
        chain_id: public name of the chain.
        key_id: commitment to its key; tells two keys apart and reveals neither.
        start_step: the chain's first step is the one after this.
        parent: the chain it branched from or came after; None for the first one.
        note: why the chain began.
        unsafe: the key was fixed by the user, so nothing is private.
        plan: the plan that it began under; None where none was recorded.
        steps: steps that were charged, in order.
        lost: those of them whose release was lost: they made no update, and are not drawn again.
    """

    chain_id: str
    key_id: str
    start_step: int
    parent: str | None
    note: str
    unsafe: bool
    plan: Mapping[str, Any] | None = None
    steps: dict[int, None] = dataclasses.field(default_factory=dict)
    lost: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.reached = self.start_step  # the last step that was charged

    def charge(self, step: int) -> None:
        """Take in a step."""
        self.steps[step] = None
        self.reached = max(self.reached, step)

    @property
    def is_own(self) -> bool:
        """Whether the log began it, so that it may go on; else it only costs."""
        return self.note != TAKEN_IN


@dataclasses.dataclass
class Evaluation:
    """A private evaluation that was charged, and what was released for it, if anything was."""

    noise_multiplier: float
    adjacency: str
    query: Mapping[str, Any]
    metrics: Mapping[str, float] | None = None


class Ledger:
    """State that the records of a run add up to; made by `read`, or by `hf_dpopt.run.run_log.RunLog`.

    Args:
        path: file that errors name.

    Attributes:
        run: random id of the run.
        parent: id of the run that it goes on from without having its log; None for none.
        plans: all plans that were recorded, oldest first.
        evaluations: private evaluations by their ids.
        data: chain -> mark of the records that it is trained on; in the log alone.
        datasets: name of a dataset's ledger -> its digest when the run was charged there; in the log alone.
    """

    def __init__(self, path: Path):
        self.path = path
        self.run = ""
        self.parent: str | None = None
        self.plans: list[dict[str, Any]] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.data: dict[str, str] = {}
        self.datasets: dict[str, str] = {}
        self._chains: dict[str, ChainRecord] = {}
        self._digest = GENESIS

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read and verify a file of records without locking; safe while a run is writing.

        Raises:
            DPConfigError: if there is none, or if a line was changed.
        """
        path = Path(path)
        if not path.exists():
            raise DPConfigError(
                f"There is no ledger at {path}, so what was spent on the data is unknown. Give the output_dir of the "
                "run; a ledger that was deleted is written again when the run is resumed."
            )
        file, found = ChainedFile.read(path), cls(path)
        if not file.records:
            raise DPConfigError(f"{path} is empty or has no whole line, not even the header. {_FIX}")
        for record in file.records:
            found.apply(record)
        found._digest = file.digest
        return found

    @classmethod
    def find(cls, output_dir: str | os.PathLike[str]) -> Ledger | None:
        """Read the ledger of the run in a folder; None if there is none.

        Raises:
            DPConfigError: if a line was changed.
        """
        path = Path(output_dir) / LEDGER
        return cls.read(path) if os.path.lexists(path) else None

    @staticmethod
    def is_in_use(path: str | os.PathLike[str]) -> bool:
        """Whether a run has the ledger open for writing, as far as this machine's locks tell."""
        return is_held(Path(f"{path}.lock"))

    # --- what it says ---

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan recorded last, or None."""
        return self.plans[-1] if self.plans else None

    def plan_of(self, chain: ChainRecord | None) -> Mapping[str, Any] | None:
        """The plan that a chain began under; without one the plan recorded last, or None."""
        return self.plan if chain is None or chain.plan is None else chain.plan

    @property
    def chains(self) -> tuple[ChainRecord, ...]:
        """All chains, oldest first."""
        return tuple(self._chains.values())

    @property
    def last_chain(self) -> ChainRecord | None:
        """The chain started last, or None."""
        return self.chains[-1] if self._chains else None

    def chain(self, chain_id: str) -> ChainRecord | None:
        """The chain of that name, or None."""
        return self._chains.get(chain_id)

    @property
    def charged(self) -> tuple[int, ...]:
        """Steps charged to each chain, oldest first. Chains draw apart, so their sum may not tell the cost."""
        return tuple(len(chain.steps) for chain in self.chains)

    @property
    def num_charged(self) -> int:
        """Steps charged over all chains."""
        return sum(self.charged)

    @property
    def num_lost(self) -> int:
        """Charged steps without an update, over all chains."""
        return sum(len(chain.lost) for chain in self.chains)

    def digest(self) -> str:
        """SHA-256 of the last record, and through it of all: quote it, and no record can be changed or removed."""
        return self._digest

    def answer(self, query: Mapping[str, Any]) -> Evaluation | None:
        """An evaluation of the same set, scores and weights; the one that was answered, if there is one."""
        asked = json.loads(canonical(dict(query)))
        same = [one for one in self.evaluations.values() if one.query == asked]
        return next((one for one in same if one.metrics is not None), same[0] if same else None)

    def check_plan(
        self, plan: Mapping[str, Any], *, must_match: Sequence[str], since: ChainRecord | None = None
    ) -> None:
        """Check that a plan has the mechanism that is recorded, if one is.

        Args:
            plan: public values, JSON-able.
            must_match: the fields that make the mechanism. The others (``num_steps``, ``target_epsilon``) may change.
            since: the chain whose plan is compared; None for the plan recorded last.

        Raises:
            DPConfigError: if a field of ``must_match`` differs.
        """
        if differing := differences(self.plan_of(since), plan, must_match):
            raise DPConfigError(
                f"The run recorded in {self.path} used another private mechanism ({'; '.join(differing)}). Continue "
                "with the same options, or choose another output_dir; on the same data its epsilon is added."
            )

    # --- records ---

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take in the next record; refuse one that a run could not have written here.

        Hashes have no key, so whoever can write to `output_dir` can make any record. Names of runs and chains become
        names of files, so only their form is let in.
        """
        name, step = record.get("chain_id"), record.get("step")
        chain = self.chain(name) if isinstance(name, str) and type(step) is int else None
        match record if self.run or record.get("kind") == "header" else {}:
            case {"kind": "header", "version": int(version)} if version > VERSION:
                raise DPConfigError(
                    f"{self.path} has format {version}, and this release of hf_dpopt knows format {VERSION}: what it "
                    "charges would be misread. Use the release that wrote it, or a newer one."
                )
            case {"kind": "header", "version": int(version), "run": run, "parent": parent} if (
                not self.run and version == VERSION and is_run_id(run) and (parent is None or is_run_id(parent))
            ):
                self.run, self.parent = run, parent
            case {"kind": "plan", "plan": dict(plan)}:
                self.plans.append(plan)
            case {"kind": "chain"} if self._is_new_chain(record):
                fields = {name: record[name] for name in PUBLIC["chain"]}
                self._chains[record["chain_id"]] = ChainRecord(**fields, plan=self.plan)
            case {"kind": "step"} if (
                chain and step is not None and step > chain.start_step and step not in chain.steps
            ):
                chain.charge(step)
            case {"kind": "lost"} if chain and step in chain.steps and step not in chain.lost:
                chain.lost.add(step)
            case {
                "kind": "evaluation", "evaluation": id_, "noise_multiplier": noise,
                "adjacency": str(adjacency), "query": dict(query),
            } if (
                is_run_id(id_) and id_ not in self.evaluations and adjacency in SENSITIVITY_FACTOR
                and type(noise) in (int, float) and LEAST_NOISE < noise < 1 / LEAST_NOISE
            ):  # fmt: skip
                self.evaluations[id_] = Evaluation(noise, adjacency, query)
            case {"kind": "answer", "evaluation": str(id_), "metrics": dict(metrics)} if (
                id_ in self.evaluations and self.evaluations[id_].metrics is None
                and all(type(value) in (int, float) for value in metrics.values())
            ):  # fmt: skip
                self.evaluations[id_].metrics = metrics
            case {"kind": "data", "chain_id": str(chain_id), "mark": str(mark)} if chain_id in self._chains:
                self.data[chain_id] = mark
            case {"kind": "dataset", "name": str(name), "digest": str(digest)}:
                self.datasets[name] = digest
            case _:
                raise DPConfigError(
                    f"{self.path} has a record that no run writes: {canonical(dict(record)):.200}. {_FIX}"
                )

    def _is_new_chain(self, record: Mapping[str, Any]) -> bool:
        """Whether a run could begin a chain with this record: a new name, and a key that no other chain has."""
        match record:
            case {
                "chain_id": str(chain_id), "key_id": str(key_id), "start_step": start, "note": str(),
                "parent": str() | None as parent, "unsafe": bool(unsafe),
            }:  # fmt: skip
                named = _CHAIN_ID.fullmatch(chain_id)
                is_named = named is not None and bool(named[1]) == unsafe and bool(_KEY_ID.fullmatch(key_id))
                is_fresh = unsafe or all(chain.key_id != key_id for chain in self.chains)
                is_new = chain_id not in self._chains and (parent is None or parent in self._chains)
                return is_named and is_fresh and is_new and type(start) is int and start >= 0
        return False


def is_run_id(value: object) -> bool:
    """Whether a value that was read from a file has the form of the id of a run."""
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


def differences(before: Mapping[str, Any] | None, plan: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Fields in which a plan differs from one that was recorded before, if one was, and how."""
    return [] if before is None else list(_differences(before, json.loads(canonical(dict(plan))), names))


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str], inside: str = ""
) -> Iterator[str]:
    """Differences between two plans, in mappings entry by entry. A missing field counts as None."""
    for name in names:
        then, now = old.get(name), new.get(name)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, sorted({*then, *now}), f"{inside}{name}.")
        elif canonical({"": then}) != canonical({"": now}) or (inside and (name in old) != (name in new)):
            was, is_now = old.get(name, "absent"), new.get(name, "absent")
            yield f"{inside}{name}: {was!r} in the ledger, {is_now!r} now"
