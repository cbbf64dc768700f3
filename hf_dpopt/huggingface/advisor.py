"""The advisor of a run: options that were left at their defaults are chosen before the plan is made.

A typed value that equals the default counts as not set. Other values stay (with ``advisor="all"``, only optimizer and
model do). A resumed run keeps the options that it began with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.workload import mean_step_size
from hf_dpopt.noise.registry import is_independent
from hf_dpopt.plan.advice import Advice, TrainingJob, advise, kind_of
from hf_dpopt.plan.outlook import Kind, Objective
from hf_dpopt.plan.plan import PrivacyPlan

TUNED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "dp_adamw")  # that the advised learning rates are for
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice", "ForQuestionAnswering")
POISSON = ("auto", "truncated_poisson", "poisson")  # samplers that the advised batches are for
REPLACED = ("expected_batch_size", "learning_rate")  # by `advisor="all"`, whatever they are
KEPT = "_chosen_by_advisor"  # attribute of arguments: option -> value that the advisor set


@dataclasses.dataclass(frozen=True)
class Trained:
    """Parts of a run that the advisor has to know, beside the arguments.

    Attributes:
        kind: see `TrainingJob`.
        objective: see `TrainingJob`.
        size: weights of the model, frozen ones included; None for one that is not loaded yet.
        is_plain: whether the gradients reach the optimizer in the coordinates that the advice is for.
        is_tuned: whether the optimizer is the one that the advised learning rates are for.
        is_glue: whether a new head gives a text one label, so that recipes/glue.py trains such a job, too.
        starts_trained: whether adapters are added to a language model whose own head makes the predictions.
    """

    kind: Kind
    objective: Objective
    size: int | None
    is_plain: bool
    is_tuned: bool
    is_glue: bool = False
    starts_trained: bool = False

    @classmethod
    def of(cls, inputs: TrainerInputs) -> Trained:
        """Look at what the trainer was given."""
        args, model, adapters = inputs.args, inputs.model, inputs.peft_config
        name = str(getattr(args.optim, "value", args.optim))
        own = inputs.optimizers not in (None, (None, None)) or inputs.optimizer_cls_and_kwargs is not None
        plain = args.preconditioner == "none" and inputs.preclip is None
        is_plain = plain and args.local_training is None
        is_tuned = is_plain and name in TUNED_OPTIMIZERS and not own
        if not isinstance(model, nn.Module):
            kind: Kind = "full" if adapters is None else "lora"
            return cls(kind, "generation", None, is_plain, is_tuned, starts_trained=adapters is not None)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        objective: Objective = "classification" if type(base).__name__.endswith(CLASSIFIERS) else "generation"
        has_language_head = any(
            isinstance(part, PreTrainedModel) and part.get_output_embeddings() is not None for part in base.modules()
        )
        is_glue = type(base).__name__.endswith(CLASSIFIERS[0]) and not has_language_head
        size = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if adapters is not None or hasattr(model, "peft_config"):
            return cls("lora", objective, size, is_plain, is_tuned, is_glue, has_language_head)
        body = getattr(base, "base_model", base)
        layers = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        # the rate of a head is that of one linear layer; RoBERTa's has a hidden one, which would not bear it
        is_alone = trained == size if body is base else not any(p.requires_grad for p in body.parameters())
        is_head = is_alone and [type(model.get_submodule(name)) for name in layers] == [nn.Linear]
        return cls("head" if is_head else kind_of(trained, size), objective, size, is_plain, is_tuned, is_glue)


@dataclasses.dataclass(frozen=True)
class Advised:
    """Advice for a run, and what of it was taken.

    Attributes:
        chosen: options that were open -> values for them.
        recorded: all that was ever chosen for the run, which the plan notes down.
        advice: what is advised, with everything open, and for what; None where nothing is advised.
    """

    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recorded: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advice: Advice | None = None

    def apply(self, args: DPTrainingArguments) -> None:
        """Set what was chosen, and remember that nobody typed it: the next trainer may choose anew."""
        for name, value in self.chosen.items():
            setattr(args, name, value)
        setattr(args, KEPT, dict(self.chosen))


def ask_advisor(
    inputs: TrainerInputs,
    *,
    num_units: int,
    batch: int,
    recorded: Mapping[str, Any] | None,
    batch_stays: bool = False,
) -> Advised:
    """Choose values for what was left open. Nothing is changed yet.

    Args:
        inputs: what the trainer was given.
        num_units: records, or users.
        batch: logical batch where none is chosen.
        recorded: plan of the run that this one goes on with, or None.
        batch_stays: whether `batch` is that of a plan that was made already.

    Raises:
        DPConfigError: for recorded options that no run wrote.
    """
    args, trained = inputs.args, Trained.of(inputs)
    if recorded is not None:
        before, open_ = read_advised(recorded), _open_options(args, trained)
        if typed_batch(args) is None and args.gradient_accumulation_steps == 1:
            open_ = (*open_, "expected_batch_size")  # whatever is asked for now, the run has this batch
        return Advised({name: before[name] for name in open_ if name in before}, before)
    if args.target_epsilon is None:
        return Advised()
    try:
        return _advised(args, trained, num_units=num_units, batch=batch, batch_stays=batch_stays)
    except DPConfigError:  # of values out of range the plan knows more to say, and a budget may be beyond advice
        return Advised()


def ask_again(advised: Advised, inputs: TrainerInputs, plan: PrivacyPlan) -> Advised:
    """Choose what depends on the size of the model, for trainers that load it themselves; the batch is the plan's.

    Args:
        advised: what was chosen without the model.
        inputs: what the trainer was given, with the model that it loaded.
        plan: plan of the run.
    """
    later = ask_advisor(
        inputs, num_units=plan.num_users or plan.num_examples, batch=plan.sampler.expected_batch_size,
        recorded=advised.recorded if advised.advice is None else None,  # a run that goes on chooses nothing
        batch_stays=True,
    )  # fmt: skip
    more = {name: value for name, value in later.chosen.items() if name != "expected_batch_size"}
    return dataclasses.replace(later, chosen={**advised.chosen, **more}, recorded={**advised.recorded, **more})


def typed_batch(args: DPTrainingArguments) -> int | None:
    """Logical batch that was asked for; None where none was, or where the advisor of an earlier trainer chose it."""
    chosen = getattr(args, KEPT, {}).get("expected_batch_size")
    return None if args.expected_batch_size == chosen else args.expected_batch_size


def read_advised(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Check the advised options of a recorded plan; empty if it had none.

    Raises:
        DPConfigError: for values that no run wrote.
    """
    is_right = {
        "expected_batch_size": lambda value: type(value) is int and value >= 1,
        "learning_rate": lambda value: type(value) in (int, float) and 0 < value < math.inf,
        "warmup_steps": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    }
    if not isinstance(recorded, Mapping) or any(
        name not in is_right or not is_right[name](value) for name, value in recorded.items()
    ):
        raise DPConfigError(
            f"The ledger holds advised options that no run wrote: {recorded!r}. Put the ledger back as it was, or "
            "start over in another output_dir."
        )
    return dict(recorded)


def _advised(args: DPTrainingArguments, trained: Trained, *, num_units: int, batch: int, batch_stays: bool) -> Advised:
    open_ = _open_options(args, trained) if args.advisor != "none" else ()
    job = _job(args, trained, num_units=num_units, batch=batch)
    if batch_stays or job.passes * num_units < batch:
        open_ = tuple(name for name in open_ if name != "expected_batch_size")
    advice = advise(job)
    values, rate = advice.values, advice.learning_rate
    outlook = advice.outlook
    if "expected_batch_size" not in open_:
        outlook = job.outlook(batch)
        rate = job.learning_rate(outlook)
    share, linear = mean_step_size(args, outlook.num_steps), 0.5 * (1 + 1 / outlook.num_steps)
    if share > linear:  # a schedule that does not fall goes as far with less
        rate = float(f"{linear / share * rate:.1e}")
    values["learning_rate"] = rate
    chosen = {name: values[name] for name in open_}
    return Advised(chosen, chosen, advice)


def _open_options(args: DPTrainingArguments, trained: Trained) -> tuple[str, ...]:
    """Options that were not typed, or may be replaced, and that the advisor knows values for."""
    replaced = REPLACED if args.advisor == "all" else ()
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    earlier = getattr(args, KEPT, {})

    def is_open(name: str) -> bool:
        value = getattr(args, name)
        return name in replaced or value == defaults[name] or (name in earlier and value == earlier[name])

    open_ = []
    # options of noise and preconditioner are in steps, and made for as many as there were
    counts_steps = not is_independent(args.noise_mechanism) or not trained.is_plain or args.sampling not in POISSON
    is_counted = args.max_steps > 0 or (args.gradient_accumulation_steps != 1 and not replaced)
    if is_open("expected_batch_size") and not is_counted and not counts_steps:
        open_.append("expected_batch_size")
    if trained.is_tuned and trained.size is not None and is_open("learning_rate"):
        open_.append("learning_rate")
        if is_open("warmup_steps") and is_open("lr_scheduler_type"):
            open_.append("warmup_steps")
    return tuple(open_)


def _job(args: DPTrainingArguments, trained: Trained, *, num_units: int, batch: int) -> TrainingJob:
    assert args.target_epsilon is not None
    return TrainingJob(
        num_units=num_units,
        target_epsilon=args.target_epsilon,  # also of a tuning, whose runs have a tenth more noise
        target_delta=args.target_delta,
        passes=args.num_train_epochs if args.max_steps <= 0 else args.max_steps * batch / num_units,
        kind=trained.kind,
        objective=trained.objective,
        has_trained_head=bool(args.earlier_runs) or trained.starts_trained,
        **({} if trained.size is None else {"model_size": trained.size}),
    )
