"""The decision how a run resumes: after which step, under which key, and which steps it takes again from its journal.

A step is charged, then released, then written to the journal, then taken by the optimizer. So of the steps charged
after the checkpoint at most the last one is missing in the journal. It may have been seen, and its noise hides one
batch: it stays charged, is noted as lost, and is never drawn again. All others are taken again as they were released.
The run stays on its chain, and what it costs is what was planned. Where no journal leads from the checkpoint to the
last step that was charged, the next steps get a fresh key, and what they cost comes on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.run.checkpoint import Manifest
from hf_dpopt.run.journal import JOURNAL, SUFFIX, Contents, Journal
from hf_dpopt.run.keys import Keys
from hf_dpopt.run.ledger import ChainRecord, Ledger

_FIX = (
    "Restore the folder as the run left it. Or remove it: the run then resumes from its last checkpoint without a "
    "journal, and is charged for the steps since then again."
)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Steps to take again.

    Attributes:
        first: the first of them; 1 more than that of the checkpoint.
        last: the last step that was charged.
        lost: those of them without a release; the log may not say so yet.
        entries: step -> entry, on the rank that has the files.
        opening: answer to the query before the first step, if that is among them and was not lost.
    """

    first: int
    last: int
    lost: frozenset[int]
    entries: Mapping[int, Path] = dataclasses.field(default_factory=dict, repr=False)
    opening: Path | None = None

    def covers(self, step: int) -> bool:
        """Whether a step is taken again."""
        return self.first <= step <= self.last

    def announce(self) -> None:
        """Say in the log what is taken again, and what is lost."""
        logger.info(
            f"Steps {self.first} to {self.last} were charged after the checkpoint and are taken again from the "
            "journal of releases: no record is read, and nothing is charged."
        )
        if self.lost:
            lost = ", ".join(map(str, sorted(self.lost)))
            logger.warning(
                f"Charged, but not written down when the run was killed: step {lost}. It makes no update and is never "
                "drawn again; epsilon is what was planned."
            )


@dataclasses.dataclass(frozen=True)
class Resume:
    """The way in which a run goes on.

    Attributes:
        step: step of the checkpoint, 0 for the initial weights; None for training that begins anew.
        chain: the chain that goes on; None for a fresh key.
        note: why a fresh key is needed; empty if none is.
        recovery: steps that are taken again; None for none.
        charged: steps of each chain that are charged now; the last entry is that of the chain in progress, 0 if it
            is a new one.
        base: what a journal that begins now continues: origin of the checkpoint; empty for initial weights.
    """

    step: int | None
    chain: ChainRecord | None
    note: str
    recovery: Recovery | None
    charged: tuple[int, ...]
    base: str

    @property
    def reached(self) -> int:
        """Steps that are done when the first new one is charged."""
        return (self.step or 0) if self.recovery is None else self.recovery.last

    @property
    def start(self) -> int:
        """Steps that are done when the chain in progress begins."""
        return self.reached if self.chain is None else self.chain.start_step

    def in_the_end(self, num_steps: int) -> tuple[int, ...]:
        """Steps of each chain when the run has reached `num_steps`; the chain in progress comes last."""
        return (*self.charged[:-1], self.charged[-1] + max(0, num_steps - self.reached))


def decide(
    ledger: Ledger,
    keys: Keys | None,
    output_dir: Path,
    *,
    step: int | None,
    manifest: Manifest | None = None,
    initial_weights: Callable[[], str] | None = None,
    has_opening: bool = False,
    is_private: bool = True,
) -> Resume:
    """Decide how a run goes on. Reads keys and journal, and writes nothing.

    Args:
        ledger: record of the run, in which all that is known is charged.
        keys: its keys; None if there are none here.
        output_dir: folder of the run, with its journal.
        step: step of the checkpoint, 0 for the initial weights; None for training that begins anew.
        manifest: that of the checkpoint; None if there is none, or the caller answers for its origin.
        initial_weights: digest of the model, for a run that goes on from its initial weights; None to leave that open.
        has_opening: whether a query comes before the first step, so that its answer has to be there.
        is_private: whether the run has a journal: what is released without noise is not kept.

    Raises:
        DPConfigError: for a checkpoint that nothing was charged for, a journal with an entry that is missing or not
            charged, initial weights that are not those the run began from, and a run without checkpoint that no
            journal leads to.
    """

    def resume(chain: ChainRecord | None, note: str = "", recovery: Recovery | None = None) -> Resume:
        others = [len(one.steps) for one in ledger.chains if one is not chain]
        charged = (*others, 0 if chain is None else len(chain.steps))
        return Resume(step, chain, note, recovery, charged, "" if manifest is None else manifest.origin)

    if step is None:
        return resume(None, "training started over" if ledger.chains else "first run")
    _check_charged(ledger, step)
    journals = {path.name.partition("-")[0] for path in (output_dir / JOURNAL).glob(f"*{SUFFIX}")}
    own = [chain for chain in reversed(ledger.chains) if chain.is_own]
    named = journals | ({manifest.chain} if manifest is not None else set())
    notes = []
    for chain in (*own[:1], *(chain for chain in own[1:] if chain.chain_id in named)):
        if is_private and _has_key(keys, chain) and chain.start_step <= step < chain.reached:
            found = _find_journal(chain, output_dir, step, manifest, initial_weights)
            recovery = None if found is None else _steps_of(chain, step, found, output_dir, has_opening)
            if recovery is not None:
                return resume(chain, recovery=recovery)
        notes.append(_why_fresh(keys, chain, step, manifest))
        if not notes[-1]:
            return resume(chain)
    if step == 0 and own:
        _check_begins(ledger, own[0], output_dir)
    notes.append(f"resumed at step {step}; no chain began here" if ledger.chains else "first run")
    return resume(None, notes[0])


def _has_key(keys: Keys | None, chain: ChainRecord) -> bool:
    return keys is not None and keys.load(chain.chain_id, chain.key_id) is not None


def _check_charged(ledger: Ledger, step: int) -> None:
    """Refuse a checkpoint whose cost is not known."""
    if step and not any(chain.start_step <= step <= chain.reached for chain in ledger.chains):
        reached = max((chain.reached for chain in ledger.chains), default=0)
        raise DPConfigError(
            f"The checkpoint is at step {step}, but {ledger.path} has charged no run that reached it (it ends at step "
            f"{reached}): what the checkpoint cost is unknown. Resume with the ledger of the run that wrote the "
            "checkpoint; to start from a model that was trained elsewhere, load it as the initial model."
        )


def _check_begins(ledger: Ledger, last: ChainRecord, output_dir: Path) -> None:
    """Refuse to resume a run from its initial weights where steps were charged that nothing leads to."""
    if last.reached:
        raise DPConfigError(
            f"There is no whole checkpoint in {output_dir}, and no journal that leads from the initial weights to "
            f"step {last.reached}, which {ledger.path} has charged. If the run is finished, load the model that it "
            "saved; else start over without resume_from_checkpoint (its cost comes on top), or in another output_dir."
        )


def _why_fresh(keys: Keys | None, chain: ChainRecord, step: int, manifest: Manifest | None) -> str:
    """Reason why a chain cannot go on after a checkpoint; empty if it can."""
    reason = ""
    if chain.reached != step:
        reason = f"step {chain.reached} of the chain before was charged"
    elif manifest is not None and step > chain.start_step and manifest.chain != chain.chain_id:
        reason = "the checkpoint is that of an earlier chain, with other weights"
    elif not _has_key(keys, chain):
        reason = "the key of the chain before is not here"
    return reason and f"resumed at step {step}; {reason}"


# --- the journal ---


def _find_journal(
    chain: ChainRecord,
    output_dir: Path,
    step: int,
    manifest: Manifest | None,
    initial_weights: Callable[[], str] | None,
) -> Contents | None:
    """The journal that leads on from a checkpoint; None if there is none."""
    found = Journal(output_dir, chain.chain_id).contents()
    if damaged := found.damaged - chain.lost - {chain.reached}:  # of the last step, a release may be lost
        raise _refusal(output_dir, f"the entry of step {min(damaged)} is not what was written")
    bases = [base for of_step, base in found.bases.items() if of_step <= step]
    # without a base, a later checkpoint took the place of what is asked for
    if not bases or (manifest is not None and not _leads_on(chain, step, manifest, bases[-1])):
        return None
    if step == 0 and initial_weights is not None and initial_weights() != bases[-1]:
        raise DPConfigError(
            f"The run of {output_dir} was killed before its first checkpoint, and began from other weights than the "
            "model has now. Load the same initial model (with the same seed set before new layers or adapters are "
            "made), or start over without resume_from_checkpoint, whose cost is added."
        )
    return found


def _leads_on(chain: ChainRecord, step: int, manifest: Manifest, base: str) -> bool:
    """Whether the steps after a checkpoint, as the chain had them, were made from it."""
    return manifest.chain == chain.chain_id if step > chain.start_step else manifest.origin == base


def _steps_of(chain: ChainRecord, step: int, found: Contents, output_dir: Path, has_opening: bool) -> Recovery | None:
    """The steps after the checkpoint; None if the journal ends more than one step before what was charged."""
    lost, reached, steps = chain.lost, chain.reached, found.steps
    needed = [one for one in range(step + 1, reached + 1) if one not in lost]
    missing = [one for one in needed if one not in steps]
    if strange := (steps.keys() | found.openings.keys()) - chain.steps.keys() | (steps.keys() & lost):
        raise _refusal(output_dir, f"the log of the run knows of no release of step {min(strange)}")
    if missing and missing != list(range(missing[0], reached + 1)):
        raise _refusal(output_dir, f"the entry of step {missing[0]} is missing, and later ones are there")
    if len(missing) > 1:
        logger.warning(
            f"The journal of {output_dir} ends before step {missing[0]}, and {reached} steps are charged: the run "
            "goes on as one without a journal."
        )
        return None
    first = chain.start_step + 1
    opening = found.openings.get(first) if step == chain.start_step else None
    if has_opening and opening is None and first in steps and step == chain.start_step == 0:
        raise _refusal(output_dir, "the answer to the query before the first step is missing")
    again = frozenset(one for one in (*lost, *missing) if one > step)
    return Recovery(step + 1, reached, again, {one: steps[one] for one in needed if one in steps}, opening)


def _refusal(output_dir: Path, what: str) -> DPConfigError:
    return DPConfigError(f"Cannot resume from the journal in {output_dir / JOURNAL}: {what}. {_FIX}")
