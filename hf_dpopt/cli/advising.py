"""`hf-dpopt plan` without a batch: which batch, learning rate and clip suit the records, the budget and the passes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, get_args

import typer

from hf_dpopt.accounting.delta import resolve_delta
from hf_dpopt.cli.show import print_json, print_table, warn
from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.advice import HEAD_PASSES, REFERENCE_SIZE, TrainingJob, advise, head_instead
from hf_dpopt.plan.config import check_choices
from hf_dpopt.plan.options import OPTIONS
from hf_dpopt.plan.outlook import Kind, Objective, Outlook, outlook_of
from hf_dpopt.plan.plan import PrivacyPlan

MORE = (1, 3, 10)  # times the passes that were asked for
POOLED_FIRST = (
    "First a linear head on pooled states, for a quarter of epsilon (--start pooled): on SST-2 (MiniLM, epsilon 8, "
    "one run each) 84.6 % in 0.75 passes and 86.1 % in 9; 84.1 % in 3 without it."
)
REFERENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # of `REFERENCE_SIZE` weights
DATA = "--train_file train.csv --validation_file validation.csv --label_list label1,label2"  # names to replace
PARTS: dict[Kind, str] = {
    "head": "--freeze encoder --pooling cls mean",
    "lora": "--lora_r 8 --start pooled",
    "full": "",
}
ADVISED = {  # flags of `plan` that advice reads, or that change none of it
    "num_examples", "target_epsilon", "target_delta", "epochs", "weights", "finetuning", "objective", "as_json",
    "allow_large_delta", "amplification_samples",
}  # fmt: skip
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse a name that is not among the choices of its flag, before anything that is missing.

    Raises:
        DPConfigError: for such a name.
    """
    check_choices({name: value for name, value in given.items() if name in OPTIONS})
    check_choice("optimizer", given["optimizer"], ("adamw", "sgd"))
    check_choice("objective", given["objective"], get_args(Objective))
    if given["finetuning"] is not None:
        check_choice("finetuning", given["finetuning"], get_args(Kind))


def job_of(given: Mapping[str, Any]) -> TrainingJob:
    """Make the job from flags, with what was left out filled in.

    Raises:
        DPConfigError: without a budget, or for flags that contradict each other.
    """
    check_count("num_examples", given["num_examples"])
    objective, finetuning, passes = given["objective"], given["finetuning"], given["epochs"]
    if (finetuning, objective) == ("head", "generation"):
        raise DPConfigError("The head of a language model is its embeddings. Use --finetuning lora or full.")
    if given["target_epsilon"] is None:
        raise DPConfigError("A budget is needed for advice. Add --epsilon 8, or a smaller number.")
    if passes is None:
        passes = HEAD_PASSES if finetuning == "head" else 3.0
    job = TrainingJob(
        num_units=given["num_examples"],
        target_epsilon=given["target_epsilon"],
        target_delta=given["target_delta"],
        passes=passes,
        kind=finetuning or "lora",
        objective=objective,
        model_size=given["weights"] or REFERENCE_SIZE,
    )
    is_open = finetuning is None and given["expected_batch_size"] is None
    head = head_instead(job) if is_open else None
    return job if head is None else head.job


def command_of(job: TrainingJob) -> str | None:
    """Command that trains a classifier of texts so; the run chooses batch and learning rate by the same rules."""
    if job.objective != "classification":
        return None
    budget = f"{_budget(job)} --num_train_epochs {job.passes:g}"
    model = REFERENCE_MODEL if job.model_size == REFERENCE_SIZE else "your/model"
    how = f"--model_name_or_path {model} {DATA} {PARTS[job.kind]} {budget}"
    return " ".join(f"python recipes/glue.py {how} --output_dir out".split())


def _budget(job: TrainingJob) -> str:
    delta = job.target_delta
    flags = f"--target_epsilon {job.target_epsilon:g}" + ("" if delta is None else f" --target_delta {delta:g}")
    return flags + (" --allow_large_delta true" if delta is not None and delta * job.num_units > 1 else "")


def check_delta_of(job: TrainingJob, *, allow_large: bool) -> None:
    """Refuse a delta that the advised run would refuse, and warn of one that it would warn of.

    Raises:
        DPConfigError: for a delta above 1/n that was not allowed, and for one record alone.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve_delta(job.target_delta, job.num_units, allow_large=allow_large)
    for warning in caught:
        warn(str(warning.message))


def parse_count(text: str | None) -> int | None:
    """A count with a unit: 300k, 0.3M, 7B.

    Raises:
        typer.BadParameter: for anything else.
    """
    if text is None:
        return None
    digits, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1.0)
    try:
        value = float(digits) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e15:
        raise typer.BadParameter(f"{text!r} is no number of weights. Use such as 300000, 300k, 0.3M or 7B.")
    return round(value)


def refuse_without_batch(ctx: typer.Context) -> None:
    """Refuse flags that plan a run, where advice is asked for.

    Raises:
        DPConfigError: if any were typed.
    """
    flags = [one for one in ctx.command.params if one.name not in ADVISED]
    sources = {one.opts[-1]: ctx.get_parameter_source(str(one.name)) for one in flags}
    planning = [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if planning:
        raise DPConfigError(
            f"{', '.join(planning)} plans a run, which needs a batch: add --batch 1024. Without them, --epsilon 8 "
            "advises which batch to take."
        )


def show_advice(job: TrainingJob, *, as_json: bool) -> None:
    """Print advice as tables, or as JSON."""
    rows = [advise(dataclasses.replace(job, passes=job.passes * times)) for times in MORE]
    advice = rows[0]
    if advice.outlook.verdict == "poor":
        warn(
            "at this budget and with these passes the model is expected to learn little. More passes, more records or "
            "a larger epsilon would help."
        )
    records = advice.batch * advice.outlook.num_steps
    if as_json:
        print_json(
            {
                "options": advice.values,
                "reasons": advice.reasons,
                "command": command_of(job),
                "num_steps": advice.outlook.num_steps,
                "records": records,
                **_outlook_facts(advice.outlook),
                "useful_steps_of_passes": {f"{row.job.passes:g}": row.outlook.useful_steps for row in rows},
            }
        )
        return
    print_table(
        f"Advice for {job.num_units:,} records at epsilon {job.target_epsilon:g}",
        ("option", "value", "why"),
        ((name, str(value), advice.reasons[name]) for name, value in advice.values.items()),
        justify="left",
        width=110,
    )
    typer.echo(f"For {job.kind} finetuning ({job.objective}) of {job.model_size / 1e6:.3g} million weights.")
    typer.echo(f"Outlook: {advice.outlook.describe()}.")
    typer.echo(f"Cost: {records:,} records in forward and backward passes.")
    more = (f"{row.job.passes:g} would be worth {row.outlook.useful_steps:.3g} steps" for row in rows[1:])
    typer.echo(f"More passes: {', '.join(more)}.")
    if (head := head_instead(job)) is not None:
        worth = f"{head.outlook.useful_steps:.3g} steps in {head.job.passes:g} passes over features computed once"
        typer.echo(f"A linear head on the frozen model would be worth {worth}: --finetuning head.")
    elif (job.kind, job.objective) == ("lora", "classification"):
        typer.echo(POOLED_FIRST)
    typer.echo("Other optimizers and noise, and what each gained: docs/what_pays.md.")
    if (command := command_of(job)) is not None:
        typer.echo(f"\nWith your files, labels and model:\n{command}")
    flags = " ".join(f"--{name} {value}" for name, value in advice.values.items())
    typer.echo("\nIn your own script:")
    typer.echo(f"--num_train_epochs {job.passes:g} {_budget(job)} {flags}")


def judge(plan: PrivacyPlan, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]] | None:
    """Say what the noise leaves of a planned run, and what would be better for as many records.

    Args:
        plan: the run.
        given: flags of the command.

    Returns:
        For programs, and lines for people; None for users, and without privacy.
    """
    if plan.unit == "user" or not plan.is_private or not 0 < plan.epsilon() < math.inf:
        return None
    batch = plan.sampler.expected_batch_size
    spent = {"target_epsilon": plan.epsilon(), "target_delta": plan.delta}
    job = job_of({**given, **spent, "epochs": plan.num_steps * batch / plan.num_examples})
    outlook = outlook_of(
        plan, job.kind, size=job.model_size, is_adaptive=given["optimizer"] == "adamw",
        has_trained_head=job.starts_trained,
    )  # fmt: skip
    rate = job.learning_rate(job.outlook(batch, noise_multiplier=plan.noise_multiplier))
    lines = [f"Outlook ({job.kind}): {outlook.describe()}. Learning rate for AdamW: about {rate:g}."]
    better = None
    try:
        advice = advise(job)
    except DPConfigError:  # a plan stands, whether there is a better one or not
        advice = None
    if advice is not None and advice.is_better_than(outlook):
        better = {**advice.values, "num_steps": advice.outlook.num_steps}
        lines.append(
            f"Advice: as many records in batches of {advice.batch} with --learning_rate {advice.learning_rate:g} are "
            f"worth {advice.outlook.useful_steps:.3g} steps. Without --batch this command says why."
        )
    return {**_outlook_facts(outlook), "learning_rate": rate, "better": better}, lines


def _outlook_facts(outlook: Outlook) -> dict[str, Any]:
    return {
        "noise_over_signal": {"step": outlook.step_ratio, "run": outlook.run_ratio},
        "useful_steps": outlook.useful_steps,
        "verdict": outlook.verdict,
    }
