"""`hf-dpopt tune`: the best of a random number of private runs, and nothing of the others."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.size_limits import check_budget
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.dataset_ledger import DatasetBudget, DatasetLedger
from hf_dpopt.tuning.command import Command, check_space
from hf_dpopt.tuning.search import Tuning, release
from hf_dpopt.tuning.space import Space


def run_tuning(
    *,
    command: list[str],
    output_dir: Path,
    epsilon: float,
    space: str,
    metric: str,
    runs: float,
    minimize: bool,
    private_state_dir: Path | None,
    privacy_ledger: str | None,
    privacy_ledger_epsilon: float | None,
) -> bool:
    """Run a tuning to its end; return whether something was released.

    Nothing that is printed before the release depends on a run. The arguments are the flags of the command.
    """
    law, laws = RunCount(mean=runs), Space.read(space)
    check_budget(epsilon)
    if privacy_ledger is None and privacy_ledger_epsilon is not None:
        raise DPConfigError("--privacy-ledger-epsilon is the budget of a ledger. Add --privacy-ledger FILE.")
    dataset = None if privacy_ledger is None else DatasetBudget(privacy_ledger, privacy_ledger_epsilon)
    if dataset is not None and os.path.exists(dataset.path) and os.path.getsize(dataset.path):
        DatasetLedger.read(dataset.path)  # one that was damaged is refused before a run starts
    run = Command(command, law=law, target_epsilon=epsilon, metric=metric, dataset=dataset)
    check_space(laws, command)
    tuning = Tuning(
        law=law,
        space=laws,
        output_dir=output_dir,
        private_dir=private_state_dir,
        asked=run.public_dict(),
        is_greater_better=not minimize,
    )
    typer.echo(
        f"Tuning: {law.describe()} of runs, epsilon {epsilon:g} in all. How many they are stays secret, and "
        "nothing is shown until the best is released."
    )
    best = tuning.run(run.train)
    if best is None:
        typer.echo("Nothing was released: no run gave a score. The budget is spent all the same.")
        return False
    found = release(best, output_dir, metric=metric)
    tuning.finish()
    options = " ".join(f"--{name} {value}" for name, value in found["options"].items())
    typer.echo(f"Released:    {output_dir}, {metric} {found['score']:.4f}, with {options}")
    typer.echo(
        f"Privacy:     epsilon {round_up(found['epsilon'])} at delta {found['delta']:g} for the whole tuning; the run "
        f"alone would have had {round_up(found['run_epsilon'], 4)}"
    )
    typer.echo(f"Statement:   {output_dir / 'privacy' / 'statement.md'}")
    return True
