"""A head that is trained first: `glue.py --start pooled` and `--warm_start_epsilon`.

A head with random weights sends random gradients into the model, and the noise of the first steps is spent on them. On
frozen features the same head is trained in a minute, with a small part of the budget. Both parts are runs on the same
records: the second one names the first among its `earlier_runs`, so epsilon is that of both together.

Features of the training records are private data and are kept in the private folder of the run alone.

`--start pooled` chooses the rest from public numbers: the budget, how many layers the model has, and whether its
tokenizer puts a token before a text that stands for all of it. What was given by hand stays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, default_data_collator
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments, TrainingJob, advise
from hf_dpopt.convex.features import compute_features, find_head
from hf_dpopt.plan.advice import HEAD_PASSES
from hf_dpopt.run.keys import private_dir, private_folder
from recipes import first_part
from recipes.classifiers import FEATURE_NORM, is_pooled
from recipes.glue_data import ClassificationData

logger = logging.getLogger(__name__)

FOLDER = "warm_start"
NORM = FEATURE_NORM  # of the features in training; those of a layer after a tanh are up to sqrt(H) long
SHARE = 0.25  # of epsilon: on SST-2 it adds 1.3 % (epsilon 8) and 1.1 % (epsilon 3) to the noise of what follows
LAYERS = 3  # the last ones: on SST-2 a head on them is 3 to 7 points ahead of one on a single state
CLIP = 0.5  # signal over clip is larger than at 1, and noise over clip is the same (docs/results.md)

# --- the start ---------------------------------------------------------------------------------------------------


def fill_start(model_args: Any, data_args: Any, training_args: DPTrainingArguments) -> None:
    """Set the part of the budget and the clip, if they were left open.

    Raises:
        DPConfigError: where there is no budget to share, or another start is asked for.
    """
    if model_args.start != "pooled":
        return
    if taken := _others(model_args, data_args, training_args):
        raise DPConfigError(f"start='pooled' does not go with {' and '.join(taken)}. Leave one of them out.")
    if training_args.target_epsilon is None:
        raise DPConfigError("start='pooled' shares a budget, and there is none. Add --target_epsilon 8.")
    if model_args.warm_start_epsilon is None:
        model_args.warm_start_epsilon = SHARE * training_args.target_epsilon
    default = next(one.default for one in dataclasses.fields(training_args) if one.name == "clipping_norm")
    if training_args.clipping_norm == default and training_args.clipping == "flat":
        training_args.clipping_norm = CLIP


def _others(model_args: Any, data_args: Any, training_args: DPTrainingArguments) -> list[str]:
    """Flags that were given and that the start does not go with."""
    others = {
        "--prompt": model_args.prompt is not None,
        "--public_file": data_args.public_file is not None,
        "--non_private": data_args.non_private,
        "--freeze encoder": model_args.freeze == "encoder",
        "--privacy_unit user": training_args.privacy_unit == "user",
        "--tuned_runs": training_args.tuned_runs is not None,
    }
    return [flag for flag, is_given in others.items() if is_given]


def fill_pooling(model_args: Any, config: Any, tokenizer: PreTrainedTokenizerBase, data: ClassificationData) -> None:
    """Set what the head reads, if it was left open and the model does not come with it.

    Raises:
        DPConfigError: for scores, which have no head for labels.
    """
    if model_args.start != "pooled":
        return
    if data.labels is None:
        raise DPConfigError("start='pooled' is for labels, and these are numbers. Leave --start out.")
    if not is_pooled(config):
        if model_args.pooling is None:
            model_args.pooling = ["cls" if tokenizer.cls_token_id is not None else "last", "mean"]
        if model_args.pooling_layers is None:
            last = config.num_hidden_layers
            model_args.pooling_layers = list(range(max(1, last - LAYERS + 1), last + 1))
    logger.info(
        f"Start: a head on {' and '.join(model_args.pooling or config.pooling)} of the layers "
        f"{model_args.pooling_layers or config.pooling_layers}, trained first with epsilon "
        f"{model_args.warm_start_epsilon:g} of the budget."
    )


# --- features of the frozen part, which gives a record the same ones in every pass -----------------------------------


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


# --- the head's own run ------------------------------------------------------------------------------------------


class HeadForSequenceClassification(PreTrainedModel):
    """The linear head of a classifier on features of its frozen part, (B, H).

    Args:
        config: configuration of the classifier.
        head: its last layer; the trained one is this very layer.
    """

    main_input_name = "features"
    # it has no attention; the configuration names that of the whole model
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: Any, head: nn.Linear):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.classifier = head

    def forward(
        self, features: torch.Tensor, labels: torch.Tensor | None = None, **unused: Any
    ) -> SequenceClassifierOutput:
        logits = self.classifier(features)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def start_head(model: PreTrainedModel, records: Any, collate: Any, args: DPTrainingArguments, epsilon: float) -> None:
    """Train the head as `warm_start` does, and let the run of `args` that follows count it."""
    first_part.count(args, Path(warm_start(model, records, collate, args, epsilon)))


def warm_start(model: PreTrainedModel, records: Any, collate: Any, args: DPTrainingArguments, epsilon: float) -> str:
    """Train the head of `model` privately on frozen features, in place.

    Args:
        model: a classifier whose last layer is linear; see `find_head`.
        records: tokenized training records with the column "label".
        collate: makes a batch of records.
        args: arguments of the run that follows; its output_dir gets a folder for this one.
        epsilon: budget of this part alone, at the delta of the whole run; > 0.

    Returns:
        The folder of the run, which the one that follows has to name in `earlier_runs`.

    Raises:
        DPConfigError: for a model without such a head, or a part that is no part of the budget.
        DPBudgetExceeded: if this part was stopped on its way: its steps are spent.
    """
    if model.config.num_labels < 2:
        raise DPConfigError("A warm start is for labels, and these are numbers. Leave warm_start_epsilon out.")
    name = find_head(model)
    head = model.get_submodule(name)
    assert isinstance(head, nn.Linear)
    folder = str(Path(args.output_dir) / FOLDER)
    head_args = _arguments(args, folder, len(records), epsilon, head)
    mark = _mark(model, name, records, head_args)
    for directory in (args.private_state_dir, head_args.private_state_dir):  # features and keys are never published
        private_dir(directory, args.output_dir, is_read=True)
    private = private_folder(head_args.private_state_dir, folder)
    weights = first_part.read_weights(Path(folder), mark, "the head")
    if weights is not None:  # of a run that was stopped later
        head.load_state_dict({key.removeprefix("classifier."): value for key, value in weights.items()})
        return folder
    with args.main_process_first(desc="features"):
        features = compute_features(
            model.to(args.device),
            records.remove_columns("label"),
            collate,
            batch_size=args.per_device_train_batch_size,
            cache=private,
            progress=None if args.disable_tqdm else "features",
        )
    scale = 1.0 if is_pooled(model.config) else NORM / math.sqrt(head.in_features)  # public: no record is looked at
    logger.info(f"Warm start: {head_args.num_train_epochs:g} passes of the head over frozen features, in {folder}.")
    trainer = DPTrainer(
        model=HeadForSequenceClassification(model.config, head),
        args=head_args,
        train_dataset=FeatureRows(features * scale, torch.tensor(records["label"])),
        data_collator=default_data_collator,
    )
    first_part.train(trainer, "the head")
    with torch.no_grad():
        head.weight *= scale
    first_part.save(trainer, mark)
    return folder


def _mark(model: PreTrainedModel, name: str, records: Any, args: DPTrainingArguments) -> dict[str, Any]:
    """Public values that a head belongs to; of the frozen part a digest."""
    digest = hashlib.blake2b(digest_size=16)
    for key, value in sorted(model.state_dict().items()):
        if not key.startswith(f"{name}."):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {
        "frozen_part": digest.hexdigest(),
        "features": [getattr(model.config, name, None) for name in ("pooling", "pooling_layers")],
        "label2id": dict(model.config.label2id),
        "num_records": len(records),
        "target_epsilon": args.target_epsilon,
        "target_delta": args.target_delta,
    }


def _arguments(
    args: DPTrainingArguments, folder: str, num_records: int, epsilon: float, head: nn.Linear
) -> DPTrainingArguments:
    """Arguments of the head's run: those of the whole run where they say who and where, the advised ones else."""
    first_part.check_epsilon(args, epsilon, "warm_start_epsilon")
    if args.privacy_unit == "user":
        raise DPConfigError("A warm start is for records, and privacy_unit is 'user'. Leave warm_start_epsilon out.")
    job = TrainingJob(
        num_units=num_records, target_epsilon=epsilon, target_delta=args.target_delta, passes=HEAD_PASSES, kind="head",
        model_size=head.weight.numel(),
    )  # fmt: skip
    advice = advise(job)
    return dataclasses.replace(
        args,
        output_dir=folder,
        private_state_dir=args.private_state_dir and f"{args.private_state_dir.rstrip('/')}-{FOLDER}",
        target_epsilon=epsilon,
        earlier_runs=None,  # the run that follows counts them, and this one
        advisor="none",
        num_train_epochs=HEAD_PASSES,
        max_steps=-1,
        per_device_train_batch_size=min(advice.batch, 4096),
        expected_batch_size=advice.batch,
        learning_rate=advice.learning_rate,
        warmup_steps=0,
        lr_scheduler_type="linear",
        optim="adamw_torch",
        save_strategy="no",
        eval_strategy="no",
        push_to_hub=False,
        load_best_model_at_end=False,
        resume_from_checkpoint=None,
        remove_unused_columns=False,
        gradient_checkpointing=False,
    )
