"""`hf-dpopt plan`: noise and epsilon of a run that was not started yet."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hf_dpopt.cli.advising import judge
from hf_dpopt.cli.show import print_facts, print_json, print_table, warn
from hf_dpopt.common import log
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.noise import Workload, momentum_workload
from hf_dpopt.noise.registry import check_length
from hf_dpopt.noise.workloads import MAX_SCHEDULED_STEPS
from hf_dpopt.plan.choose import compare_mechanisms, make_plan
from hf_dpopt.plan.compare import ComparedNoise
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.privacy_profile import meaning_of_plan
from hf_dpopt.plan.size_limits import check_sizes, steps_of
from hf_dpopt.report.facts import spell_infinity
from hf_dpopt.report.meaning import plan_rows
from hf_dpopt.report.statement import round_up

NUMBERS = {  # column of the comparison -> name in JSON
    "sigma": "noise_multiplier", "sigma_z": "draw_stddev", "one step": "step_stddev", "RMSE": "rmse",
    "max error": "max_error", "kept": "kept",
}  # fmt: skip


def steps_of_run(num_examples: int, batch_size: int, *, steps: int | None, epochs: float | None) -> int:
    """Return the optimizer steps of a run: those given, or those of epochs, which are converted as `Trainer` does."""
    if (steps is None) == (epochs is None):
        given = "Neither of --steps and --epochs is" if steps is None else "Both --steps and --epochs are"
        raise DPConfigError(f"{given} given. Give exactly one, such as --epochs 3.")
    if epochs is None:
        check_count("steps", steps)
        return steps  # type: ignore[return-value]  # a count
    if not 0 < epochs < math.inf:
        raise DPConfigError(f"--epochs {epochs} is not a number of passes. Use a finite number > 0, such as 3.")
    check_count("num_examples", num_examples)
    return steps_of(epochs, num_examples, batch_size)


def workload_of(given: Mapping[str, Any], num_steps: int) -> Workload:
    """Make the workload of the optimizer: its map from gradients to iterates, by learning rates that fall to 0.

    Args:
        given: flags `optimizer` and `momentum`.
        num_steps: optimizer steps.
    """
    optimizer, momentum = given["optimizer"], given["momentum"]
    if optimizer == "adamw" and momentum:
        raise DPConfigError("--momentum is that of SGD: add --optimizer sgd. Noise for AdamW is tuned without it.")
    is_short = 1 < num_steps <= MAX_SCHEDULED_STEPS
    sizes = [(num_steps - t) / num_steps for t in range(num_steps)] if is_short else None
    workload = momentum_workload(num_steps, momentum, sizes)
    return dataclasses.replace(workload, adaptive=optimizer == "adamw")


def plan_run(given: Mapping[str, Any], num_steps: int) -> None:
    """Print the plan of a run, and with it the plan of every mechanism at the same budget.

    Args:
        given: flags of the command, those with the names of fields of `PrivacyConfig` among them.
        num_steps: optimizer steps.
    """
    log.show(True)
    num_examples = given["num_examples"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = config_of(given)
        check_sizes(num_examples, num_steps)
        check_length(config.noise_mechanism, num_steps, config.noise_restart_every)
        workload = workload_of(given, num_steps)
        sizes = {"num_examples": num_examples, "num_steps": num_steps, "workload": workload}
        made = make_plan(config, **sizes)
        any_noise = dataclasses.replace(config, noise_mechanism="auto", noise_kwargs={}, noise_restart_every=None)
        rows = compare_mechanisms(any_noise, **sizes) if given["compare"] else []
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        warn(message)
    advice, meaning = judge(made, given), meaning_of_plan(made)
    if given["as_json"]:
        listed = {"mechanisms": list(map(mechanism_facts, rows))} if rows else {}
        listed |= {"meaning": spell_infinity(meaning)}
        print_json(made.record.to_json() | listed | ({} if advice is None else {"outlook": advice[0]}))
        return
    print_facts("Private run", _facts(made, meaning))
    if rows:
        print_mechanisms(rows)
    for line in [] if advice is None else advice[1]:
        typer.echo(line)


def config_of(given: Mapping[str, Any]) -> PrivacyConfig:
    """Make the settings of a run from flags that have the names of its fields; some are JSON."""
    names = {field.name for field in dataclasses.fields(PrivacyConfig)}
    asked = {name: value for name, value in given.items() if name in names}
    for name, example in (("noise_kwargs", '{"num_buffers": 3}'), ("preconditioner_kwargs", '{"clipping_norm": 5}')):
        text, flag = asked[name], f"--{name.replace('_', '-')}"
        try:
            asked[name] = None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            raise DPConfigError(f"{flag} {shown(text)} is not JSON. Use {flag} '{example}'.") from None
    return PrivacyConfig(**asked)


def _facts(made: PrivacyPlan, meaning: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for people."""
    replaced = made.epsilon_replace_one()
    way = made.config.noise_at_changes
    across: dict[str, str] = {} if way == "auto" else {f"noise where scales of {made.preclip.name} change": way}
    if (noise := made.release.opening) is not None:
        across["query over all records before the first step"] = f"noise multiplier {noise:g}, in epsilon"
    return {
        "epsilon": f"{round_up(made.epsilon())} ({made.adjacency})",
        **({"epsilon of each run": round_up(made.run_epsilon)} if made.config.tuned is not None else {}),
        "epsilon if one record is swapped": "no analysis is known" if replaced is None else round_up(replaced),
        "delta": f"{made.delta:g}",
        "noise multiplier": f"{made.noise_multiplier:.6g}",
        "noise": made.config.noise_mechanism,
        **across,
        "sampling": made.describe_sampling(),
        "optimizer steps": made.num_steps,
        "accountant": made.spent.accountant,
        **plan_rows(meaning, "record" if made.unit == "example" else made.unit),
    }


# --- the comparison of mechanisms ---


def mechanism_facts(row: ComparedNoise) -> dict[str, Any]:
    """One row as plain values."""
    plan = row.plan
    return {
        "mechanism": row.mechanism,
        "sampler": plan.sampler.parameters(),
        "adjacency": plan.adjacency,
        "strategy": plan.strategy.parameters(),
        "noise_multiplier": plan.noise_multiplier,
        "draw_stddev": plan.draw_stddev,
        "step_stddev": row.step_stddev,
        "rmse": row.rmse,
        "max_error": row.max_error,
        "kept": plan.cost.kept,
        "epsilon": plan.epsilon(),
        "accountant": plan.spent.accountant,
    }


def print_mechanisms(rows: Sequence[ComparedNoise]) -> None:
    """Print all rows, the one to take first."""
    plan, listed = rows[0].plan, []
    for facts in map(mechanism_facts, rows):
        names = (facts["mechanism"], facts["sampler"]["name"], facts["adjacency"])
        listed.append([*names, *(f"{facts[name]:.4g}" for name in NUMBERS.values())])
    print_table(
        f"Noise mechanisms at epsilon {plan.config.target_epsilon:g}, delta {plan.delta:g}",
        ("mechanism", "sampling", "adjacency", *NUMBERS),
        listed,
        width=148,
        caption=(
            "sigma: noise multiplier; sigma_z: of the draws; one step: noise of a step, in clipping norms. RMSE and "
            "max error: of the iterates, in clipping norms x learning rate / batch size, for this optimizer and "
            "a rate that falls to 0. kept: numbers of 4 bytes that the noise keeps per trained weight."
        ),
    )
