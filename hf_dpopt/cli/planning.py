"""`hf-dpopt plan`: noise and epsilon of a run that was not started yet."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hf_dpopt.cli.advising import Request, advice_beside
from hf_dpopt.cli.mechanisms import mechanism_facts, mechanisms_table
from hf_dpopt.cli.show import print_json, table_of
from hf_dpopt.common import log
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.huggingface.workload import MAX_SCHEDULED_STEPS
from hf_dpopt.noise import Workload, momentum_workload
from hf_dpopt.noise.registry import check_length
from hf_dpopt.plan.bounds import check_sizes, steps_of
from hf_dpopt.plan.choose import compare_mechanisms, make_plan
from hf_dpopt.plan.compare import ComparedNoise
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.meaning import meaning_of_plan, profile_of_plan
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.users import UserPlans, plan_for_users
from hf_dpopt.report.facts import spell_infinity
from hf_dpopt.report.meaning import plan_rows
from hf_dpopt.report.noise_plots import plot_comparison, pyplot
from hf_dpopt.report.profile_plot import plot_profile
from hf_dpopt.report.statement import round_up

PLOTTED_EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)


def steps_of_run(num_examples: int, batch_size: int, *, steps: int | None, epochs: float | None) -> int:
    """Return the optimizer steps of a run: those given, or those of epochs, which are converted as `Trainer` does."""
    if (steps is None) == (epochs is None):
        given = "Neither of --steps and --epochs is" if steps is None else "Both --steps and --epochs are"
        raise DPConfigError(f"{given} given. Give exactly one, such as --epochs 3.")
    if epochs is None:
        check_count("num_steps", steps)
        return steps  # type: ignore[return-value]  # a count
    if not 0 < epochs < math.inf:
        raise DPConfigError(f"--epochs {epochs} is not a number of passes. Use a finite number > 0, such as 3.")
    check_count("num_examples", num_examples)
    return steps_of(epochs, num_examples, batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Weights and optimizer that noise is tuned for."""

    optimizer: str
    momentum: float
    schedule: str
    num_parameters: int

    def workload(self, num_steps: int) -> Workload:
        """Make the workload of the optimizer: its map from gradients to iterates."""
        if self.optimizer not in ("adamw", "sgd"):
            raise DPConfigError(f"--optimizer {self.optimizer} is unknown. Use adamw (for any adaptive one) or sgd.")
        if self.optimizer == "adamw" and self.momentum:
            raise DPConfigError("--momentum is that of SGD: add --optimizer sgd. Noise for AdamW is tuned without it.")
        if self.schedule not in ("constant", "linear"):
            raise DPConfigError(f"--schedule {self.schedule} is unknown. Use constant or linear.")
        scheduled = self.schedule == "linear" and 1 < num_steps <= MAX_SCHEDULED_STEPS
        sizes = [(num_steps - t) / num_steps for t in range(num_steps)] if scheduled else None
        workload = momentum_workload(num_steps, self.momentum, sizes)
        return dataclasses.replace(workload, adaptive=self.optimizer == "adamw")


def plan_run(
    given: Mapping[str, Any],
    num_steps: int,
    training: Training,
    *,
    request: Request,
    compare: bool,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of a run, and beside it that of every mechanism at the same budget.

    Args:
        given: flags, with the names of fields of `PrivacyConfig`.
        num_steps: optimizer steps.
        training: weights and optimizer.
        request: records, and what advice is for.
        compare: whether to compare mechanisms.
        plots: folder for plots of the comparison, or None.
    """
    log.show(True)
    check_count("num_parameters", training.num_parameters)
    if plots is not None:
        pyplot()  # what cannot be drawn is found before anything is computed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = config_of(given)
        check_sizes(request.num_examples, num_steps)
        check_length(config.noise_mechanism, num_steps, config.noise_restart_every)
        workload = training.workload(num_steps)
        sizes = {"num_examples": request.num_examples, "num_steps": num_steps, "workload": workload}
        made = make_plan(config, **sizes)  # type: ignore[arg-type]
        rows = _compare(config, made, sizes, wanted=compare)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        sys.stderr.write(f"hf-dpopt: warning: {message}\n")
    beside = advice_beside(made, request, is_adaptive=training.optimizer == "adamw")
    if as_json:
        listed = {"mechanisms": [mechanism_facts(row, training.num_parameters) for row in rows]} if rows else {}
        listed |= {"meaning": spell_infinity(meaning_of_plan(made))}
        print_json(made.record.to_json() | listed | ({} if beside is None else {"outlook": beside.facts()}))
    else:
        _show(made, rows, training.num_parameters)
        for line in [] if beside is None else beside.lines():
            typer.echo(line)
    if plots is not None and meaning_of_plan(made):
        for path in plot_profile(
            profile_of_plan(made), plots, epsilon=made.epsilon(), delta=made.delta, unit=_unit(made)
        ):
            sys.stderr.write(f"hf-dpopt: wrote {path}\n")
    if plots is not None and rows:
        by_epsilon = {target: _compare(config, None, sizes, target=target) for target in PLOTTED_EPSILONS}
        for path in plot_comparison(rows, plots, workload=workload, by_epsilon=by_epsilon):
            sys.stderr.write(f"hf-dpopt: wrote {path}\n")


def plan_users(config: PrivacyConfig, num_steps: int, *, users: int, records_per_user: int, as_json: bool) -> None:
    """Print two plans that protect users, one that samples users and one that samples records.

    Args:
        config: the settings, with records as the batch.
        num_steps: optimizer steps.
        users: users in the training set.
        records_per_user: records of a user that take part.
    """
    compared = plan_for_users(
        config,
        num_users=users,
        records_per_user=records_per_user,
        records_per_step=config.expected_batch_size,
        num_steps=num_steps,
    )
    if as_json:
        plans = {"by_users": compared.by_users, "by_records": compared.by_records}
        print_json({name: plan.record.to_json() for name, plan in plans.items()})
    else:
        typer.echo(_users_text(compared))


def config_of(given: Mapping[str, Any]) -> PrivacyConfig:
    """Make the settings of a run from flags that have the names of its fields; some are JSON."""
    names = {field.name for field in dataclasses.fields(PrivacyConfig)} - {"records_per_user"}  # of `plan_users` alone
    asked = {name: value for name, value in given.items() if name in names}
    for name, example in (("noise_kwargs", '{"num_buffers": 3}'), ("preconditioner_kwargs", '{"clipping_norm": 5}')):
        text, flag = asked[name], f"--{name.replace('_', '-')}"
        try:
            asked[name] = None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            raise DPConfigError(f"{flag} {shown(text)} is not JSON. Use {flag} '{example}'.") from None
    return PrivacyConfig(**asked)


def _compare(
    config: PrivacyConfig,
    made: PrivacyPlan | None,
    sizes: dict[str, Any],
    *,
    wanted: bool = True,
    target: float | None = None,
) -> list[ComparedNoise]:
    """Compare all mechanisms at the budget of the config, or at another one."""
    if not wanted or config.target_epsilon is None:
        return []
    if made is not None and made.compared:
        return list(made.compared)
    asked = dataclasses.replace(
        config, noise_mechanism="auto", noise_kwargs={}, target_epsilon=target or config.target_epsilon
    )
    try:
        return compare_mechanisms(asked, **sizes)
    except DPConfigError as error:
        if made is None:
            return []  # a budget of the plot that nothing can keep
        sys.stderr.write(f"hf-dpopt: warning: mechanisms are not compared: {error}\n")
        return []


def _show(made: PrivacyPlan, rows: list[ComparedNoise], num_parameters: int) -> None:
    console = Console()
    console.print(table_of("Private run", _facts(made)))
    if rows:
        # the table does not fit into the 80 columns of a pipe
        Console(width=max(console.width, 148)).print(mechanisms_table(rows, num_parameters))


def _facts(made: PrivacyPlan) -> dict[str, Any]:
    """The plan for people."""
    replaced = made.epsilon_replace_one()
    way = made.config.noise_at_changes
    across: dict[str, str] = {} if way == "auto" else {f"noise where scales of {made.preclip.name} change": way}
    if (noise := made.release.opening) is not None:
        across["query over all records before the first step"] = f"noise multiplier {noise:g}, in epsilon"
    return {
        "epsilon": f"{round_up(made.epsilon())} ({made.adjacency})",
        "epsilon if one record is swapped": "no analysis is known" if replaced is None else round_up(replaced),
        "delta": f"{made.delta:g}",
        "noise multiplier": f"{made.noise_multiplier:.6g}",
        "noise": made.config.noise_mechanism,
        **across,
        "sampling": made.describe_sampling(),
        "optimizer steps": made.num_steps,
        "accountant": made.spent.accountant,
        **plan_rows(meaning_of_plan(made), _unit(made)),
    }


def _unit(made: PrivacyPlan) -> str:
    return "record" if made.unit == "example" else made.unit


def _users_text(compared: UserPlans) -> str:
    lines = [
        f"{label}: {plan.config.expected_batch_size} {kind} a step of {plan.num_examples}, noise multiplier "
        f"{plan.noise_multiplier:.4g}, noise in the mean gradient {noise:.3g} clipping norms of a {kind[:-1]}; "
        f"epsilon {plan.epsilon():.4g} at delta {plan.delta:g} for a user"
        for label, plan, kind, noise in (
            ("users sampled", compared.by_users, "users", compared.noise_by_users),
            ("records sampled", compared.by_records, "records", compared.noise_by_records),
        )
    ]
    return "\n".join([*lines, compared.advice()])
