"""`hf-dpopt doctor`: what a folder holds of a run, what it has cost, and from where it can go on. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer
from dp_accounting import ComposedDpEvent

from hf_dpopt.accounting import accountants
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import is_held
from hf_dpopt.plan.record import earlier_runs_of
from hf_dpopt.run.checkpoint import NEEDED, checkpoints, examine, leftovers
from hf_dpopt.run.keys import RUNS, private_dir
from hf_dpopt.run.ledger import LEDGER
from hf_dpopt.run.resume import decide
from hf_dpopt.run.run_log import Found, find_run

T = TypeVar("T")

HEAD = "convex_head"  # kind of a plan, as `hf_dpopt.convex` writes it
RELATIVE_ERROR = 0.01  # of an epsilon that is shown here; on the safe side


class Health:
    """A folder, the ledger in it and the private folder that belongs to it, as far as they can be read.

    Args:
        output_dir: folder of the run.
        private_state_dir: where it kept its keys; None for the default.

    Raises:
        DPConfigError: if there is no such folder.
    """

    def __init__(self, output_dir: Path, private_state_dir: Path | None = None):
        if not output_dir.is_dir():
            raise DPConfigError(f"{output_dir} is not a folder. Give the output_dir of a run.")
        self.output_dir, self.lock = output_dir, Path(f"{output_dir / LEDGER}.lock")
        self.is_well, self._told = True, dict[str, str]()  # what could not be read -> of what
        self.private_dir = self._tried("keys", lambda: private_dir(private_state_dir, output_dir, is_read=True))
        directory = self.private_dir
        found = None if directory is None else self._tried("ledger", lambda: find_run(output_dir, directory))
        self.found = found or Found(None, None, None)
        self.ledger = self.found.known
        self.checkpoints = [examine(path, self.ledger, needed=NEEDED) for path in checkpoints(output_dir)]
        is_head = self.ledger is not None and (self.ledger.plan or {}).get("kind") == HEAD
        own = (self._head,) if is_head else (self._cost, self._checkpoints, self._left, self._resume)
        for part in (self._run, self._keys, self._lock, *own):
            self._tried(part.__name__.lstrip("_"), part)  # one thing that cannot be read hides no other

    def _tried(self, name: str, read: Callable[[], T]) -> T | None:
        """Return what can be read, or None and a line that says why not."""
        try:
            return read()
        except (DPConfigError, OSError) as error:
            if str(error) not in self._told:
                self._told[str(error)] = name
                self._say(name, str(error), is_wrong=True)
            return None

    def _say(self, name: str, text: str, is_wrong: bool = False) -> None:
        """Print a line on one thing in the folder; `is_wrong` if something has to be done about it."""
        typer.echo(f"{name:<13} {'!' if is_wrong else ' '} {' '.join(text.split())}")
        self.is_well &= not is_wrong

    def _epsilon(self, charged: tuple[int, ...]) -> float | None:
        """Epsilon of so many steps of each chain, with earlier runs; None where the ledger does not say enough."""
        assert self.ledger is not None and self.ledger.plan is not None
        plan = self.ledger.plan
        if not plan.get("is_private", True):
            return math.inf
        if charged == (plan.get("num_steps"),):
            return float(plan["epsilon"])
        try:
            runs = earlier_runs_of(plan, charged, self.ledger.digest(), where=str(self.output_dir))
            event = ComposedDpEvent([run.event for run in runs])
            return accountants.epsilon(event, plan["delta"], plan["adjacency"], relative_error=RELATIVE_ERROR).epsilon
        except DPConfigError:
            return None

    def _run(self) -> None:
        if self.ledger is None:
            if not self.checkpoints and not (self.output_dir / LEDGER).parent.exists():
                self._say(
                    "run", "none has begun in this folder. Name the output_dir that a run was started with", True
                )
            elif "ledger" not in self._told.values():
                self._say("ledger", f"there is none at {self.output_dir / LEDGER}: what was spent is unknown", True)
            return
        plan = self.ledger.plan
        if plan is None:
            self._say("run", "was begun, and stopped before its plan was written")
            return
        sampling, noise = plan.get("sampler", {}).get("name", "?"), plan.get("noise_mechanism", "a convex head's")
        self._say("run", f"{plan.get('num_steps', '?')} steps planned; sampling {sampling}, noise {noise}")
        if self.found.ledger is None:
            self._say("ledger", f"{self.output_dir / LEDGER} is gone; the next run writes it from its log", True)
        else:
            self._say("ledger", f"whole; last record {self.found.ledger.digest()}")

    def _cost(self) -> None:
        ledger = self.ledger
        if ledger is None or ledger.plan is None:
            return
        charged, plan = ledger.charged, ledger.plan
        spent = self._epsilon(charged) if sum(charged) else 0.0
        known = "epsilon not known from this ledger" if spent is None else f"epsilon {spent:.4g}"
        planned = f"{float(plan['epsilon']):.4g} planned" if "epsilon" in plan else "no plan recorded"
        target = f", target {plan['target_epsilon']:g}" if plan.get("target_epsilon") else ""
        at = f" at delta {plan['delta']:g} ({plan['adjacency']})" if "delta" in plan else ""
        steps = f"{sum(charged)} steps charged in {len(charged)} chain{'s' * (len(charged) != 1)}"
        self._say("cost", f"{steps}: {known}{at}; {planned}{target}")
        if self.found.ledger is not None and (behind := self.found.num_unknown):
            self._say("cost", f"{behind} of them are not in the ledger: it was put back. The next run adds them", True)
        for one in ledger.evaluations.values():
            if one.metrics is None:
                self._say(
                    "cost",
                    "a private evaluation was charged and gave no result: its cost counts, and it is not asked again",
                )

    def _head(self) -> None:
        """Say what a convex head cost, which is charged for all steps at once and has no checkpoints."""
        assert self.ledger is not None and self.ledger.plan is not None
        plan, key = self.ledger.plan, self.ledger.last_chain
        epsilon = math.inf if plan.get("epsilon") is None else float(plan["epsilon"])  # None without noise
        steps = (
            f"all {plan.get('num_steps', '?')} steps charged at once" if self.ledger.num_charged else "nothing charged"
        )
        self._say("cost", f"{steps}: epsilon {epsilon:.4g} at delta {plan.get('delta')} ({plan.get('adjacency')})")
        if key is None:
            self._say("resume", "nothing was trained yet")
        elif self.found.keys is None or self.found.keys.load(key.chain_id, key.key_id) is None:
            self._say("resume", "not possible: the run has ended, or its key is gone")
        else:
            self._say("resume", "with the same command, under its key; nothing more is charged")

    def _keys(self) -> None:
        if self.ledger is None or self.private_dir is None:
            return
        keys = self.found.keys
        if keys is None:
            self._say("keys", f"no log of run {self.ledger.run} in {self.private_dir / RUNS} (--private-state-dir)")
            return
        chains = [chain for chain in self.ledger.chains if not chain.unsafe]
        here = sum(keys.load(chain.chain_id, chain.key_id) is not None for chain in chains)
        self._say("keys", f"{keys.folder}: {here} of {len(chains)} kept, beside the log of the run")

    def _lock(self) -> None:
        if self.lock.is_symlink() or (self.lock.exists() and not self.lock.is_file()):
            self._say("lock", f"{self.lock} is a link or no file; a run refuses it", True)
        elif is_held(self.lock):
            owner = self.lock.read_text(errors="replace")[:32].strip() or "unknown"
            self._say("lock", f"in use by process {owner}: the run is going on")
        else:
            self._say("lock", "free")

    def _checkpoints(self) -> None:
        for one in self.checkpoints:
            if one.is_whole:
                self._say(one.folder.name, "whole: all files are those that were saved")
            else:
                self._say(one.folder.name, f"not to resume from: {'; '.join(one.reasons)}. Move it away", True)
        if not self.checkpoints:
            self._say("checkpoints", "none")

    def _left(self) -> None:
        if self.ledger is not None and not is_held(self.lock):
            for path in leftovers(self.output_dir):
                self._say("left", f"{path} of a run that was killed; the next run settles it", True)

    def _resume(self) -> None:
        """Say from where the run can go on, and what it will have cost in the end."""
        ledger = self.ledger
        if ledger is None or ledger.plan is None or "num_steps" not in ledger.plan:
            return
        plan, planned, target = ledger.plan, int(ledger.plan["num_steps"]), ledger.plan.get("target_epsilon")
        last = next((one for one in self.checkpoints if one.is_whole), None)
        if last is not None and last.step >= planned:
            self._say("resume", f"finished: {last.folder.name} is that of the last step")
            return
        try:
            resume = decide(
                ledger, self.found.keys, self.output_dir, step=0 if last is None else last.step,
                manifest=None if last is None else last.manifest, is_private=plan.get("is_private", True),
            )  # fmt: skip
        except DPConfigError:
            if last is not None or max((chain.reached for chain in ledger.chains), default=0) < planned:
                raise
            self._say("resume", "finished: all steps are charged, and no checkpoint was kept; load the saved model")
            return
        start = "from the start" if last is None else f"from {last.folder.name}"
        if (taken := resume.recovery) is not None:
            lost = "" if not taken.lost else f"; {len(taken.lost)} of them cost epsilon and change no weights"
            again = f"steps {taken.first} to {taken.last}, which a resume takes again at no cost{lost}"
            self._say("journal", again)
            start += " and the journal"
        how, paid = "under its key", sum(ledger.charged) - resume.reached
        if resume.chain is None:
            how = "with a fresh key" + (f" ({paid} steps are paid for a second time)" if paid > 0 else "")
        cost = self._epsilon(resume.in_the_end(planned))
        end = "unknown" if cost is None else f"{cost:.4g}"
        is_over = cost is not None and target is not None and cost > target * (1 + RELATIVE_ERROR)
        over = f", above the target {target:g}: raise --target_epsilon or take fewer steps" if is_over else ""
        left = planned - resume.reached
        self._say("resume", f"{start}, {how}; {left} steps are left, epsilon {end} in the end{over}", is_over)
        command = "--resume_from_checkpoint True (trainer.train(resume_from_checkpoint=True))"
        self._say("command", f"that of the run with {command}")


def show_health(output_dir: Path, private_state_dir: Path | None) -> bool:
    """Print what was found in the folder of a run; return whether nothing is wrong with it.

    Args:
        output_dir: folder of the run.
        private_state_dir: where it kept its keys; None for the default.

    Raises:
        DPConfigError: if there is no such folder.
    """
    return Health(output_dir, private_state_dir).is_well
