"""`hf-dpopt plan-tuning`: what the best of a random number of runs costs, before any of them is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import typer

from hf_dpopt.cli.advising import job_of
from hf_dpopt.cli.planning import steps_of_run
from hf_dpopt.cli.show import print_json, print_table
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.advice import advise
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.tuning import MEANS, SHAPES, TuningPlan, plan_tunings

COLUMNS = (
    "shape", "mean runs", "0 or 1 run", "noise", "x that of one run", "epsilon of a run", "steps' worth",
    "of one run's",
)  # fmt: skip


def show_tuning_plans(given: Mapping[str, Any]) -> None:
    """Print a table of tunings at one budget, or the same as JSON.

    Args:
        given: flags of the command; without a batch it is the advised one.
    """
    job, steps = job_of(given), given["steps"]
    if steps is not None and given["epochs"] is not None:
        raise DPConfigError("Both --steps and --epochs are given. Give one of them, such as --epochs 3.")
    batch = advise(job).batch if given["expected_batch_size"] is None else given["expected_batch_size"]
    config = PrivacyConfig(
        target_epsilon=job.target_epsilon,
        target_delta=job.target_delta,
        expected_batch_size=batch,
        sampling=given["sampling"],
    )
    num_steps = steps_of_run(job.num_units, batch, steps=steps, epochs=job.passes if steps is None else None)
    means, shapes = given["runs"] or MEANS, SHAPES if given["shape"] is None else given["shape"]
    sizes = {"num_examples": job.num_units, "num_steps": num_steps}
    plans = list(plan_tunings(config, **sizes, means=means, shapes=shapes, kind=job.kind))
    if given["as_json"]:
        print_json({"one_run": _single(plans[0]), "tunings": [plan.public_dict() for plan in plans]})
        return
    single = plans[0].single
    typer.echo(
        f"{job.num_units:,} records, {single.num_steps} steps of {batch}, epsilon {job.target_epsilon:g} at delta "
        f"{single.delta:g} in all. One run: noise {single.noise_multiplier:.4g}, worth "
        f"{plans[0].outlooks[1].useful_steps:.3g} steps without noise ({job.kind})."
    )
    title = "The best of a random number of runs, and nothing else, is released"
    print_table(title, COLUMNS, map(_row, plans), width=118)
    best = max(plans, key=lambda plan: (plan.count.mean >= 5, plan.steps_kept))
    typer.echo(
        f"With {best.count.describe()} each run has {best.noise_ratio:.2f} times the noise and keeps "
        f"{best.steps_kept:.0%} of the steps' worth that the advised options have with the whole budget. Tuning pays "
        "where the best options are further from the advised ones than that."
    )
    typer.echo("Options that were found on public data, or on another task, cost nothing: docs/tuning.md.")


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
