"""Recovery of a killed run: the steps that it takes again from its journal, and the one that is lost.

A step is charged, then released, then written to the journal, then taken by the optimizer. So of the steps charged
after the checkpoint at most the last one is missing in the journal. It may have been seen, and its noise hides one
batch: it stays charged, is noted in the ledger as lost, and is never drawn again. All others are taken again as they
were released. The run stays on its chain, and what it costs is what was planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.run.journal import BASE, JOURNAL, OPENING, STEP, Contents, Entry, Journal, chains_with_journals
from hf_dpopt.run.keys import Chain, PrivateState, last_own_chain, stays_on_its_chain
from hf_dpopt.run.ledger import ChainRecord, Ledger

_FIX = (
    "Put the folder back as the run left it. Or remove it: the run then goes on as one that kept no journal, from its "
    "last checkpoint, and the steps since are paid for again."
)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Steps to take again.

    Attributes:
        first: the first of them; 1 more than that of the checkpoint.
        last: the last step that was charged.
        lost: those of them without a release.
        is_new: whether the last one is lost, and the ledger does not say so yet.
        entries: step -> entry, on the rank that has the files.
        opening: answer to the query before the first step, if that is among them and was not lost.
    """

    first: int
    last: int
    lost: frozenset[int]
    is_new: bool = False
    entries: Mapping[int, Entry] = dataclasses.field(default_factory=dict, repr=False)
    opening: Entry | None = None

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


class Journals:
    """The journals of one folder, where a run begins or goes on.

    Args:
        plan: plan of the run; without privacy nothing that it releases may be kept.
        output_dir: folder of the run.
        ledger: open for writing, with all steps that its keys were used for.
        state: the keys.
        limit: bytes that the journal may fill; 0 keeps none.
    """

    def __init__(self, plan: PrivacyPlan, output_dir: Path, ledger: Ledger, state: PrivateState, limit: float):
        self._plan, self._output_dir, self._ledger, self._state = plan, output_dir, ledger, state
        self._limit = limit if plan.is_private else 0.0
        self._found: Journal | None = None

    def find(
        self, resume_step: int | None, mark: str | None, initial_weights: Callable[[], str] | None
    ) -> Recovery | None:
        """Find the steps to take again; arguments as of `find_recovery`. Nothing is written.

        Raises:
            DPConfigError: as `find_recovery`, and for a run without checkpoint that no journal leads to.
        """
        found = None
        if self._plan.is_private:
            found = find_recovery(
                self._ledger,
                self._state,
                self._output_dir,
                resume_step,
                mark=mark,
                initial_weights=initial_weights,
                has_opening=self._plan.preclip.opening is not None,
                limit=self._limit,
            )
        if found is not None:
            recovery, self._found = found
            return recovery
        last = last_own_chain(self._ledger)
        reached = 0 if last is None else self._ledger.last_step(last.chain_id) or 0
        if resume_step == 0 and reached >= self._plan.num_steps:
            raise DPConfigError(
                f"The run of {self._ledger.path} is finished: all {reached} steps are charged, and no checkpoint was "
                "kept (save_strategy='no'). Load the model that it saved; or start over without "
                "resume_from_checkpoint (its cost comes on top), or in another output_dir."
            )
        if resume_step == 0 and last is not None and reached:
            raise DPConfigError(
                f"There is no checkpoint in {self._output_dir}, and no journal that leads from the initial weights to "
                f"step {reached}, which {self._ledger.path} has charged. Start over "
                "without resume_from_checkpoint (its cost comes on top), or in another output_dir."
            )
        return None

    def take_up(
        self,
        chain: Chain,
        recovery: Recovery | None,
        reached: int,
        mark: str | None,
        initial_weights: Callable[[], str] | None,
    ) -> Journal:
        """Go on with the journal that was found, or begin one for what comes after `reached` steps."""
        if recovery is not None:
            assert self._found is not None
            if recovery.is_new:
                self._ledger.lose(chain.chain_id, recovery.last)
            self._found.cut_torn()
            recovery.announce()
            return self._found
        limit = 0.0 if chain.unsafe else self._limit
        journal = Journal(self._output_dir, chain.chain_id, chain.journal_key, limit=limit)
        if not limit:
            journal.remove()
            return journal
        journal.contents()
        base = (initial_weights() if initial_weights is not None else "") if reached == 0 else mark or ""
        journal.begin(reached, base)
        return journal


def find_recovery(
    ledger: Ledger,
    state: PrivateState,
    output_dir: Path,
    resume_step: int | None,
    *,
    mark: str | None = None,
    initial_weights: Callable[[], str] | None = None,
    has_opening: bool = False,
    limit: float = 0.0,
) -> tuple[Recovery, Journal] | None:
    """Find what lies between a checkpoint and the last step that was charged; None where no journal leads there.

    Args:
        ledger: open for writing, with all steps that its keys were used for.
        state: the keys.
        output_dir: folder of the run.
        resume_step: step of the checkpoint, 0 for the initial weights; None for training that starts over.
        mark: digest of the ledger that the checkpoint notes; None if the caller answers for its origin.
        initial_weights: digest of the model, for a run that goes on from its initial weights; None to leave that open.
        has_opening: whether a query comes before the first step, so that its answer has to be there.
        limit: bytes that the journal may fill from now on.

    Raises:
        DPConfigError: for a journal of another run, one with an entry that is missing, edited, or not charged in the
            ledger, and for initial weights that are not those the run began from.
    """
    last = last_own_chain(ledger)
    if resume_step is None or last is None:
        return None
    reached = ledger.last_step(last.chain_id) or last.start_step
    is_gapless = ledger.charged[ledger.chains.index(last)] == reached - last.start_step  # a forged ledger may not be
    if (
        not last.start_step <= resume_step < reached
        or not is_gapless
        or not stays_on_its_chain(ledger, state, reached)
    ):
        return None
    strangers = chains_with_journals(output_dir) - {chain.chain_id for chain in ledger.chains}
    if strangers:
        raise _refusal(output_dir, f"it is that of another run ({', '.join(sorted(strangers))})")
    chain = state.load_chain(last.chain_id)
    assert chain is not None, "a run that stays on its chain has its key"
    journal = Journal(output_dir, chain.chain_id, chain.journal_key, limit=limit)
    found = journal.contents()
    if found.torn and not found.entries:
        raise _refusal(output_dir, "nothing in it is as it was written")
    bases = [entry for entry in found.entries if entry.kind == BASE and entry.step <= resume_step]
    if not _continues(ledger, last, resume_step, mark, bases, initial_weights):
        return None
    recovery = _steps_of(ledger, last, resume_step, reached, found, output_dir, has_opening=has_opening)
    return None if recovery is None else (recovery, journal)


def _continues(
    ledger: Ledger,
    chain: ChainRecord,
    resume_step: int,
    mark: str | None,
    bases: Sequence[Entry],
    initial_weights: Callable[[], str] | None,
) -> bool:
    """Whether the steps after the checkpoint, as the chain had them, were made from it."""
    if not bases:
        return False  # a later checkpoint took the place of what is asked for
    if resume_step > chain.start_step:
        charge = ledger.charge_digest(chain.chain_id, resume_step)
        return mark is None or (charge is not None and ledger.is_not_before(mark, charge))
    base = str(bases[-1].header["base"])
    if resume_step > 0:
        return mark is None or mark == base
    if initial_weights is not None and initial_weights() != base:
        raise DPConfigError(
            f"The run of {ledger.path} was killed before its first checkpoint, and began from other weights than the "
            "model has now. Load the same initial model (with the same seed set before new layers or adapters are "
            "made), or start over without resume_from_checkpoint, whose cost comes on top."
        )
    return True


def _steps_of(
    ledger: Ledger,
    chain: ChainRecord,
    resume_step: int,
    reached: int,
    found: Contents,
    output_dir: Path,
    *,
    has_opening: bool,
) -> Recovery | None:
    """The steps after the checkpoint; None if the journal ends more than one step before the ledger."""
    steps: dict[int, Entry] = {}
    openings: dict[int, Entry] = {}
    lost = set(ledger.lost(chain.chain_id))
    for entry in found.entries:
        if entry.kind == BASE:
            continue
        number, count = entry.header["slice"]
        if count != 1:
            raise _refusal(
                output_dir, f"step {entry.step} is slice {number + 1} of {count}, and the others are missing"
            )
        if entry.header["charge"] != ledger.charge_digest(chain.chain_id, entry.step):
            raise _refusal(output_dir, f"step {entry.step} is not charged like that in {ledger.path}")
        of_kind = {STEP: steps, OPENING: openings}[entry.kind]
        if entry.step in of_kind or (entry.kind == STEP and entry.step in lost):
            raise _refusal(output_dir, f"step {entry.step} is there twice, or the ledger says that it was lost")
        of_kind[entry.step] = entry
    needed = [step for step in range(resume_step + 1, reached + 1) if step not in lost]
    missing = [step for step in needed if step not in steps]
    if missing and (missing != list(range(missing[0], reached + 1)) or (found.torn and missing[0] < reached)):
        raise _refusal(
            output_dir, f"the entry of step {missing[0]} is missing or was edited, and later ones are there"
        )
    if len(missing) > 1:
        logger.warning(
            f"The journal of {output_dir} ends before step {missing[0]}, and {reached} steps are charged: the run "
            "goes on as one without a journal."
        )
        return None
    first = chain.start_step + 1
    opening = openings.get(first) if resume_step == chain.start_step else None
    if has_opening and opening is None and first in steps and resume_step == chain.start_step == 0:
        raise _refusal(output_dir, "the answer to the query before the first step is missing")
    again = frozenset(step for step in (*lost, *missing) if step > resume_step)
    entries = {step: steps[step] for step in needed if step in steps}
    return Recovery(resume_step + 1, reached, again, bool(missing), entries, opening)


def _refusal(output_dir: Path, what: str) -> DPConfigError:
    return DPConfigError(f"The journal in {output_dir / JOURNAL} cannot be gone on with: {what}. {_FIX}")
