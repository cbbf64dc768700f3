"""Command line of `recipes/glue.py`: the flags of run_glue.py, LoRA, and what an absent flag means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dpopt import DPConfigError, DPTrainingArguments
from recipes import options
from recipes.glue_data import GLUE_LABELS
from recipes.pooled_model import WAYS
from recipes.prompts import make_prompt

SOURCES = ("model_name_or_path", "task_name", "dataset_name", "train_file", "validation_file", "test_file")

# The embedded job: some twenty seconds of reading, building and evaluating, the rest is training. Batch and learning
# rate are those of the advisor; the clip fits records whose gradients are larger than those of pretrained models.
EMBEDDED: dict[str, Any] = {
    "target_epsilon": 8.0,
    "target_delta": 1e-5,
    "clipping_norm": 10.0,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 256,
    "num_train_epochs": 3.5,
    "max_seq_length": 40,
    "eval_strategy": "steps",
    "eval_steps": 0.4,
    "logging_steps": 0.2,
    "save_strategy": "no",
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: the labels are declared, and the tokenizer comes from public text",
}

CHOSEN = {"expected_batch_size": 1334, "learning_rate": 2.7e-3}  # by the advisor, for the same job without privacy


@dataclass
class ModelArguments(options.ModelArguments):
    """Which model, and how much of it is trained."""

    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Load a model whose head has another number of labels; the head starts anew."}
    )
    start: str = field(
        default="model",
        metadata={
            "help": "pooled: a head on pooled states of the last three layers (--pooling cls mean) is trained first, "
            "with a quarter of target_epsilon (--warm_start_epsilon), and the clip is 0.5; given values stay. "
            "model: the head that comes with the model, and everything starts together.",
            "choices": ["model", "pooled"],
        },
    )
    pooling: list[str] | None = field(
        default=None,
        metadata={
            "help": "Read the mean, the first (cls) or the last token of a layer, or several of them, with a linear "
            "head in place of the one that comes with the model; 'model' keeps that one. Default: model.",
            "choices": [*WAYS, "model"],
        },
    )
    pooling_layers: list[int] | None = field(
        default=None,
        metadata={"help": "Layers that --pooling reads side by side, such as 4 5 6; default: -1, the last."},
    )
    prompt: str | None = field(
        default=None,
        metadata={
            "help": "Classify by the model's own language head: the template, such as '{text} It was {mask}.', or "
            "auto for that of a GLUE task. Default: a head of its own."
        },
    )
    label_words: list[str] | None = field(
        default=None,
        metadata={"help": "With --prompt: a word for the gap for every label, in their order: terrible great."},
    )
    warm_start_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "Train the head first, on features of the frozen model, for this part of target_epsilon (about an "
            "eighth). Takes a forward pass over the data. Default: everything starts together."
        },
    )


@dataclass
class DataTrainingArguments(options.DataArguments):
    """Which data, and how it is read."""

    task_name: str | None = field(default=None, metadata={"help": f"GLUE task: {', '.join(sorted(GLUE_LABELS))}."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are cut to so many tokens."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again instead of using the cache."})
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Pad everything to max_seq_length (as run_glue.py does) instead of to the batch."},
    )
    max_predict_samples: int | None = field(default=None, metadata={"help": "Only the first so many test records."})
    test_file: str | None = field(default=None, metadata={"help": "The same, for prediction; labels are not used."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the text, if it is not recognised."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of the second text of a pair."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the label, if it is not recognised."})
    label_list: str | None = field(
        default=None, metadata={"help": "All labels, public, in the order of their ids: negative,positive."}
    )

    @property
    def files(self) -> dict[str, str | None]:
        return {**super().files, "test": self.test_file}

    @property
    def embedded(self) -> bool:
        return super().embedded and not self.task_name


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, or one .json file with their values; see `options.read_flags`.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES, embedded_defaults=EMBEDDED, run_name="glue"
    )
    if embedded and data_args.non_private:
        options.fill(training_args, CHOSEN)
    if data_args.task_name is not None:
        data_args.task_name = data_args.task_name.lower().replace("-", "")
        if data_args.task_name not in GLUE_LABELS:
            raise DPConfigError(
                f"task_name={data_args.task_name!r} is unknown. Use one of: {', '.join(sorted(GLUE_LABELS))}."
            )
    if model_args.warm_start_epsilon is not None and data_args.non_private:
        raise DPConfigError("warm_start_epsilon is for private runs. Leave it or non_private out.")
    if model_args.warm_start_epsilon is not None and data_args.public_file is not None:
        raise DPConfigError(
            "The head is started from public records or by a private run, not by both. Leave public_file or "
            "warm_start_epsilon out."
        )
    if model_args.prompt is None and model_args.label_words:
        raise DPConfigError("label_words are for the gap of a prompt. Add --prompt, or leave them out.")
    if model_args.prompt is not None:
        without = {"pooling": model_args.pooling, "warm_start_epsilon": model_args.warm_start_epsilon}
        taken = [name for name, value in without.items() if value is not None]
        if taken or data_args.pad_to_max_length:
            raise DPConfigError(
                f"A prompt has no new head, and is padded to the batch. Leave {' and '.join(taken) or '--prompt or '}"
                f"{'' if taken else 'pad_to_max_length'} out."
            )
        if model_args.prompt != "auto":
            make_prompt(model_args.prompt, model_args.label_words, None, labels=None, is_causal=False)
    if model_args.pooling_layers and (model_args.pooling or ["model"]) == ["model"]:
        raise DPConfigError("pooling_layers are what --pooling reads. Add --pooling mean, or leave them out.")
    for name in ("pooling", "pooling_layers"):
        given = getattr(model_args, name) or []
        if len(set(given)) < len(given):
            raise DPConfigError(f"{name}={given} names one twice. Name each once.")
    options.check(
        model_args,
        data_args,
        training_args,
        embedded=embedded,
        data_flags="--task_name <GLUE task>, --dataset_name <name on the hub>, or --train_file and --validation_file",
        counts=("max_train_samples", "max_eval_samples", "max_predict_samples", "max_seq_length"),
    )
    return model_args, data_args, training_args
