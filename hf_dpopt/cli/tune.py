"""`hf-dpopt tune`: the best of a random number of private runs, and nothing of the others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import typer

from hf_dpopt.accounting.selection import RunCount
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.bounds import check_budget
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.dataset_ledger import DatasetBudget, DatasetLedger
from hf_dpopt.tuning.command import Command, check_space
from hf_dpopt.tuning.release import release
from hf_dpopt.tuning.search import Tuning
from hf_dpopt.tuning.space import Space


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Values of the command line."""

    command: list[str]
    output_dir: Path
    epsilon: float
    space: str
    metric: str
    runs: float
    shape: float
    minimize: bool
    private_state_dir: Path | None
    privacy_ledger: str | None
    privacy_ledger_epsilon: float | None

    @property
    def dataset(self) -> DatasetBudget | None:
        """The ledger of the people in the data."""
        if self.privacy_ledger is None and self.privacy_ledger_epsilon is not None:
            raise DPConfigError("--privacy-ledger-epsilon is the budget of a ledger. Add --privacy-ledger FILE.")
        if self.privacy_ledger is None:
            return None
        return DatasetBudget(self.privacy_ledger, self.privacy_ledger_epsilon)


def run_tuning(asked: Asked) -> bool:
    """Run a tuning to its end; return whether something was released.

    Nothing that is printed before the release depends on a run.
    """
    law, space = RunCount(mean=asked.runs, shape=asked.shape), Space.read(asked.space)
    check_budget(asked.epsilon)
    if asked.dataset is not None and os.path.exists(path := asked.dataset.path) and os.path.getsize(path):
        DatasetLedger.read(asked.dataset.path)  # one that was damaged is refused before a run starts
    command = Command(asked.command, law=law, target_epsilon=asked.epsilon, metric=asked.metric, dataset=asked.dataset)
    check_space(space, asked.command)
    tuning = Tuning(
        law=law,
        space=space,
        output_dir=asked.output_dir,
        private_dir=asked.private_state_dir,
        asked=command.public_dict(),
        is_greater_better=not asked.minimize,
    )
    typer.echo(
        f"Tuning: {law.describe()} of runs, epsilon {asked.epsilon:g} in all. How many they are stays secret, and "
        "nothing is shown until the best is released."
    )
    best = tuning.run(command.train)
    if best is None:
        typer.echo("Nothing was released: no run gave a score. The budget is spent all the same.")
        return False
    found = release(best, asked.output_dir, metric=asked.metric)
    tuning.finish()
    options = " ".join(f"--{name} {value}" for name, value in found.options.items())
    typer.echo(f"Released:    {asked.output_dir}, {asked.metric} {found.score:.4f}, with {options}")
    typer.echo(
        f"Privacy:     epsilon {round_up(found.epsilon)} at delta {found.delta:g} for the whole tuning; the run alone "
        f"would have had {round_up(found.run_epsilon, 4)}"
    )
    typer.echo(f"Statement:   {asked.output_dir / 'privacy' / 'statement.md'}")
    return True
