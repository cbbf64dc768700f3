#!/usr/bin/env python
"""Finetune a model for sequence classification with differential privacy: GLUE, or your own csv, tsv, json files.

The flags are those of Hugging Face's `run_glue.py` (but for padding, which is to the longest of a batch) and of
`DPTrainingArguments`, plus LoRA. The body is that script's, too, with two names changed: `DPTrainer` and
`DPTrainingArguments`.

    accelerate launch recipes/glue.py                     # no arguments: the embedded job, offline, a few minutes
    accelerate launch recipes/glue.py --model_name_or_path roberta-base --task_name sst2 --target_epsilon 8 \
        --lora_r 8 --start pooled
    accelerate launch recipes/glue.py --model_name_or_path <dir> --train_file train.tsv --validation_file dev.tsv \
        --target_epsilon 8 --lora_r 8 --start pooled

A wrong setting or file ends the run with one line and exit status 2, before anything is written; HF_DPOPT_DEBUG=1
shows the traceback. Next to this file: `glue_data.py` (columns and labels), `glue_model.py` (the model and its head),
`warm_start.py` (a head that is trained first); what `clm.py` needs as well: `options.py`, `sources.py`, `tables.py`,
`models.py`, `running.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags, processes

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds
    processes.start_requested(sys.argv[1:])

import numpy as np
from datasets import DatasetDict
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
)

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.huggingface.evaluation import planned_evaluations
from recipes import options, running, sources
from recipes.glue_data import GLUE_LABELS, ClassificationData, build, read_label_list
from recipes.glue_model import is_own, load_model, make_encoder, save_merged
from recipes.models import choose_trained
from recipes.public_first import SPLIT, learn_public, stages_on_public
from recipes.warm_start import can_train_on_features, feature_splits, fill_start, start_head

logger = logging.getLogger("recipes.glue")

MERGED = "merged"  # folder of a model whose class is of this repository, with its adapters
GLUE_ON_THE_HUB = "nyu-mll/glue"
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

    ignore_mismatched_sizes: bool = options.flag(
        False, "Load a model whose head has another number of labels; the head starts anew."
    )
    start: str = options.flag(
        "model",
        "pooled: a head on pooled states of the last three layers (--pooling cls mean) is trained first, "
        "with a quarter of target_epsilon (--warm_start_epsilon), and the clip is 0.5; given values stay. "
        "model: the head that comes with the model, and everything starts together.",
        choices=["model", "pooled"],
    )
    pooling: list[str] | None = options.flag(
        None,
        "Read the mean, the first (cls) or the last token of a layer, or several of them, with a linear "
        "head in place of the one that comes with the model. Default: that one.",
        choices=("cls", "mean", "last"),
    )
    pooling_layers: list[int] | None = options.flag(
        None, "Layers that --pooling reads side by side, such as 4 5 6; default: -1, the last."
    )
    prompt: str | None = options.flag(
        None,
        "Classify by the model's own language head: the template, such as '{text} It was {mask}.', or "
        "auto for that of a GLUE task. Default: a head of its own.",
    )
    label_words: list[str] | None = options.flag(
        None, "With --prompt: a word for the gap for every label, in their order: terrible great."
    )
    warm_start_epsilon: float | None = options.flag(
        None,
        "Train the head first, on features of the frozen model, for this part of target_epsilon (about an "
        "eighth). Takes a forward pass over the data. Default: everything starts together.",
    )


@dataclass
class DataTrainingArguments(options.DataArguments):
    """Which data, and how it is read."""

    task_name: str | None = options.flag(None, f"GLUE task: {', '.join(sorted(GLUE_LABELS))}.")
    max_seq_length: int = options.flag(128, "Longer inputs are cut to so many tokens.")
    overwrite_cache: bool = options.flag(False, "Tokenize again instead of using the cache.")
    max_predict_samples: int | None = options.flag(None, "Only the first so many test records.")
    test_file: str | None = options.flag(None, "The same, for prediction; labels are not used.")
    text_column: str | None = options.flag(None, "Column of the text, if it is not recognised.")
    text_pair_column: str | None = options.flag(None, "Column of the second text of a pair.")
    label_column: str | None = options.flag(None, "Column of the label, if it is not recognised.")
    label_list: str | None = options.flag(None, "All labels, public, in the order of their ids: negative,positive.")

    @property
    def files(self) -> dict[str, str | None]:
        return {**super().files, "test": self.test_file}

    @property
    def embedded(self) -> bool:
        return super().embedded and not self.task_name


def main(argv: list[str]) -> None:
    """The whole run, in the order of run_glue.py."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    fill_start(model_args, data_args, training_args)
    running.set_up(training_args)

    data = load_data(model_args, data_args, training_args)
    tokenizer, model = load_model(model_args, data)
    splits = tokenize(data, tokenizer, model, data_args, training_args)
    collate: Any = DataCollatorWithPadding(tokenizer)
    if model_args.warm_start_epsilon is not None and training_args.do_train:
        choose_trained(copy.deepcopy(model), model_args, "SEQ_CLS")  # what does not fit is found before it costs
        start_head(model, splits["train"], collate, training_args, model_args.warm_start_epsilon)
    model = choose_trained(model, model_args, "SEQ_CLS")
    if SPLIT in splits:
        learn_public(model, splits[SPLIT], collate, training_args, data_args)
    inputs: dict[str, Any] = splits
    if model_args.freeze == "encoder" and can_train_on_features(model, training_args.privacy_unit):
        inputs = feature_splits(model, splits, collate, training_args, is_private=not data_args.non_private)
        collate = default_data_collator
    compute_metrics = metrics_of(data_args.task_name, is_regression=data.labels is None)
    trainer_class = Trainer if data_args.non_private else DPTrainer
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=inputs["train"] if training_args.do_train else None,
        eval_dataset=next(iter(evaluation_splits(inputs).values()), None) if training_args.do_eval else None,
        compute_metrics=None if running.has_private_evaluation(training_args) else compute_metrics,
        processing_class=tokenizer,
        data_collator=collate,
        **({"public_dataset": inputs.get(SPLIT)} if stages_on_public(training_args) else {}),
    )
    plan_private_evaluations(trainer, inputs)
    if training_args.do_train:
        running.train(trainer, training_args)
    results = evaluate(trainer, inputs) if training_args.do_eval else {}
    if training_args.do_predict:
        predict(trainer, inputs, data, training_args)
    if training_args.do_train and model_args.lora_r and is_own(model.config) and trainer.is_world_process_zero():
        save_merged(
            trainer.accelerator.unwrap_model(trainer.model), Path(training_args.output_dir) / MERGED, tokenizer
        )
    publish(trainer, model_args, data_args, training_args)
    if trainer.is_world_process_zero():
        lines = summary(trainer, data, splits, results, model_args, data_args)
        lines += running.closing_lines(training_args, start)
        print(running.result_text(lines) + (f"\n{NEXT_STEPS}" if data_args.embedded else ""))


# --- flags -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, as `options.read_flags` reads them.

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
    of_files = ("text_column", "text_pair_column", "label_column", "label_list")
    if embedded and (given := [name for name in of_files if getattr(data_args, name) is not None]):
        raise DPConfigError(
            f"{' and '.join(given)}: for data of your own, and the embedded job has its columns and labels. Add "
            "--model_name_or_path and --train_file, or leave it out."
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
        if taken:
            raise DPConfigError(f"A prompt has no new head. Leave {' and '.join(taken)} out.")
    if model_args.pooling_layers and not model_args.pooling:
        raise DPConfigError("pooling_layers are what --pooling reads. Add --pooling mean, or leave them out.")
    for name in ("pooling", "pooling_layers"):
        given = getattr(model_args, name) or []
        if len(set(given)) < len(given):
            raise DPConfigError(f"{name}={given} names one twice. Name each once.")
    options.check(model_args, data_args, training_args, embedded=embedded)
    return model_args, data_args, training_args


# --- records ---------------------------------------------------------------------------------------------------------


def load_data(
    model_args: ModelArguments, data_args: DataTrainingArguments, training_args: DPTrainingArguments
) -> ClassificationData:
    """Labelled splits, checked: every split a run needs is there and every label is known.

    Raises:
        DPConfigError: if something is missing or wrong, before anything is written.
    """
    if data_args.embedded:
        data = load_embedded(model_args, training_args)
    else:
        is_glue = data_args.task_name is not None and data_args.dataset_name is None
        tables = sources.load_tables(
            model_args,
            data_args,
            name=GLUE_ON_THE_HUB if is_glue else data_args.dataset_name,
            config=data_args.task_name if is_glue else data_args.dataset_config_name,
            training_args=training_args,
        )
        from_hub = not any(data_args.files.values())
        if from_hub and data_args.task_name is not None and training_args.eval_data_privacy == "undeclared":
            training_args.eval_data_privacy = "public"  # GLUE's own validation set
        data = build(
            tables,
            task=data_args.task_name,
            text_column=data_args.text_column,
            text_pair_column=data_args.text_pair_column,
            label_column=data_args.label_column,
            label_list=None if data_args.label_list is None else read_label_list(data_args.label_list),
            user_id_column=None if data_args.non_private else training_args.user_id_column,
        )
        declare_preprocessing(data_args, training_args)
    names = sources.needed_splits(data.splits, training_args)
    return dataclasses.replace(data, splits=DatasetDict({name: data.splits[name] for name in names}))


def load_embedded(model_args: ModelArguments, training_args: DPTrainingArguments) -> ClassificationData:
    """Text of the standard library; also builds the model, if none is named."""
    from recipes.embedded.build import build as build_model
    from recipes.embedded.corpus import LABELS, read_corpus

    corpus = read_corpus()
    folder = Path(training_args.output_dir).parent / f"embedded-model-{corpus.digest}"
    with training_args.main_process_first(desc="building the embedded model"):
        model_args.model_name_or_path = str(build_model(folder, corpus))
    logger.info(
        f"Embedded text: {len(corpus.train)} private records, {len(corpus.evaluation)} for evaluation; tokenizer from "
        f"{len(corpus.public_text)} other, public passages: {folder}"
    )
    users = training_args.user_id_column
    return build(
        corpus.tables(), text_column="text", label_column="label", label_list=list(LABELS), user_id_column=users
    )


def declare_preprocessing(data_args: DataTrainingArguments, training_args: DPTrainingArguments) -> None:
    """For the privacy report: what was fitted on training records before training."""
    if training_args.data_dependent_preprocessing != "not declared":
        return
    labels_are_declared = data_args.label_list is not None or data_args.task_name is not None
    training_args.data_dependent_preprocessing = (
        "none: the labels are declared, and each record is tokenized alone"
        if labels_are_declared
        else "the list of labels is read from the training records and published with the model; nothing else"
    )


def tokenize(
    data: ClassificationData,
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    data_args: DataTrainingArguments,
    training_args: DPTrainingArguments,
) -> dict[str, Any]:
    """Splits of token ids and label ids. Each record is treated alone, whatever the others are."""
    most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    max_length = min(data_args.max_seq_length, most)
    if max_length < data_args.max_seq_length:
        logger.warning(f"max_seq_length={data_args.max_seq_length} is more than the model takes; using {most}.")
    ids = None if data.labels is None else [model.config.label2id[label] for label in data.labels]

    encode = make_encoder(tokenizer, model.config, max_length)

    def preprocess(rows: dict[str, list]) -> dict[str, Any]:
        result = encode(*((rows["text"], rows["pair"]) if data.has_pairs else (rows["text"],)))
        if "label" in rows:
            result["label"] = rows["label"] if ids is None else [ids[label] for label in rows["label"]]
        return result

    limits = {"train": data_args.max_train_samples, "test": data_args.max_predict_samples, SPLIT: None}
    tokenized = {}
    for split, dataset in data.splits.items():
        limit = limits.get(split.split("_")[0], data_args.max_eval_samples)
        dataset = dataset if limit is None else dataset.select(range(min(limit, len(dataset))))
        with training_args.main_process_first(desc=f"tokenizing {split}"):
            tokenized[split] = dataset.map(
                preprocess,
                batched=True,
                remove_columns=[column for column in ("text", "pair") if column in dataset.column_names],
                load_from_cache_file=not data_args.overwrite_cache,
                desc=f"Tokenizing {split}",
            )
    return tokenized


# --- metrics ---------------------------------------------------------------------------------------------------------

ACCURACY = {"accuracy": accuracy_score}
ACCURACY_AND_F1 = {**ACCURACY, "f1": lambda true, predicted: f1_score(true, predicted, zero_division=0)}
OF_TASK: dict[str | None, dict[str, Callable[..., float]]] = {
    "cola": {"matthews_correlation": matthews_corrcoef},
    "mrpc": ACCURACY_AND_F1,
    "qqp": ACCURACY_AND_F1,
    "stsb": {"pearson": lambda *both: pearsonr(*both)[0], "spearmanr": lambda *both: spearmanr(*both)[0]},
}


def metrics_of(task: str | None, *, is_regression: bool) -> Callable[[EvalPrediction], dict[str, float]]:
    """What `Trainer(compute_metrics=...)` takes; several values are also averaged, as in run_glue.py.

    Args:
        task: GLUE task; None for other data, whose metric is the accuracy, or the squared error of a regression.
    """
    measures = OF_TASK.get(task, {"mse": mean_squared_error} if is_regression else ACCURACY)

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        predictions = np.squeeze(logits, axis=-1) if is_regression else np.argmax(logits, axis=-1)
        result = {name: float(measure(p.label_ids, predictions)) for name, measure in measures.items()}
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute_metrics


def evaluation_splits(splits: dict[str, Any]) -> dict[str, Any]:
    """The validation split; mnli has two."""
    return {name: split for name, split in splits.items() if name.startswith("validation")}


def plan_private_evaluations(trainer: Trainer, splits: dict[str, Any]) -> None:
    """Share the budget of a private evaluation over all validation splits: the trainer knows one, and mnli has two."""
    args, more = trainer.args, len(evaluation_splits(splits)) - 1
    if not running.has_private_evaluation(args) or not args.do_eval or more < 1 or args.eval_times is not None:
        return
    args.eval_times = planned_evaluations(args, trainer.plan) + more
    logger.info(f"eval_times={args.eval_times}: there are {more + 1} private validation sets.")


def evaluate(trainer: Trainer, splits: dict[str, Any]) -> dict[str, float]:
    """Metrics of every validation split; those of mnli's second one get the ending _mm."""
    combined: dict[str, float] = {}
    for name, split in evaluation_splits(splits).items():
        metrics = trainer.evaluate(eval_dataset=split)
        if name.endswith("_mismatched"):
            metrics = {f"{key}_mm": value for key, value in metrics.items()}
        if not running.has_private_evaluation(trainer.args):
            metrics["eval_samples" + ("_mm" if name.endswith("_mismatched") else "")] = len(split)
        trainer.log_metrics("eval", metrics)
        combined |= metrics
    trainer.save_metrics("eval", combined)
    return combined


def predict(trainer: Trainer, splits: dict[str, Any], data: ClassificationData, training_args: Any) -> None:
    """Writes index and label (or score) of every test record to predict_results_<split>.txt."""
    for name, split in splits.items():
        if not name.startswith("test"):
            continue
        unlabelled = split.remove_columns([c for c in ("label",) if c in split.column_names])
        logits = trainer.predict(unlabelled, metric_key_prefix="predict").predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        if data.labels is None:
            answers = [f"{value:3.3f}" for value in np.squeeze(logits, axis=-1)]
        else:
            answers = [trainer.model.config.id2label[i] for i in np.argmax(logits, axis=-1).tolist()]
        if trainer.is_world_process_zero():
            path = Path(training_args.output_dir) / f"predict_results_{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("index\tprediction\n" + "".join(f"{i}\t{a}\n" for i, a in enumerate(answers)))
            logger.info(f"Predictions for {len(answers)} records: {path}")


def publish(
    trainer: Trainer, model_args: ModelArguments, data_args: DataTrainingArguments, training_args: DPTrainingArguments
) -> None:
    """Model card, or push to the hub."""
    kwargs: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if data_args.embedded:
        kwargs["finetuned_from"] = None
    if data_args.task_name is not None:
        kwargs |= {
            "language": "en",
            "dataset_tags": "glue",
            "dataset_args": data_args.task_name,
            "dataset": f"GLUE {data_args.task_name.upper()}",
        }
    running.publish(trainer, training_args, **kwargs)


def summary(
    trainer: Trainer,
    data: ClassificationData,
    splits: dict[str, Any],
    results: dict[str, float],
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
) -> list[tuple[str, str]]:
    """The last lines of a run: what was run, what came out, what it cost."""
    num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    start = " from random weights" if data_args.embedded else ""
    on = data.description
    if (users := running.num_users(trainer)) is not None:
        on = re.sub(r"^\d+ records", f"records of {users} users", on)  # how many is private
    if data_args.max_train_samples is not None:
        on += f", trained on the first {data_args.max_train_samples}"
    what = f"{model_args.model_name_or_path}{start} ({num_parameters:,} trained parameters) on {on}"
    lines = [("what was run", what)]
    validation = next(iter(evaluation_splits(splits).values()), None)
    is_exact = not running.has_private_evaluation(trainer.args)
    if results and validation is not None and data.labels is not None and is_exact:
        majority = np.bincount(validation["label"]).max() / len(validation)
        lines.append(("majority class", f"{majority:.1%} accuracy"))
    shown = [f"{k.removeprefix('eval_')} {v:.4f}" for k, v in results.items() if running.is_score(k)]
    if shown:
        lines.append(("evaluation", ", ".join(shown)))
    lines.append(("privacy", running.privacy_line(trainer)))
    if (merged := Path(trainer.args.output_dir) / MERGED).is_dir():
        lines.append(("whole model", str(merged.resolve())))
    return lines


NEXT_STEPS = """
  The task: is this line of Python's standard library code, a comment or documentation? Every sentence or line is one
  record. Each run spends its own budget on the same records; epsilons of several runs add up. The real thing:
    accelerate launch recipes/glue.py --model_name_or_path roberta-base --task_name sst2 --target_epsilon 8 \\
        --lora_r 8 --start pooled
    accelerate launch recipes/glue.py --model_name_or_path <dir> --train_file train.tsv --validation_file dev.tsv \\
        --target_epsilon 8 --lora_r 8 --start pooled"""


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
