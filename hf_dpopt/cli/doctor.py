"""`hf-dpopt doctor`: what a folder holds of a run, what it has cost, and from where it can go on. Changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import typer

from hf_dpopt.accounting import accountants
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import is_held
from hf_dpopt.plan.record import earlier_runs_of
from hf_dpopt.run.checkpoint import NEEDED, Checkpoint, checkpoints, examine, leftovers
from hf_dpopt.run.keys import RUNS, private_dir
from hf_dpopt.run.ledger import LEDGER
from hf_dpopt.run.log import Found, find_run
from hf_dpopt.run.resume import decide

T = TypeVar("T")

HEAD = "convex_head"  # kind of a plan, as `hf_dpopt.convex` writes it
RELATIVE_ERROR = 0.01  # of an epsilon that is shown here; on the safe side


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line on one thing in the folder.

    Attributes:
        name: what the line is about.
        text: what it is, or what is wrong with it.
        is_wrong: whether something has to be done about it.
    """

    name: str
    text: str
    is_wrong: bool = False


class Examination:
    """A folder, the ledger in it, and the private folder that belongs to it, as far as they can be read.

    Args:
        output_dir: folder of the run.
        private_state_dir: where it kept its keys; None for the default.

    Raises:
        DPConfigError: if there is no such folder.
    """

    def __init__(self, output_dir: Path, private_state_dir: Path | None = None):
        if not output_dir.is_dir():
            raise DPConfigError(f"{output_dir} is not a folder. Give the output_dir of a run.")
        self.output_dir = output_dir
        self.problems: list[Entry] = []
        directory = self._read("keys", lambda: private_dir(private_state_dir, output_dir, is_read=True))
        found = None if directory is None else self._read("ledger", lambda: find_run(output_dir, directory))
        self.private_dir, self.found = directory, found or Found(None, None, None)
        self.ledger = self.found.known
        self.checkpoints = [examine(path, self.ledger, needed=NEEDED) for path in checkpoints(output_dir)]

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """Return what can be read, or None and an entry that says why not."""
        try:
            return read()
        except (DPConfigError, OSError) as error:
            self.problems.append(Entry(name, str(error), is_wrong=True))
            return None

    # --- what can be said ---

    @property
    def lock(self) -> Path:
        """Lock of the ledger."""
        return Path(f"{self.output_dir / LEDGER}.lock")

    @property
    def is_head(self) -> bool:
        """Whether the run is that of a convex head: one charge for all steps, and no checkpoints."""
        return self.ledger is not None and (self.ledger.plan or {}).get("kind") == HEAD

    @property
    def last_whole(self) -> Checkpoint | None:
        """The checkpoint that a run would go on from."""
        return next((one for one in self.checkpoints if one.is_whole), None)

    def epsilon(self, charged: tuple[int, ...]) -> float | None:
        """Epsilon of so many steps of each chain, with earlier runs; None where the ledger does not say enough."""
        assert self.ledger is not None and self.ledger.plan is not None
        plan = self.ledger.plan
        if self.is_head:  # charged as a whole, once
            return math.inf if plan.get("epsilon") is None else float(plan["epsilon"])
        if not plan.get("is_private", True):
            return math.inf
        if charged == (plan.get("num_steps"),):
            return float(plan["epsilon"])
        try:
            *before, this = earlier_runs_of(plan, charged, self.ledger.digest(), where=str(self.output_dir))
            release = dataclasses.replace(this.release, earlier=tuple(before))
            event = release.event_of_draws(this.draw_stddev, this.charged)
            spent = accountants.epsilon(event, plan["delta"], plan["adjacency"], relative_error=RELATIVE_ERROR)
            return spent.epsilon
        except DPConfigError:
            return None


def entries(found: Examination) -> Iterator[Entry]:
    """Everything there is to say, line by line."""
    yield from found.problems
    told = {problem.text for problem in found.problems}
    for say in SAID:
        try:
            yield from say(found)
        except (DPConfigError, OSError) as error:  # one thing that cannot be read hides no other
            if str(error) not in told:
                told.add(str(error))
                yield Entry(say.__name__.lstrip("_"), str(error), is_wrong=True)


def _run(found: Examination) -> Iterator[Entry]:
    if found.ledger is None:
        if not any(problem.name == "ledger" for problem in found.problems):
            yield Entry("ledger", f"there is none at {found.output_dir / LEDGER}: what was spent is unknown", True)
        return
    plan = found.ledger.plan
    if plan is None:
        yield Entry("run", "was begun, and stopped before its plan was written")
        return
    sampling, noise = plan.get("sampler", {}).get("name", "?"), plan.get("noise_mechanism", "a convex head's")
    yield Entry("run", f"{plan.get('num_steps', '?')} steps planned; sampling {sampling}, noise {noise}")
    if found.found.ledger is None:
        yield Entry("ledger", f"{found.output_dir / LEDGER} is gone; the next run writes it from its log", True)
    else:
        yield Entry("ledger", f"whole; last record {found.found.ledger.digest()}")


def _cost(found: Examination) -> Iterator[Entry]:
    ledger = found.ledger
    if ledger is None or ledger.plan is None:
        return
    charged, plan = ledger.charged, ledger.plan
    spent = found.epsilon(charged) if sum(charged) else 0.0
    known = "epsilon not known from this ledger" if spent is None else f"epsilon {spent:.4g}"
    planned = "no plan recorded"
    if "epsilon" in plan:  # a head's is None without noise
        planned = f"{math.inf if plan['epsilon'] is None else float(plan['epsilon']):.4g} planned"
    target = f", target {plan['target_epsilon']:g}" if plan.get("target_epsilon") else ""
    at = f" at delta {plan['delta']:g} ({plan['adjacency']})" if "delta" in plan else ""
    steps = f"{sum(charged)} steps charged in {len(charged)} chain{'s' * (len(charged) != 1)}"
    if found.is_head:
        steps = f"all {plan.get('num_steps', '?')} steps charged at once" if sum(charged) else "nothing charged"
    yield Entry("cost", f"{steps}: {known}{at}; {planned}{target}")
    if found.found.ledger is not None and (behind := found.found.num_unknown):
        yield Entry("cost", f"{behind} of them are not in the ledger: it was put back. The next run adds them", True)
    for one in ledger.evaluations.values():
        if one.metrics is None:
            yield Entry("cost", "a private evaluation was charged and not answered: it is lost, and counts")


def _keys(found: Examination) -> Iterator[Entry]:
    if found.ledger is None or found.private_dir is None:
        return
    keys = found.found.keys
    if keys is None:
        yield Entry("keys", f"no log of run {found.ledger.run} in {found.private_dir / RUNS} (--private-state-dir)")
        return
    chains = [chain for chain in found.ledger.chains if not chain.unsafe]
    here = sum(keys.load(chain.chain_id, chain.key_id) is not None for chain in chains)
    yield Entry("keys", f"{keys.folder}: {here} of {len(chains)} kept, beside the log of the run")


def _lock(found: Examination) -> Iterator[Entry]:
    if found.lock.is_symlink() or (found.lock.exists() and not found.lock.is_file()):
        yield Entry("lock", f"{found.lock} is a link or no file; a run refuses it", True)
    elif is_held(found.lock):
        owner = found.lock.read_text(errors="replace")[:32].strip() or "unknown"
        yield Entry("lock", f"in use by process {owner}: the run is going on")
    else:
        yield Entry("lock", "free")


def _checkpoints(found: Examination) -> Iterator[Entry]:
    for one in found.checkpoints:
        if not one.is_whole:
            yield Entry(one.folder.name, f"not to resume from: {'; '.join(one.reasons)}. Move it away", True)
        else:
            yield Entry(one.folder.name, "whole: all files are those that were saved")
    if not found.checkpoints and not found.is_head:
        yield Entry("checkpoints", "none")


def _left(found: Examination) -> Iterator[Entry]:
    if found.ledger is not None and not is_held(found.lock):
        for path in leftovers(found.output_dir):
            yield Entry("left", f"{path} of a run that was killed; the next run settles it", True)


def _resume(found: Examination) -> Iterator[Entry]:
    """Say from where the run can go on, and what it will have cost in the end."""
    ledger, last = found.ledger, found.last_whole
    if ledger is None or ledger.plan is None or "num_steps" not in ledger.plan:
        return
    if found.is_head:  # it costs nothing more, and has no checkpoints
        key = ledger.last_chain
        if key is None:
            yield Entry("resume", "nothing was trained yet")
        elif found.found.keys is None or found.found.keys.load(key.chain_id, key.key_id) is None:
            yield Entry("resume", "not possible: the run has ended, or its key is gone")
        else:
            yield Entry("resume", "with the same command, under its key; nothing more is charged")
        return
    plan, planned, target = ledger.plan, int(ledger.plan["num_steps"]), ledger.plan.get("target_epsilon")
    if last is not None and last.step >= planned:
        yield Entry("resume", f"finished: {last.folder.name} is that of the last step")
        return
    reached = max((chain.reached for chain in ledger.chains), default=0)
    try:
        resume = decide(
            ledger, found.found.keys, found.output_dir, step=0 if last is None else last.step,
            manifest=None if last is None else last.manifest, is_private=plan.get("is_private", True),
        )  # fmt: skip
    except DPConfigError:
        if last is not None or reached < planned:
            raise
        yield Entry("resume", "finished: all steps are charged, and no checkpoint was kept; load the saved model")
        return
    start = "from the start" if last is None else f"from {last.folder.name}"
    if (taken := resume.recovery) is not None:
        lost = "" if not taken.lost else f"; {len(taken.lost)} of them charged without a release, and lost"
        yield Entry("journal", f"steps {taken.first} to {taken.last}, which a resume takes again for nothing{lost}")
        start += " and the journal"
    cost = found.epsilon(resume.in_the_end(planned))
    again = sum(ledger.charged) - resume.reached
    how = "under its key" if resume.chain is not None else "with a fresh key"
    if again > 0 and resume.chain is None:
        how += f" ({again} steps are paid for a second time)"
    end = "unknown" if cost is None else f"{cost:.4g}"
    is_over = cost is not None and target is not None and cost > target * (1 + RELATIVE_ERROR)
    over = f", above the target {target:g}: raise --target_epsilon or take fewer steps" if is_over else ""
    left = planned - resume.reached
    yield Entry("resume", f"{start}, {how}; {left} steps are left, epsilon {end} in the end{over}", is_over)
    yield Entry(
        "command", "that of the run with --resume_from_checkpoint True (trainer.train(resume_from_checkpoint=True))"
    )


# One function for each part of a run; what another part has to say is one more.
SAID: tuple[Callable[[Examination], Iterator[Entry]], ...] = (
    _run, _cost, _keys, _lock, _checkpoints, _left, _resume,
)  # fmt: skip


def show_health(output_dir: Path, private_state_dir: Path | None) -> bool:
    """Print what was found in the folder of a run; return whether nothing is wrong with it.

    Args:
        output_dir: folder of the run.
        private_state_dir: where it kept its keys; None for the default.

    Raises:
        DPConfigError: if there is no such folder.
    """
    is_well = True
    for entry in entries(Examination(output_dir, private_state_dir)):
        typer.echo(f"{entry.name:<13} {'!' if entry.is_wrong else ' '} {' '.join(entry.text.split())}")
        is_well &= not entry.is_wrong
    return is_well
