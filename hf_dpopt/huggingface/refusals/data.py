"""Refusals of datasets and collators: records that cannot be sampled, and evaluations that would tell of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_dpopt.common.checks import check_at_most, check_count
from hf_dpopt.common.errors import DPConfigError, Refusal, refuses, shown
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.plan.size_limits import MAX_UNITS
from hf_dpopt.records.overlap import TrainingRows, is_a

BUDGET = ("eval_target_epsilon", "eval_times", "eval_loss_bound")  # of a private set
METRICS = ("accuracy", "f1", "loss")  # of one


def check_datasets(inputs: TrainerInputs) -> None:
    """Refuse what is no dataset, by the parameter of the trainer; an evaluation set may be a stream.

    Raises:
        DPConfigError: for text and classes, for a length that is no count or cannot be told, and for records to train
            on that cannot be read by number.
    """
    for name in ("train_dataset", "eval_dataset", "public_dataset"):
        dataset = getattr(inputs, name)
        if isinstance(dataset, str | bytes | type):
            raise DPConfigError(
                f"{name}={shown(dataset)} is no dataset. Load it: datasets.load_dataset(..), or a list of records."
            )
        if name != "eval_dataset" and any(is_a(dataset, kind) for kind in ("DatasetDict", "IterableDatasetDict")):
            splits, kind = list(map(str, dataset)), type(dataset).__name__
            one = splits[0] if splits and "train" not in splits else "train"
            raise DPConfigError(f"{name} is a {kind} with the splits {', '.join(splits)}: pass dataset[{one!r}].")
        if dataset is None or not hasattr(dataset, "__len__"):
            continue
        try:
            num = len(dataset)
        except Exception as error:
            raise DPConfigError(
                f"The length of {name} cannot be told: len() fails ({type(error).__name__}: {error}). Let __len__ "
                "return the number of records."
            ) from error
        check_at_most(f"The length of {name}", num, MAX_UNITS, "one step draws from all of them. Take a sample.")
    for name in ("train_dataset", "public_dataset"):
        if (dataset := getattr(inputs, name)) is not None:
            check_is_no_stream(name, dataset)


def check_is_no_stream(name: str, dataset: Any) -> None:
    """Refuse a dataset whose records cannot be read by number."""
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DPConfigError(
            f"`{name}` is a stream, and records are read by number. Load it with streaming=False, which maps it from "
            "the disk, or write it down: Dataset.from_generator(lambda: iter(stream)) (docs/clusters.md)."
        )


@refuses
def check_data(inputs: TrainerInputs, training: TrainingRows) -> Iterator[Refusal]:
    """Refuse datasets that cannot be sampled, or whose evaluation would release the training data."""
    if inputs.train_dataset is None:
        return
    yield len(inputs.train_dataset) == 0, "The training dataset is empty. Check the file and the preprocessing."
    check_evaluation(inputs.eval_dataset, training)
    yield (
        getattr(inputs.data_collator, "seed", None) is not None,
        "The collator has a seed of its own: its draws are public, and one record more shifts those of the others. "
        "Leave seed=None; masks are then drawn from a secret key.",
    )


def check_left(given: Any, prepared: Any, args: Any, name: str) -> None:
    """Refuse records of which a trainer of TRL left none; what follows there fails on an empty dataset.

    Args:
        given, prepared: the dataset before and after the trainer prepared it.
        args: training arguments.
        name: name of the dataset in the message.
    """
    if hasattr(prepared, "__len__") and len(given) > len(prepared) == 0:
        raise DPConfigError(
            f"max_length={args.max_length}: no record of the {name} dataset is left: none fits and has a token to "
            "learn. Set a larger max_length (None: no limit); check assistant_only_loss and completion_only_loss."
        )


def check_batch(args: Any, product: int, num_sampled: int) -> None:
    """Refuse a logical batch that is larger than the dataset, by the options that it was given with.

    Args:
        args: arguments of the run.
        product: the batch where `expected_batch_size` was not given.
        num_sampled: records, users or places that a batch is drawn from.
    """
    batch, names = args.expected_batch_size or product, ["expected_batch_size"]
    if args.expected_batch_size is None:
        names = ["per_device_train_batch_size", "gradient_accumulation_steps", "world_size"]
    given = [f"{name}={getattr(args, name)}" for name in names if len(names) == 1 or getattr(args, name) > 1]
    if batch > num_sampled:
        raise DPConfigError(
            f"{' x '.join(given)}: a batch of {batch} is larger than the dataset, from whose {num_sampled} "
            f"{'users' if args.privacy_unit == 'user' else 'records'} it is drawn. Use a smaller batch."
        )


def check_evaluation(dataset: Any, training: TrainingRows) -> None:
    """Refuse metrics on training records.

    Args:
        dataset: the evaluation set, or several by their names.
        training: rows of the training set.

    Raises:
        DPConfigError: for a view of the training set, or a set of which at least half are copies of its records.
    """
    several = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    if any(training.make_up(one) for one in several):
        raise DPConfigError(
            "The evaluation dataset is the training dataset, or a part or a copy of it: its metrics would be exact "
            "values of private data. Use held-out records: split before training, and take copies out."
        )


@refuses
def check_private_evaluation(inputs: TrainerInputs) -> Iterator[Refusal]:
    """Refuse options that release more of a private evaluation set than noisy metrics, or that have no budget."""
    args = inputs.args
    is_private = args.eval_data_privacy == "private"
    for name in BUDGET:
        yield (
            not is_private and getattr(args, name) is not None,
            f"{name}={shown(getattr(args, name))} is for a private evaluation set, and it was declared "
            f"{args.eval_data_privacy!r}. Add --eval_data_privacy private, or leave it out.",
        )
    if not is_private:
        return
    if args.eval_times is not None:
        check_count("eval_times", args.eval_times)
    yield (
        args.tuned_runs is not None,
        f"eval_data_privacy='private' with tuned_runs={args.tuned_runs or 0:g}: what the choice between runs costs "
        "the people in the evaluation set is not accounted for. Choose by public data, or train one run.",
    )
    yield (
        args.eval_target_epsilon is None,
        "eval_data_privacy='private' has no budget for the people in the evaluation set. Add --eval_target_epsilon "
        "2, say; it is theirs, and does not touch target_epsilon.",
    )
    yield (
        args.privacy_unit == "user",
        "eval_data_privacy='private' protects single records, and privacy_unit='user' asks for whole users. Evaluate "
        "on one record of each user in a run with privacy_unit='example', or on public data.",
    )
    for what in ("compute_metrics", "preprocess_logits_for_metrics"):
        yield (
            getattr(inputs, what) is not None,
            f"`{what}` sees exact predictions of single records, and eval_data_privacy='private' releases noisy sums "
            "alone: loss, accuracy, F1. Leave it out.",
        )
    best = args.metric_for_best_model
    yield (
        best is not None and not isinstance(inputs.eval_dataset, dict) and best.removeprefix("eval_") not in METRICS,
        f"metric_for_best_model={shown(best)} is no metric of a private evaluation set. Use one of: "
        f"{', '.join(METRICS)} (accuracy and f1 for classifiers, f1 for two labels).",
    )
