"""Two lines of the log: what the advisor chose with what the noise leaves of it, and what would be better.

Nothing here has a part in the run: what cannot be told, or would take long to compute, is left out.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.advisor import Advised, Trained
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.workload import is_adaptive, mean_step_size
from hf_dpopt.plan.advice import TrainingJob, head_instead
from hf_dpopt.plan.outlook import MAX_CORRELATED_STEPS, Outlook, outlook_of
from hf_dpopt.plan.plan import PrivacyPlan

# Times the advised learning rate, or that part of it: beyond, a given one is warned of. Declared; a simulated head on
# the notes of benchmarks/patient_notes.py lost 3 points at a quarter, 8 at a sixteenth, none at 4 times, 3 at 16.
APART = 4.0


def announce(plan: PrivacyPlan, inputs: TrainerInputs, advised: Advised) -> None:
    """Say what was chosen, what the noise leaves, and what would be better; warn of a run that cannot learn.

    Args:
        plan: plan of the run.
        inputs: what the trainer was given, with what was chosen and the model that is trained.
        advised: what was chosen, and the advice it is from.
    """
    if current_ranks().rank != 0:
        return
    chosen, warnings, advice = "", [], ""
    if advised.chosen:
        none = spelled({"advisor": "none"})
        chosen = f"{spelled(advised.chosen)} from public numbers ({none} leaves the options as they are). "
    is_long = plan.num_steps > MAX_CORRELATED_STEPS and not plan.strategy.is_independent
    try:
        if plan.is_private and not is_long:
            args, trained = inputs.args, Trained.of(inputs)
            outlook = _outlook(plan, inputs, advised, trained)
            chosen += f"Outlook: {outlook.describe()}."
            rate = _given_rate(outlook, advised, args)
            better = _better(outlook, advised, plan, args, trained)
            is_poor = outlook.verdict == "poor" and not (rate and outlook.is_too_short)
            poor = f"This run is expected to learn little: {_why(outlook)} {better}" if is_poor else ""
            warnings = [text for text in (rate, poor) if text]
            if outlook.verdict in ("weak", "on a trained head") or better:
                advice = f"Advice: {better or 'no setting is better with so few records and passes.'}"
    except DPConfigError as error:  # of a run that is not made, for a comparison
        advice = f"No advice: {error}"
    if chosen:
        logger.info(f"Advisor: {chosen.strip()}")
    if warnings:
        logger.warning(" ".join(warnings))
    elif advice:
        logger.info(advice)


def spelled(values: Mapping[str, Any]) -> str:
    """Options as they are typed where this run was started: flags on a command line, keywords in a script."""
    words = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    if flags & {field.name for field in dataclasses.fields(DPTrainingArguments)}:
        return " ".join(f"--{name} {word}" for name, word in words.items())
    return ", ".join(
        f'{name}="{word}"' if isinstance(values[name], str) else f"{name}={word}" for name, word in words.items()
    )


def _outlook(plan: PrivacyPlan, inputs: TrainerInputs, advised: Advised, trained: Trained) -> Outlook:
    args, reach, usual = inputs.args, None, None
    if advised.advice is not None and trained.is_tuned and trained.size is not None:
        reach = args.learning_rate * plan.num_steps * mean_step_size(args, plan.num_steps)
        batch = plan.sampler.expected_batch_size
        job = advised.advice.job
        rate = job.learning_rate(job.outlook(batch, noise_multiplier=plan.noise_multiplier))
        usual = rate * plan.num_steps / 2
    return outlook_of(
        plan,
        trained.kind,
        size=trained.size,
        is_adaptive=is_adaptive(inputs),
        has_trained_head=trained.starts_trained or bool(plan.earlier),
        reach=reach,
        advised_reach=usual,
    )


def _given_rate(outlook: Outlook, advised: Advised, args: DPTrainingArguments) -> str:
    """Judge a learning rate that was given for another batch than the chosen one; empty if it is near the advised."""
    if "expected_batch_size" not in advised.chosen or "learning_rate" in advised.chosen or not outlook.reach:
        return ""
    assert outlook.advised_reach is not None
    far = outlook.reach / outlook.advised_reach
    if 1 / APART <= far <= APART:
        return ""
    wrong = "small" if far < 1 else "large"
    better = {"learning_rate": float(f"{args.learning_rate / far:.1e}")}
    return (
        f"{spelled({'learning_rate': args.learning_rate})}: too {wrong} for the batch of {args.expected_batch_size:,} "
        f"that was chosen. Use {spelled(better)}, or {spelled({'advisor': 'all'})}, which replaces both."
    )


def _why(outlook: Outlook) -> str:
    if outlook.is_too_short:
        assert outlook.reach is not None and outlook.advised_reach is not None
        return (
            f"the learning rate is too small. The rates of all steps add up to {outlook.reach:.2g}; "
            f"{outlook.advised_reach:.2g} is usual."
        )
    if outlook.step_ratio < 1:
        return f"{outlook.num_steps} steps are too few, however little noise they have."
    return (
        f"too much noise. It is {outlook.step_ratio:.3g} times the signal in a step, and all {outlook.num_steps} "
        f"steps are worth {outlook.useful_steps:.2g} without noise."
    )


def _better(outlook: Outlook, advised: Advised, plan: PrivacyPlan, args: DPTrainingArguments, trained: Trained) -> str:
    """Say what the advisor would change, and what that is worth; empty if it would gain little."""
    advice = advised.advice
    if advice is None:
        command, epsilon = _plan_command(plan.num_users or plan.num_examples, plan.epsilon()), plan.epsilon()
        return f"{command} advises." if outlook.verdict != "good" and 0 < epsilon < math.inf else ""
    if not advice.is_better_than(outlook):
        if outlook.is_too_short and trained.is_tuned:
            rate = advice.learning_rate
            if outlook.reach and outlook.advised_reach:  # 0 with a rate of 0
                rate = args.learning_rate * outlook.advised_reach / outlook.reach
            return f"Use {spelled({'learning_rate': float(f'{rate:.1e}')})}. {_what_would_do(advice.job, trained)}"
        return "" if outlook.verdict == "good" else _what_would_do(advice.job, trained)
    values: dict[str, Any] = {"expected_batch_size": advice.batch}
    if args.max_steps > 0:
        values["max_steps"] = advice.outlook.num_steps
    if trained.is_tuned:
        values |= {name: advice.values[name] for name in ("learning_rate", "warmup_steps")}
    worth = f"its {advice.outlook.num_steps} steps are worth {advice.outlook.useful_steps:.3g}"
    text = f"For the same records and budget use {spelled(values)}: {worth}."
    return text if advice.outlook.verdict == "good" else f"{text} {_what_would_do(advice.job, trained)}"


def _what_would_do(job: TrainingJob, trained: Trained) -> str:
    """Say what would do: a linear head, more passes over the records, or more of them."""
    rest = f"{_plan_command(job.num_units, job.target_epsilon)} shows what more passes, records or epsilon are worth."
    head = head_instead(job) if trained.is_glue else None
    if head is None:
        return rest
    text = (
        f"A linear head on the frozen model would be worth {head.outlook.useful_steps:.3g}: recipes/glue.py "
        f"--freeze encoder --pooling cls mean --num_train_epochs {head.job.passes:g}."
    )
    return text if head.outlook.verdict != "poor" else f"{text} {rest}"


def _plan_command(num_units: int, epsilon: float) -> str:
    return f"`hf-dpopt plan --num-examples {num_units} --epsilon {epsilon:.3g}`"
