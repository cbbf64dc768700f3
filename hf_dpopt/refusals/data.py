"""Datasets and collators: what a record is, and whose records are looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import DataCollatorWithFlattening

from hf_dpopt.refusals.table import Refusal, raise_first

MAX_COMPARED = 200_000


def check_data(train_dataset: Any, eval_dataset: Any, data_collator: Any) -> None:
    """Refuses datasets that cannot be sampled, or whose evaluation would release the training data."""
    raise_first(_on_data(train_dataset, eval_dataset, data_collator))


def is_training_data(dataset: Any, training: Any) -> bool:
    """Whether they share rows of one dataset, through any `Subset` and `ConcatDataset`, or rows of a list.

    Also a copy that `datasets` knows to be one. Other copies are not found.
    """
    if dataset is None or training is None:
        return False
    fingerprint = getattr(dataset, "_fingerprint", None)
    if dataset is training or (fingerprint is not None and fingerprint == getattr(training, "_fingerprint", None)):
        return True
    ours, theirs = _sources(dataset), _sources(training)
    if any(not ours[base].isdisjoint(theirs[base]) for base in ours.keys() & theirs.keys()):
        return True
    return not _identities(dataset).isdisjoint(_identities(training))


def _sources(dataset: Any) -> dict[int, set[int]]:
    """Identity of every dataset that rows come from -> their numbers there."""
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        found: dict[int, set[int]] = {}
        for part in dataset.datasets:
            for base, rows in _sources(part).items():
                found.setdefault(base, set()).update(rows)
        return found
    if isinstance(dataset, torch.utils.data.Subset):
        numbers, inner = [int(i) for i in dataset.indices], dataset.dataset
        while isinstance(inner, torch.utils.data.Subset):
            numbers, inner = [int(inner.indices[i]) for i in numbers], inner.dataset
        return {id(inner): set(numbers)} if not isinstance(inner, torch.utils.data.ConcatDataset) else _sources(inner)
    return {id(dataset): set(range(len(dataset)))} if hasattr(dataset, "__len__") else {}


def _identities(dataset: Any) -> set[int]:
    """Of the rows of a list or tuple, which slices and copies of it keep."""
    return {id(row) for row in dataset} if isinstance(dataset, (list, tuple)) else set()


def shared_rows(dataset: Any, training: Any) -> int:
    """How many rows of `dataset` are in `training`, by their contents; all of them if it is known to be a part.

    Looks at `MAX_COMPARED` rows of the training dataset at most.
    """
    if training is None:
        return 0
    if is_training_data(dataset, training):
        return len(dataset)
    ours = [_contents(dataset[i]) for i in range(len(dataset))]
    theirs = {_contents(training[i]) for i in range(min(len(training), MAX_COMPARED))}
    return sum(row in theirs for row in ours)


def _contents(row: Any) -> str:
    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    if isinstance(row, Mapping):
        row = sorted((str(name), repr(plain(value))) for name, value in row.items())
    return hashlib.sha256(repr(row).encode()).hexdigest()


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
