#!/usr/bin/env python
"""Finetune a model for sequence classification with differential privacy: GLUE, or your own csv, tsv, json files.

The flags are those of Hugging Face's `run_glue.py` and of `DPTrainingArguments`, plus LoRA. The body is that script's,
too, with two names changed: `DPTrainer` and `DPTrainingArguments`.

    accelerate launch recipes/glue.py                     # no arguments: the embedded job, offline, a few minutes
    accelerate launch recipes/glue.py --model_name_or_path roberta-base --task_name sst2 --target_epsilon 8 \
        --lora_r 8 --start pooled
    accelerate launch recipes/glue.py --model_name_or_path <dir> --train_file train.tsv --validation_file dev.tsv \
        --target_epsilon 8 --lora_r 8 --start pooled

A wrong setting or file ends the run with one line and exit status 2, before anything is written; HF_DPOPT_DEBUG=1
shows the traceback. Beside this file: `glue_options.py` (flags), `glue_sources.py` and `glue_data.py` (records),
`glue_model.py`, `glue_metrics.py`; what `clm.py` needs as well: `options.py`, `sources.py`, `tables.py`, `models.py`,
`running.py`.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import recipes  # noqa: F401  first of all: it names missing packages and quiets imports

import numpy as np
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.huggingface.evaluation import planned_evaluations
from recipes import processes, running
from recipes.frozen import can_train_on_features, feature_splits
from recipes.glue_data import ClassificationData
from recipes.glue_metrics import metrics_of
from recipes.glue_model import is_own, is_pooled, load_model, save_merged
from recipes.glue_options import DataTrainingArguments, ModelArguments, parse
from recipes.glue_sources import load_data
from recipes.models import choose_trained
from recipes.pooled_start import fill_start, mention_start
from recipes.prompts import fill
from recipes.public_first import SPLIT, learn_public
from recipes.warm_start import warm_start

logger = logging.getLogger("recipes.glue")

MERGED = "merged"  # folder of a model whose class is of this repository, with its adapters


def main(argv: list[str]) -> None:
    """The whole run, in the order of run_glue.py."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    fill_start(model_args, data_args, training_args)
    running.set_up_logging(training_args)
    set_seed(training_args.seed)

    data = load_data(model_args, data_args, training_args)
    tokenizer, model = load_model(model_args, data)
    mention_start(model_args, data_args, training_args, model.config, data)
    splits = tokenize(data, tokenizer, model, data_args, training_args)
    collate = default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer)
    if model_args.warm_start_epsilon is not None and training_args.do_train:
        choose_trained(copy.deepcopy(model), model_args, "SEQ_CLS")  # what does not fit is found before it costs
        head_run = warm_start(model, splits["train"], collate, training_args, model_args.warm_start_epsilon)
        before = training_args.earlier_runs or []
        training_args.earlier_runs = [*([before] if isinstance(before, str) else before), head_run]
        training_args.trained_head = True
    model = choose_trained(model, model_args, "SEQ_CLS")
    if SPLIT in splits:
        learn_public(model, splits[SPLIT], collate, training_args, data_args)
    inputs: dict[str, Any] = splits
    is_classifier, unit = data.labels is not None, training_args.privacy_unit
    if (
        model_args.freeze == "encoder"
        and is_pooled(model.config)
        and can_train_on_features(model, is_classifier=is_classifier, unit=unit)
    ):
        needed = {name: split for name, split in splits.items() if name != SPLIT}
        inputs = feature_splits(model, needed, collate, training_args, is_private=not data_args.non_private)
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
        print(summary(trainer, data, splits, results, model_args, data_args, seconds=time.monotonic() - start))


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
    padding = "max_length" if data_args.pad_to_max_length else False
    ids = None if data.labels is None else [model.config.label2id[label] for label in data.labels]

    template = getattr(model.config, "template", None)
    put = None if template is None else fill(template, tokenizer, max_length)
    if put is not None and data_args.pad_to_max_length:
        raise DPConfigError("Texts in a prompt are padded to the batch. Leave pad_to_max_length out.")

    def preprocess(rows: dict[str, list]) -> dict[str, Any]:
        texts = (rows["text"], rows["pair"]) if data.has_pairs else (rows["text"],)
        if put is not None:
            filled = [put(*one) for one in zip(*texts, strict=True)]
            result = {name: [one[name] for one in filled] for name in filled[0]}
        else:
            result = dict(tokenizer(*texts, padding=padding, max_length=max_length, truncation=True))
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
    *,
    seconds: float,
) -> str:
    """The last lines of a run: what was run, what came out, what it cost."""
    num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    start = " from random weights" if data_args.embedded else ""
    on = data.description
    if isinstance(trainer, DPTrainer) and trainer.plan is not None and trainer.plan.num_users is not None:
        on = re.sub(r"^\d+ records", f"records of {trainer.plan.num_users} users", on)  # how many is private
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
    lines.append(("wall time", f"{seconds:.0f} s"))
    lines.append(("output", str(Path(trainer.args.output_dir).resolve())))
    if (merged := Path(trainer.args.output_dir) / MERGED).is_dir():
        lines.append(("whole model", str(merged.resolve())))
    return running.result_text(lines) + (f"\n{NEXT_STEPS}" if data_args.embedded else "")


NEXT_STEPS = """
  The task: is this line of Python's standard library code, a comment or documentation? Every sentence or line is one
  record. Each run spends its own budget on the same records; epsilons of several runs add up. The real thing:
    accelerate launch recipes/glue.py --model_name_or_path roberta-base --task_name sst2 --target_epsilon 8 \\
        --lora_r 8 --start pooled
    accelerate launch recipes/glue.py --model_name_or_path <dir> --train_file train.tsv --validation_file dev.tsv \\
        --target_epsilon 8 --lora_r 8 --start pooled"""


def run(argv: list[str]) -> int:
    """Exit status of a run; see `running.run`."""
    return running.run(argv, main)


if __name__ == "__main__":
    processes.start_requested(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))
