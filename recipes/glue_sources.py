"""Where the records of `recipes/glue.py` come from: files, the hub, or the Python installation."""

from __future__ import annotations

import dataclasses
import logging
import platform
from pathlib import Path

from datasets import DatasetDict

from hf_dpopt import DPTrainingArguments
from recipes import sources
from recipes.glue_data import ClassificationData, build, read_label_list
from recipes.glue_options import DataTrainingArguments, ModelArguments
from recipes.public_first import SPLIT
from recipes.tables import Table

logger = logging.getLogger(__name__)

GLUE_ON_THE_HUB = "nyu-mll/glue"


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
        tables |= sources.public_table(data_args, training_args)
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
    names += [SPLIT] if SPLIT in data.splits else []
    return dataclasses.replace(data, splits=DatasetDict({name: data.splits[name] for name in names}))


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
            {"text": [text for text, _ in records], "label": [LABELS[label] for _, label in records], "file": files},
        )
        for split, records, files in (
            ("train", corpus.train, corpus.train_files),
            ("validation", corpus.evaluation, corpus.evaluation_files),
        )
    }
    logger.info(
        f"Embedded text: {len(corpus.train)} private records, {len(corpus.evaluation)} for evaluation; tokenizer from "
        f"{len(corpus.public_text)} other, public passages: {folder}"
    )
    users = training_args.user_id_column
    return build(tables, text_column="text", label_column="label", label_list=list(LABELS), user_id_column=users)


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
