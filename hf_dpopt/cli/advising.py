"""`hf-dpopt plan` without a batch: which batch, learning rate and clip suit the records, the budget and the passes."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dpopt.cli.show import print_json
from hf_dpopt.common.checks import check_choice
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.advice import REFERENCE_SIZE, Advice, TrainingJob, advise, kind_of
from hf_dpopt.plan.measured import beside_advice
from hf_dpopt.plan.outlook import Outlook, outlook_of
from hf_dpopt.plan.plan import PrivacyPlan

MORE = (1, 3, 10)  # times the passes that were asked for
# Weights of models that papers on private finetuning report, by their names on the hub.
SIZES = {
    "distilroberta-base": 82_000_000, "bert-base-uncased": 110_000_000, "roberta-base": 125_000_000,
    "roberta-large": 355_000_000, "distilgpt2": 82_000_000, "gpt2": 124_000_000, "gpt2-medium": 355_000_000,
    "gpt2-large": 774_000_000,
}  # fmt: skip
PROMPTED = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2")  # GLUE tasks with a prompt in recipes/prompts.py
SCORES = "stsb"  # the GLUE task without labels
TASKS = (*PROMPTED, SCORES, "wnli", "e2e")
WITH_DECODER = ("t5", "bart")  # in names of models that have no states to pool: they need a target, too
WHY_POOLED = (
    "a linear head on pooled states first, for a quarter of epsilon, which adds about 1 % to the noise of the rest; "
    "on SST-2 (MiniLM, epsilon 8, one run each) 84.6 % in 0.75 passes and 86.1 % in 9; 84.1 % in 3 "
    "without it (docs/results.md)"
)
ADVISED = {  # flags of `plan` that advice reads, or that change none of it
    "num_examples", "target_epsilon", "target_delta", "epochs", "num_parameters", "weights", "finetuning", "objective",
    "records_per_second", "model", "task", "as_json", "allow_large_delta", "amplification_samples", "records_per_user",
}  # fmt: skip
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Values of the command line; None where nothing was asked."""

    num_examples: int
    epsilon: float | None
    delta: float | None
    passes: float | None
    trained: int | None
    weights: int | None
    finetuning: str | None
    objective: str
    records_per_second: float | None
    model: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, ("classification", "generation"))
        if self.task is not None:
            check_choice("task", self.task, TASKS)
            if (self.task == "e2e") != (self.objective == "generation"):
                raise DPConfigError(f"--task {self.task} does not fit --objective {self.objective}. Leave one out.")
        if self.finetuning == "head" and self.objective == "generation":
            raise DPConfigError("The head of a language model is its embeddings. Use --finetuning lora or full.")
        if self.finetuning is not None:
            check_choice("finetuning", self.finetuning, ("full", "lora", "head"))
        if self.trained is not None and self.size is not None and self.trained > self.size:
            raise DPConfigError(f"--trained {self.trained} is more than the {self.size} weights. Leave one out.")
        rate = self.records_per_second
        if rate is not None and not 0 < rate < math.inf:
            raise DPConfigError(f"--records-per-second {rate} is no rate. Use a number > 0, or leave it out.")

    @property
    def size(self) -> int | None:
        """Weights of the model, as they were given or as they are known by its name."""
        if self.weights is None and self.finetuning == "full" and self.trained is not None:
            return self.trained
        return self.weights or SIZES.get((self.model or "").rstrip("/").rpartition("/")[2])

    @property
    def starts_pooled(self) -> bool:
        """Whether the command should train a head first: for labels and adapters, with which it was measured."""
        has_states = not any(name in (self.model or "").lower() for name in WITH_DECODER)
        is_measured = self.objective == "classification" and self.job().kind == "lora"
        return is_measured and has_states and self.task != SCORES

    def job(self) -> TrainingJob:
        """The job, with what was left out filled in."""
        if self.epsilon is None:
            raise DPConfigError("A budget is needed for advice. Add --epsilon 8, or a smaller number.")
        return TrainingJob(
            num_units=self.num_examples,
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            passes=3.0 if self.passes is None else self.passes,
            kind=self.finetuning or kind_of(self.trained, self.size),  # type: ignore[arg-type]  # checked above
            objective=self.objective,  # type: ignore[arg-type]  # checked by TrainingJob
            model_size=self.size or max(REFERENCE_SIZE, self.trained or 0),
        )


def parse_count(text: str) -> int:
    """A count with a unit: 300k, 0.3M, 7B.

    Raises:
        typer.BadParameter: for anything else.
    """
    digits, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1.0)
    try:
        value = float(digits) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e15:
        raise typer.BadParameter(f"{text!r} is no number of weights. Use such as 300000, 300k, 0.3M or 7B.")
    return round(value)


def refuse_without_batch(ctx: typer.Context, given: Mapping[str, Any]) -> None:
    """Refuse flags that plan a run, where advice is asked for.

    Args:
        ctx: the command.
        given: values of its flags.

    Raises:
        DPConfigError: if there are any.
    """
    flags = [one for one in ctx.command.params if one.name not in ADVISED and given.get(str(one.name))]
    planning = [one.opts[-1] for one in flags if given[str(one.name)] != one.default]
    if planning:
        raise DPConfigError(
            f"{', '.join(planning)} plans a run, which needs a batch: add --batch 1024. Without them, --epsilon 8 "
            "advises which batch to take."
        )


def show_advice(request: Request, *, as_json: bool) -> None:
    """Print advice as tables, or as JSON."""
    job = dataclasses.replace(request.job(), has_trained_head=request.starts_pooled)
    rows = [advise(dataclasses.replace(job, passes=job.passes * times)) for times in MORE]
    advice = rows[0]
    if request.model is not None and request.size is None:
        sys.stderr.write(
            f"hf-dpopt: warning: how large {request.model} is, is not known here; the learning rate is for "
            f"{job.model_size / 1e6:.0f} million weights. Add --weights, such as 7B.\n"
        )
    if advice.outlook.verdict == "hopeless":
        sys.stderr.write(
            "hf-dpopt: warning: at this budget and with these passes the model will not learn. More passes (as in the "
            "table), more records, a larger epsilon or a linear head (recipes/linear_probe.py) would help.\n"
        )
    if as_json:
        measured = [dataclasses.asdict(one) for one in beside_advice(job.kind, job.target_epsilon)]
        print_json(_facts(advice, request) | {"more_passes": [_row(row) for row in rows], "measured": measured})
        return
    console = Console(width=max(Console().width, 110))
    table = Table(title=f"Advice for {job.num_units:,} records at epsilon {job.target_epsilon:g}", show_header=True)
    for name in ("option", "value", "why"):
        table.add_column(name, overflow="fold")
    if request.starts_pooled:
        table.add_row("start", "pooled", WHY_POOLED)
    for name, value in advice.values.items():
        table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value), advice.reasons.get(name, ""))
    console.print(table)
    typer.echo(f"For {job.kind} finetuning ({job.objective}) of {job.model_size / 1e6:.3g} million weights.")
    typer.echo(f"Outlook: {advice.outlook.describe()}.")
    typer.echo(f"Cost: {_cost(advice, request)}.")
    passes = Table(title="With more passes over the records")
    for name in ("passes", "batch", "steps", "noise / signal in a step", "steps' worth without noise", ""):
        passes.add_column(name, justify="right")
    for row in rows:
        passes.add_row(*(str(v) if not isinstance(v, float) else f"{v:.3g}" for v in _row(row).values()))
    console.print(passes)
    for line in _measured_lines(job):
        typer.echo(line)
    typer.echo(f"\n{command(advice, request)}")


def _measured_lines(job: TrainingJob) -> list[str]:
    """Lines that name what was measured for other options, gains and losses."""
    found = beside_advice(job.kind, job.target_epsilon)
    if not found:
        return []
    return [
        "Measured elsewhere, each with a learning rate tuned for it, so not with the one above (docs/what_pays.md); "
        "with 95 % intervals:",
        *(f"  {one}" for one in found),
    ]


@dataclasses.dataclass(frozen=True)
class Beside:
    """Advice beside a plan that was asked for.

    Attributes:
        job: training of as many records at the same budget.
        outlook: noise and signal of the plan.
        learning_rate: peak rate of AdamW for the plan as it is.
        better: advice that is worth clearly more; None where there is none.
    """

    job: TrainingJob
    outlook: Outlook
    learning_rate: float
    better: Advice | None

    def lines(self) -> list[str]:
        """Lines that say what the noise leaves of the plan, and what would be better."""
        rate = f"Learning rate for AdamW: about {self.learning_rate:g}."
        lines = [f"Outlook ({self.job.kind}): {self.outlook.describe()}. {rate}"]
        if self.better is not None:
            lines.append(
                f"Advice: as many records in batches of {self.better.batch} with --learning_rate "
                f"{self.better.learning_rate:g} are worth {self.better.outlook.useful_steps:.3g} steps. Without "
                "--batch this command says why."
            )
        return lines

    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        better = None if self.better is None else {**self.better.values, "num_steps": self.better.outlook.num_steps}
        return {**_outlook_facts(self.outlook), "learning_rate": self.learning_rate, "better": better}


def advice_beside(plan: PrivacyPlan, request: Request, *, is_adaptive: bool) -> Beside | None:
    """Judge a planned run, and look for better batches of as many records; None for one that is not private."""
    if not plan.is_private or not 0 < plan.epsilon() < math.inf:
        return None
    batch = plan.sampler.expected_batch_size
    passes = plan.num_steps * batch / plan.num_examples
    job = dataclasses.replace(request, epsilon=plan.epsilon(), delta=plan.delta, passes=passes).job()
    outlook = outlook_of(plan, job.kind, is_adaptive=is_adaptive)
    rate = job.learning_rate(job.outlook(batch, noise_multiplier=plan.noise_multiplier))
    try:
        advice = advise(job)
    except DPConfigError:  # a plan stands, whether there is a better one or not
        return Beside(job, outlook, rate, None)
    is_better = advice.outlook.useful_steps > 1.2 * outlook.useful_steps
    return Beside(job, outlook, rate, advice if is_better else None)


def command(advice: Advice, request: Request) -> str:
    """The command line of the recipe that fits; what it leaves out is what it chooses by itself."""
    job, task = advice.job, request.task
    script = "clm.py" if job.objective == "generation" else "glue.py"
    data = "--train_file FILE --validation_file FILE"
    if task == "e2e":
        data = (
            "--train_file trainset.csv --validation_file devset.csv --prompt_column mr --target_column ref --generate"
        )
    elif task is not None:
        has_prompt = task in PROMPTED and job.kind == "full" and "roberta" in (request.model or "")
        data = f"--task_name {task}" + (" --prompt auto" if has_prompt else "")
    part = {"lora": "--lora_r 8 ", "head": "--freeze encoder ", "full": ""}[job.kind]
    if request.starts_pooled:
        part = f"--start pooled {part}"
    delta = "" if job.target_delta is None else f" --target_delta {job.target_delta:g}"
    model = shlex.quote(request.model or "MODEL")
    return (
        f"accelerate launch recipes/{script} --model_name_or_path {model} {data} \\\n"
        f"    {part}--target_epsilon {job.target_epsilon:g}{delta} --num_train_epochs {job.passes:g} "
        f"--expected_batch_size {advice.batch} \\\n"
        f"    --learning_rate {advice.learning_rate:g} --warmup_steps {advice.values['warmup_steps']}"
    )


def _facts(advice: Advice, request: Request) -> dict[str, Any]:
    return {
        "options": advice.values,
        "start": "pooled" if request.starts_pooled else None,
        "reasons": {**advice.reasons, **({"start": WHY_POOLED} if request.starts_pooled else {})},
        "num_steps": advice.outlook.num_steps,
        **_outlook_facts(advice.outlook),
        "records": _records(advice),
        "hours": _hours(advice, request),
        "command": command(advice, request),
    }


def _outlook_facts(outlook: Outlook) -> dict[str, Any]:
    return {
        "noise_over_signal": {"step": outlook.step_ratio, "run": outlook.run_ratio},
        "useful_steps": outlook.useful_steps,
        "verdict": outlook.verdict,
    }


def _row(advice: Advice) -> dict[str, Any]:
    outlook = advice.outlook
    return {
        "passes": advice.job.passes,
        "batch": advice.batch,
        "steps": outlook.num_steps,
        "noise_over_signal": outlook.step_ratio,
        "useful_steps": outlook.useful_steps,
        "verdict": outlook.verdict,
    }


def _records(advice: Advice) -> int:
    return advice.batch * advice.outlook.num_steps


def _hours(advice: Advice, request: Request) -> float | None:
    return None if request.records_per_second is None else _records(advice) / request.records_per_second / 3600


def _cost(advice: Advice, request: Request) -> str:
    hours = _hours(advice, request)
    if hours is None:
        return f"{_records(advice):,} records in forward and backward passes (--records-per-second tells the hours)"
    return f"{_records(advice):,} records, {hours:.2g} hours at {request.records_per_second:g} a second"
