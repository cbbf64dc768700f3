"""`hf-dpopt plan-tuning`: what the best of a random number of runs costs, before any of them is started."""

from __future__ import annotations

import math
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dpopt.cli.advising import Request
from hf_dpopt.cli.planning import steps_of_run
from hf_dpopt.cli.show import print_json
from hf_dpopt.plan.advice import advise
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.tuning import MEANS, SHAPES, TuningPlan, plan_tunings

COLUMNS = (
    "shape", "mean runs", "0 or 1 run", "noise", "x that of one run", "epsilon of a run", "steps' worth",
    "of one run's",
)  # fmt: skip


def show_tuning_plans(
    request: Request,
    *,
    batch_size: int | None,
    steps: int | None,
    sampling: str,
    means: list[float] | None,
    shapes: list[float] | None,
    as_json: bool,
) -> None:
    """Print a table of tunings at one budget, or the same as JSON.

    Args:
        request: records, budget and what is trained.
        batch_size: expected records of a step; None for the advised ones.
        steps: optimizer steps of a run; None for the passes of the request.
        sampling: see `PrivacyConfig`.
        means, shapes: laws of the number of runs; None for a choice.
    """
    job = request.job()
    batch = advise(job).batch if batch_size is None else batch_size
    passes = None if steps is not None else job.passes
    config = PrivacyConfig(
        target_epsilon=job.target_epsilon,
        target_delta=job.target_delta,
        expected_batch_size=batch,
        sampling=sampling,
    )
    plans = list(
        plan_tunings(
            config,
            num_examples=job.num_units,
            num_steps=steps_of_run(job.num_units, batch, steps=steps, epochs=passes),
            means=means or MEANS,
            shapes=shapes if shapes is not None else SHAPES,
            kind=job.kind,
        )
    )
    if as_json:
        print_json({"one_run": _single(plans[0]), "tunings": [plan.public_dict() for plan in plans]})
        return
    single = plans[0].single
    typer.echo(
        f"{job.num_units:,} records, {single.num_steps} steps of {batch}, epsilon {job.target_epsilon:g} at delta "
        f"{single.delta:g} in all. One run: noise {single.noise_multiplier:.4g}, worth "
        f"{plans[0].outlooks[1].useful_steps:.3g} steps without noise ({job.kind})."
    )
    table = Table(title="The best of a random number of runs, and nothing else, is released")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for plan in plans:
        table.add_row(*_row(plan))
    Console(width=max(Console().width, 118)).print(table)
    for line in _advice(plans):
        typer.echo(line)


def _single(plan: TuningPlan) -> dict[str, Any]:
    return {
        "noise_multiplier": plan.single.noise_multiplier,
        "epsilon": plan.single.epsilon(),
        "useful_steps": plan.outlooks[1].useful_steps,
        "num_steps": plan.single.num_steps,
        "expected_batch_size": plan.single.sampler.expected_batch_size,
    }


def _row(plan: TuningPlan) -> tuple[str, ...]:
    shape = "Poisson" if math.isinf(plan.count.shape) else f"{plan.count.shape:g}"
    return (
        shape,
        f"{plan.count.mean:g}",
        f"{plan.count.probability(0) + plan.count.probability(1):.0%}",
        f"{plan.run.noise_multiplier:.4g}",
        f"{plan.noise_ratio:.2f}",
        f"{plan.run.run_epsilon:.2f}",
        f"{plan.outlooks[0].useful_steps:.3g}",
        f"{plan.steps_kept:.0%}",
    )


def _advice(plans: list[TuningPlan]) -> list[str]:
    """Lines that say what has to be gained for tuning to pay."""
    best = max(plans, key=lambda plan: (plan.count.mean >= 5, plan.steps_kept))
    return [
        f"With {best.count.describe()} each run has {best.noise_ratio:.2f} times the noise and keeps "
        f"{best.steps_kept:.0%} of the steps' worth that the advised options have with the whole budget. Tuning pays "
        "where the best options are further from the advised ones than that.",
        "Options that were found on public data, or on another task, cost nothing: docs/tuning.md.",
    ]
