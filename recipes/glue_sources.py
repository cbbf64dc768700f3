"""Where the records come from: files, the hub, or the Python installation."""

from __future__ import annotations

import dataclasses
import logging
import platform
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset

from hf_dpopt import DPConfigError, DPTrainingArguments
from recipes import hub
from recipes.glue_data import ClassificationData, build, read_label_list, table_of_dataset
from recipes.glue_options import DataTrainingArguments, ModelArguments
from recipes.tables import Table, read_table

logger = logging.getLogger(__name__)

GLUE_ON_THE_HUB = "nyu-mll/glue"
LOCAL_FILES = "To use local files: --train_file train.tsv --validation_file dev.tsv (csv, tsv, json, jsonl, .gz)."


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
        files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
        if any(files.values()):
            tables = {split: read_table(path) for split, path in files.items() if path}
        else:
            tables = load_from_hub(model_args, data_args)
            if data_args.task_name is not None and training_args.eval_data_privacy == "undeclared":
                training_args.eval_data_privacy = "public"  # GLUE's own validation set
        data = build(
            tables,
            task=data_args.task_name,
            text_column=data_args.text_column,
            text_pair_column=data_args.text_pair_column,
            label_column=data_args.label_column,
            label_list=None if data_args.label_list is None else read_label_list(data_args.label_list),
        )
        declare_preprocessing(data_args, training_args)
    return needed_splits(data, training_args)


def load_from_hub(model_args: ModelArguments, data_args: DataTrainingArguments) -> dict[str, Table]:
    """All splits of a GLUE task, or of another dataset of the hub."""
    if data_args.task_name is not None and data_args.dataset_name is None:
        name, config = GLUE_ON_THE_HUB, data_args.task_name
    else:
        assert data_args.dataset_name is not None
        name, config = data_args.dataset_name, data_args.dataset_config_name
    found: Any = hub.load(
        f"The dataset {name!r}{f' ({config})' if config else ''}", load_dataset, name, config,
        cache_dir=model_args.cache_dir, token=model_args.token, mend=LOCAL_FILES,
    )  # fmt: skip
    return {split: table_of_dataset(f"{name} {config or ''} [{split}]", dataset) for split, dataset in found.items()}


def load_embedded(model_args: ModelArguments, training_args: DPTrainingArguments) -> ClassificationData:
    """Text of the standard library; also builds the model, if none is named."""
    from recipes.embedded.build import build as build_model
    from recipes.embedded.corpus import LABELS, read_corpus

    corpus = read_corpus()
    folder = Path(training_args.output_dir).parent / f"embedded-model-{corpus.digest}"
    with training_args.main_process_first(desc="building the embedded model"):
        model_args.model_name_or_path = str(build_model(folder, corpus))
    tables = {
        split: Table(
            f"Python {platform.python_version()}'s standard library [{split}]",
            {"text": [text for text, _ in records], "label": [LABELS[label] for _, label in records]},
        )
        for split, records in (("train", corpus.train), ("validation", corpus.evaluation))
    }
    logger.info(
        f"Embedded text: {len(corpus.train)} private records, {len(corpus.evaluation)} for evaluation; tokenizer from "
        f"{len(corpus.public_text)} other, public passages: {folder}"
    )
    return build(tables, label_list=list(LABELS))


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


def needed_splits(data: ClassificationData, training_args: DPTrainingArguments) -> ClassificationData:
    """The splits that this run uses; every action must have one."""
    actions = (
        ("train", training_args.do_train, "do_train"),
        ("validation", training_args.do_eval, "do_eval"),
        ("test", training_args.do_predict, "do_predict"),
    )
    needed: list[str] = []
    for split, wanted, option in actions:
        found = [name for name in data.splits if name.startswith(split)]
        if wanted and not found:
            raise DPConfigError(
                f"{option} needs a {split} split, and there is {', '.join(data.splits)}. Leave --{option} out, or use "
                f"files (--{split}_file)."
            )
        needed += found if wanted else []
    return dataclasses.replace(data, splits=DatasetDict({name: data.splits[name] for name in needed}))
