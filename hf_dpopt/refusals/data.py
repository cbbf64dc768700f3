"""Datasets and collators: what a record is, and whose records are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from hf_dpopt.errors import DPConfigError
from hf_dpopt.refusals.table import Refusal, raise_first


def check_data(train_dataset: Any, eval_dataset: Any, data_collator: Any) -> None:
    """Refuses datasets that cannot be sampled, or whose evaluation would release the training data."""
    raise_first(_on_data(train_dataset, eval_dataset, data_collator))


def is_training_data(dataset: Any, training: Any) -> bool:
    """The same object, a `Subset` of it, or a copy that `datasets` knows to be one; other copies are not found."""
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return any(is_training_data(part, training) for part in dataset.datasets)
    if isinstance(dataset, torch.utils.data.Subset):
        if isinstance(training, torch.utils.data.Subset) and dataset.dataset is training.dataset:
            return not set(dataset.indices).isdisjoint(training.indices)
        return is_training_data(dataset.dataset, training)
    fingerprint = getattr(dataset, "_fingerprint", None)
    return dataset is training or (fingerprint is not None and fingerprint == getattr(training, "_fingerprint", None))


def _on_data(train_dataset: Any, eval_dataset: Any, data_collator: Any) -> Iterator[Refusal]:
    yield (
        isinstance(train_dataset, torch.utils.data.IterableDataset) or not hasattr(train_dataset, "__len__"),
        "The training dataset is iterable (streaming), so records cannot be sampled by index.",
        "Load it as a map-style dataset (streaming=False).",
    )
    yield len(train_dataset) == 0, "The training dataset is empty.", "Check the file and the preprocessing."
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    yield (
        any(is_training_data(e, train_dataset) for e in evaluated),
        "The evaluation dataset is the training dataset: its metrics would be exact values of private data.",
        "Hold out records for evaluation.",
    )
    yield (
        isinstance(data_collator, DataCollatorWithFlattening),
        "DataCollatorWithFlattening packs records into one row, so they would be clipped as one.",
        "Use DataCollatorWithPadding.",
    )
    yield (
        getattr(data_collator, "seed", None) is not None,
        "The collator has a seed of its own: its coins are public, and one record more shifts those of the others.",
        "Leave seed=None; masks are then drawn from a secret key.",
    )


def check_labels(train_dataset: Any, model: nn.Module) -> None:
    """Refuses labels out of range, which would end the run in the step that samples them and tell that they are there.

    Looks at classification labels only: one integer per record, in a column named label or labels.
    """
    config = getattr(model, "config", None)
    num_labels = getattr(config, "num_labels", 0)
    single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    if num_labels < 2 or not single or not type(model).__name__.endswith("ForSequenceClassification"):
        return
    columns = getattr(train_dataset, "column_names", None)
    if isinstance(columns, list):
        labels: Any = next((train_dataset[name] for name in ("label", "labels") if name in columns), [])
    elif isinstance(train_dataset, list):
        labels = [row.get("label", row.get("labels")) for row in train_dataset if isinstance(row, dict)]
    else:
        return
    wrong = next((i for i, x in enumerate(labels) if isinstance(x, int) and not 0 <= x < num_labels), None)
    if wrong is not None:
        raise DPConfigError(
            f"The label of training record {wrong} is outside 0 to {num_labels - 1}, the labels of the model. Correct "
            "it, or load the model with num_labels=<number of labels>."
        )
