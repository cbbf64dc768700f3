"""Where the records of a recipe come from: files or the hub, as tables; and which splits a run needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, load_dataset

from hf_dpopt import DPConfigError, DPTrainingArguments
from hf_dpopt.records.unit import warn_of_people
from recipes import hub
from recipes.options import ModelArguments, actions
from recipes.public_first import SPLIT
from recipes.tables import EXTENSIONS, Table, read_table

LOCAL_FILES = "To use local files: --train_file train.tsv --validation_file dev.tsv (csv, tsv, json, jsonl, .gz)."


def load_tables(
    model_args: ModelArguments,
    data_args: Any,
    *,
    name: str | None,
    config: str | None,
    training_args: DPTrainingArguments,
    kinds: tuple[str, ...] = EXTENSIONS,
) -> dict[str, Table]:
    """Split name -> table, from the files of `data_args`, else from dataset `name` of the hub; public records, too.

    Raises:
        DPConfigError: if something cannot be read.
    """
    files = {split: path for split, path in data_args.files.items() if path}
    if files:
        tables = {split: read_table(path, kinds=kinds, option=f"{split}_file") for split, path in files.items()}
    else:
        found: Any = hub.load(
            f"The dataset {name!r}{f' ({config})' if config else ''}", load_dataset, name, config,
            cache_dir=model_args.cache_dir, token=model_args.token, fix=LOCAL_FILES,
        )  # fmt: skip
        tables = {split: table_of_dataset(f"{name} {config or ''} [{split}]", one) for split, one in found.items()}
        tables.pop(SPLIT, None)  # public is what public_file declares to be
    if "train" in tables and training_args.do_train and not data_args.non_private:
        # what is made of the table drops such columns
        warn_of_people(tables["train"].columns, training_args.privacy_unit)
    if data_args.public_file is not None and training_args.do_train:
        tables[SPLIT] = read_table(data_args.public_file, kinds=kinds, option="public_file")
    return tables


def load_used(
    model_args: ModelArguments, data_args: Any, training_args: DPTrainingArguments, *, kinds: tuple[str, ...]
) -> dict[str, Table]:
    """train, validation and public records, as far as a run uses them.

    Raises:
        DPConfigError: if one is missing or cannot be read.
    """
    name, config = data_args.dataset_name, data_args.dataset_config_name
    found = load_tables(model_args, data_args, name=name, config=config, training_args=training_args, kinds=kinds)
    return used(found, training_args)


def used(tables: dict[str, Table], training_args: DPTrainingArguments) -> dict[str, Table]:
    """train, validation and public records, as far as a run uses them; of several validation splits the first."""
    needed = needed_splits(tables, training_args)
    chosen = {name.split("_")[0]: tables[name] for name in reversed(needed)}
    return {split: chosen[split] for split in ("train", "validation", SPLIT) if split in chosen}


def table_of_dataset(name: str, dataset: Dataset) -> Table:
    """A dataset of the hub as a table; class labels become their names, so that one code path maps them to ids."""
    columns: dict[str, Sequence[Any]] = {column: list(dataset[column]) for column in dataset.column_names}
    for column, feature in dataset.features.items():
        if isinstance(feature, ClassLabel):
            columns[column] = [feature.names[i] if i >= 0 else "-1" for i in columns[column]]
    return Table(name, columns)


def needed_splits(available: Collection[str], training_args: DPTrainingArguments) -> list[str]:
    """Names of the splits that a run uses; every action must have one.

    Raises:
        DPConfigError: if there is none for an action.
    """
    needed: list[str] = []
    for split, action in actions(training_args).items():
        found = [name for name in available if name.startswith(split)]
        if not found:
            raise DPConfigError(
                f"{action} needs a {split} split, and there is {', '.join(available)}. Leave --{action} out, or use "
                f"files (--{split}_file)."
            )
        needed += found
    return [*needed, *([SPLIT] if SPLIT in available else [])]
