"""Refusals of options that release more of a private evaluation set than its noisy metrics, or have no budget."""

from __future__ import annotations

from collections.abc import Iterator

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import shown
from hf_dpopt.common.refusal import Refusal, raise_first
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs

BUDGET = ("eval_target_epsilon", "eval_target_delta", "eval_times", "eval_loss_bound")
METRICS = ("accuracy", "f1", "loss")


def check_private_evaluation(args: DPTrainingArguments, inputs: TrainerInputs) -> None:
    """Refuse options of an evaluation set that do not go with what it was declared to be."""
    if args.eval_data_privacy != "private":
        raise_first(_on_others(args))
        return
    if args.eval_times is not None:
        check_count("eval_times", args.eval_times)
    raise_first(_on_private(args, inputs))


def _on_others(args: DPTrainingArguments) -> Iterator[Refusal]:
    for name in BUDGET:
        yield (
            getattr(args, name) is not None,
            f"{name}={shown(getattr(args, name))} is for a private evaluation set, and it was declared "
            f"{args.eval_data_privacy!r}.",
            "Add --eval_data_privacy private, or leave it out.",
        )


def _on_private(args: DPTrainingArguments, inputs: TrainerInputs) -> Iterator[Refusal]:
    yield (
        args.tuned_runs is not None,
        f"eval_data_privacy='private' with tuned_runs={args.tuned_runs or 0:g}: each run would spend "
        "eval_target_epsilon, and what the choice between them costs the people in the evaluation set is not "
        "accounted for.",
        "Choose by public data, or train one run.",
    )
    yield (
        args.eval_target_epsilon is None,
        "eval_data_privacy='private' has no budget for the people in the evaluation set.",
        "Add --eval_target_epsilon 2, say; it is theirs, and does not touch target_epsilon.",
    )
    # a set that comes later is checked when it is evaluated
    sets, delta = inputs.eval_dataset, args.eval_target_delta
    several = sets.values() if isinstance(sets, dict) else [sets]
    largest = max([1, *(len(one) for one in several if hasattr(one, "__len__"))])
    yield (
        delta is not None and not (0 < delta < 1 and delta * largest <= 1),
        f"eval_target_delta={delta or 0:g} is outside of 0 to 1/n = {1 / largest:.3g}, with n = {largest} records in "
        "the evaluation set.",
        "Leave it out: the default is below.",
    )
    yield (
        args.privacy_unit == "user",
        "eval_data_privacy='private' protects single records of the evaluation set, and privacy_unit='user' asks for "
        "whole users, who may have several.",
        "Evaluate on one record of each user, in a run with privacy_unit='example', or on public data.",
    )
    for what in ("compute_metrics", "preprocess_logits_for_metrics"):
        yield (
            getattr(inputs, what) is not None,
            f"`{what}` sees exact predictions of single records, and eval_data_privacy='private' releases noisy sums "
            "alone: loss, accuracy, F1.",
            "Leave it out.",
        )
    best = args.metric_for_best_model
    yield (
        best is not None and not isinstance(sets, dict) and best.removeprefix("eval_") not in METRICS,
        f"metric_for_best_model={shown(best)} is no metric of a private evaluation set.",
        f"Use one of: {', '.join(METRICS)} (accuracy and f1 for classifiers, f1 for two labels).",
    )
