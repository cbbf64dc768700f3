"""Features of the frozen part of a model in place of its inputs: a head is trained on them in seconds.

The frozen part gives a record the same features in every pass, so they are computed once. Those of the training
records are private data and are kept in the private folder of the run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_dpopt import DPTrainingArguments
from hf_dpopt.convex.features import compute_features
from hf_dpopt.run.keys import private_folder
from recipes.classifiers import is_pooled


class FeatureRows(Dataset):
    """Features, (N, H), and labels, (N,), record by record; no labels where there are none."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor | None):
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = {"features": self.features[i]}
        return row if self.labels is None else {**row, "labels": self.labels[i]}

    @property
    def column_names(self) -> list[str]:
        return ["features"] if self.labels is None else ["features", "label"]

    def remove_columns(self, names: Sequence[str]) -> FeatureRows:
        """The same without labels, where they are named."""
        return FeatureRows(self.features, None) if "label" in names else self


def can_train_on_features(model: PreTrainedModel, unit: str) -> bool:
    """Whether features of a frozen model stand for its inputs: pooled states, labels, records as units, and float32.

    In bfloat16 rounding depends on the other records of a batch; such a model is trained over its inputs.
    """
    if not is_pooled(model.config) or model.config.num_labels == 1:
        return False
    return unit != "user" and {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}


def feature_splits(
    model: PreTrainedModel, splits: dict[str, Any], collate: Any, args: DPTrainingArguments, *, is_private: bool
) -> dict[str, FeatureRows]:
    """Features and labels of every split of tokenized records.

    Args:
        model: a classifier of which the head alone is trained; its ``forward`` takes ``features`` in place of inputs.
        splits: name -> tokenized records.
        collate: makes a batch of records.
        args: arguments of the run.
        is_private: whether "train" is: its features are kept in the private folder of the run, for a resume.
    """
    found = {}
    for name, split in splits.items():
        cache = private_folder(args.private_state_dir, args.output_dir) if name == "train" and is_private else None
        inputs = split.remove_columns([column for column in ("label",) if column in split.column_names])
        with args.main_process_first(desc=f"features of {name}"):
            features = compute_features(
                model.to(args.device),
                inputs,
                collate,
                batch_size=args.per_device_train_batch_size,
                cache=cache,
                progress=None if args.disable_tqdm else f"features of {name}",
            )
        labels = torch.tensor(split["label"]) if "label" in split.column_names else None
        found[name] = FeatureRows(features, labels)
    return found
