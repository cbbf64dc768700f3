"""The recipe of a run: what was left at its default is chosen by the advisor before the plan is made.

A value that was typed and equals the default cannot be told from one that was not, so it counts as not set; the log
says so. What was set by hand stays, and so do optimizer and model. A run that goes on keeps the recipe it began with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.workload import is_adaptive, mean_step_size
from hf_dpopt.plan.advice import Advice, TrainingJob, advise
from hf_dpopt.plan.outlook import Kind, Objective, Outlook, outlook_of, with_independent_noise
from hf_dpopt.plan.plan import PrivacyPlan

TUNED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "dp_adamw")  # that the advised learning rates are for
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice", "ForQuestionAnswering")
MUCH = 1.5  # times the noise of a step under independent noise: nu_dpftrl, nu 0.1, loses nothing at 2, banded all at 3
HEAD_SHARE = 0.02  # of the weights: a model that trains less, without adapters, trains a head


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Advice for a run, and what of it was taken.

    Attributes:
        job: what is trained, for how long; None where nothing can be advised (no budget, or no data).
        advice: what is advised, with everything open.
        chosen: options that were open -> values that were set.
    """

    job: TrainingJob | None = None
    advice: Advice | None = None
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def apply(self, args: DPTrainingArguments) -> None:
        """Set what was chosen."""
        for name, value in self.chosen.items():
            setattr(args, name, value)


def choose_recipe(
    args: DPTrainingArguments,
    given: Mapping[str, Any],
    *,
    num_units: int,
    batch: int,
    recorded: Mapping[str, Any] | None,
) -> Recipe:
    """Choose values for what was left open. Nothing is changed yet.

    Args:
        args: arguments of the run.
        given: what the trainer was called with.
        num_units: records, or users.
        batch: logical batch where none is chosen.
        recorded: plan of the run that this one goes on with, or None.
    """
    if args.target_epsilon is None:
        return Recipe()
    open_ = _open_options(args, given) if args.recipe == "auto" else ()
    if recorded is not None:
        before = recorded.get("recipe", {})
        return Recipe(chosen={name: before[name] for name in open_ if name in before})
    job = _job(args, given, num_units=num_units, batch=batch)
    advice = advise(job)
    if not open_:
        return Recipe(job, advice)
    values = advice.values
    rate = advice.learning_rate
    if "expected_batch_size" not in open_:
        rate = job.learning_rate(job.outlook(batch))
    share = mean_step_size(args, 100)
    # a schedule that does not fall goes as far with less
    values["learning_rate"] = float(f"{min(1.0, 0.5 / share) * rate:.1e}")
    return Recipe(job, advice, {name: values[name] for name in open_})


def _open_options(args: DPTrainingArguments, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Options that were not set and that the advisor knows values for."""
    fields = {field.name: field.default for field in dataclasses.fields(args)}

    def is_default(*names: str) -> bool:
        return all(getattr(args, name) == fields[name] for name in names)

    open_ = []
    if args.expected_batch_size is None and args.gradient_accumulation_steps == 1 and args.max_steps <= 0:
        open_.append("expected_batch_size")
    is_plain = (
        args.preconditioner_name() == "none" and given.get("preclip") is None and args.local_learning_rate is None
    )
    name = str(getattr(args.optim, "value", args.optim))
    own = [key for key in ("optimizers", "optimizer_cls_and_kwargs") if given.get(key) not in (None, (None, None))]
    if is_plain and name in TUNED_OPTIMIZERS and not own and is_default("learning_rate"):
        open_.append("learning_rate")
        if is_default("warmup_steps", "lr_scheduler_type"):
            open_.append("warmup_steps")
    return tuple(open_)


def _job(args: DPTrainingArguments, given: Mapping[str, Any], *, num_units: int, batch: int) -> TrainingJob:
    kind, objective, size = _trained(given.get("model"), given.get("peft_config"))
    passes = args.num_train_epochs if args.max_steps <= 0 else args.max_steps * batch / num_units
    if not passes > 0:
        raise DPConfigError(f"num_train_epochs={args.num_train_epochs} is no training. Use 3, or more.")
    assert args.target_epsilon is not None
    return TrainingJob(
        num_units=num_units,
        target_epsilon=args.target_epsilon,
        target_delta=args.target_delta,
        passes=float(passes),
        kind=kind,
        objective=objective,
        **({} if size is None else {"model_size": size}),
    )


def _trained(model: Any, adapters: Any) -> tuple[Kind, Objective, int | None]:
    """Kind and objective of the training, and the weights of the model; None for one that is not loaded yet."""
    if not isinstance(model, nn.Module):
        return ("full" if adapters is None else "lora"), "generation", None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    objective: Objective = "classification" if type(base).__name__.endswith(CLASSIFIERS) else "generation"
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if adapters is not None or hasattr(model, "peft_config"):
        return "lora", objective, size
    return ("head" if trained < HEAD_SHARE * size else "full"), objective, size


# --- what the log says -----------------------------------------------------------------------------------------------


def announce(plan: PrivacyPlan, args: DPTrainingArguments, given: Mapping[str, Any], recipe: Recipe) -> None:
    """Say what was chosen, what the noise leaves, and what would be better; warn of a run that cannot learn."""
    if recipe.chosen:
        logger.info(
            f"Recipe: {_flags(recipe.chosen)} (chosen from public numbers, because they were left at their defaults; "
            "--recipe none leaves them there)."
        )
    if not plan.is_private:
        return
    outlook = _outlook(plan, args, given, recipe)
    logger.info(f"Outlook: {outlook.describe()}.")
    better = _better(outlook, recipe, plan)
    if outlook.verdict == "hopeless":
        logger.warning(f"{'!' * 20} THIS RUN IS HOPELESS {'!' * 20} {_why(outlook)} {better}")
    elif outlook.verdict == "weak" or better:
        logger.info(f"Advice: {better or 'no setting is better with so few records and passes.'}")
    _warn_of_correlated_noise(plan, outlook)


def _outlook(plan: PrivacyPlan, args: DPTrainingArguments, given: Mapping[str, Any], recipe: Recipe) -> Outlook:
    kind, objective, size = _trained(given.get("model"), given.get("peft_config"))
    adaptive = is_adaptive(args, given)
    reach = advised = None
    known = recipe.job is not None and args.preconditioner_name() == "none" and args.local_learning_rate is None
    if known and adaptive and given.get("optimizers") in (None, (None, None)):
        assert recipe.job is not None
        reach = args.learning_rate * plan.num_steps * mean_step_size(args, plan.num_steps)
        batch = plan.sampler.expected_batch_size
        rate = recipe.job.learning_rate(recipe.job.outlook(batch, noise_multiplier=plan.noise_multiplier))
        advised = rate * plan.num_steps / 2
    return outlook_of(plan, kind, is_adaptive=adaptive, reach=reach, advised_reach=advised)


def _why(outlook: Outlook) -> str:
    if outlook.is_too_short:
        assert outlook.reach is not None and outlook.advised_reach is not None
        return (
            f"Its learning rates add up to {outlook.reach:.2g}, and {outlook.advised_reach:.2g} is what it takes: the "
            "weights stay where they are."
        )
    return (
        f"The noise of a step is {outlook.step_ratio:.3g} times the signal, and all {outlook.num_steps} steps are "
        f"worth {outlook.useful_steps:.2g} without noise: what it learns is noise."
    )


def _better(outlook: Outlook, recipe: Recipe, plan: PrivacyPlan) -> str:
    """Say what the advisor would change, and what that is worth; empty if it would gain little."""
    advice = recipe.advice
    if advice is None:
        asked = f"hf-dpopt plan --num-examples {plan.num_examples} --epsilon 8"
        return f"`{asked}` advises." if outlook.verdict != "good" else ""
    gains = advice.outlook.useful_steps > 1.2 * outlook.useful_steps
    if not gains and not outlook.is_too_short:
        return "" if outlook.verdict == "good" else _more_passes(advice.job)
    names = ("expected_batch_size", "learning_rate", "warmup_steps")
    worth = f"its {advice.outlook.num_steps} steps are worth {advice.outlook.useful_steps:.3g}"
    text = f"For the same records and budget use {_flags({n: advice.values[n] for n in names})}: {worth}."
    if advice.outlook.verdict != "good":
        text += f" {_more_passes(advice.job)}"
    return text


def _more_passes(job: TrainingJob) -> str:
    for passes in (10, 30, 100):
        if passes > job.passes:
            more = advise(dataclasses.replace(job, passes=float(passes)))
            if more.outlook.verdict == "good":
                return (
                    f"With --num_train_epochs {passes}, batches of {more.batch} and --learning_rate "
                    f"{more.learning_rate:g} it would be {more.outlook.useful_steps:.3g}."
                )
    return "More passes do not help: it takes more records, a larger epsilon, or a linear head (linear_probe.py)."


def _flags(values: Mapping[str, Any]) -> str:
    words = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return " ".join(f"--{name} {word}" for name, word in words.items())


def _warn_of_correlated_noise(plan: PrivacyPlan, outlook: Outlook) -> None:
    """Warn of correlated noise that leaves more error than independent noise, or that the optimizer cannot use."""
    if plan.strategy.is_independent or not math.isfinite(plan.epsilon()):
        return
    beside = with_independent_noise(plan)
    noise, alone = outlook.run_noise, beside.run_noise
    facts = (
        f"{plan.config.noise_mechanism} noise leaves {noise:.3g} clips of error in the mean over the run, independent "
        f"noise at the same budget {alone:.3g}; in a single step {outlook.noise:.3g} and {beside.noise:.3g}."
    )
    if noise > alone:
        logger.warning(f"{facts} Use --noise_mechanism gaussian, which is better in both.")
    elif outlook.is_adaptive and outlook.noise > MUCH * beside.noise:
        logger.warning(
            f"{facts} AdamW divides by a second moment that the noise of single steps fills, and lost up to 17 points "
            "with such noise (docs/mechanisms.md). Use --optim sgd --optim_args momentum=0.9, or --noise_mechanism "
            "gaussian."
        )
