#!/usr/bin/env python
"""Train on what users wrote, with a whole user as the unit of privacy: the next word, or the tags of a post.

The tasks of the StackOverflow benchmark of federated learning (arXiv:2003.00295), trained from scratch:

    accelerate launch recipes/stackoverflow.py                    # no arguments: the embedded job, offline
    accelerate launch recipes/stackoverflow.py --train_file stackoverflow.sqlite.lzma \
        --validation_file stackoverflow.sqlite.lzma --validation_split heldout \
        --vocabulary_file stackoverflow.word_count
    accelerate launch recipes/stackoverflow.py --train_file messages.jsonl.gz --validation_file held_out.jsonl.gz \
        --user_id_column author --text_column text --vocabulary_file words.txt --target_epsilon 8 \
        --local_training '{"learning_rate": 0.5}' --optim sgd --optim_args momentum=0.95 --learning_rate 1

Files: the HDF5 and sqlite layouts of TensorFlow Federated, csv, tsv, json(l) and parquet (text files may be .gz). The
vocabulary is published with the model, so it has to be public: a file, or the most frequent words of --public_file.
Evaluation counts every word once, and every user once. A warning tells of users who are in both sets: metrics on their
records are exact values of what a protected user wrote.
"""

from __future__ import annotations

import functools
import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import recipes  # noqa: F401  first of all: it names missing packages and quiets imports

import torch
from datasets import Dataset
from transformers import Trainer

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.huggingface.refusals import check_arguments
from recipes import options, processes, running
from recipes.stackoverflow_data import (
    TOKENS,
    UNKNOWN,
    Collator,
    Vocabulary,
    read_names,
    read_users,
    sentences,
    separate_words,
    tagged,
    texts_of,
)
from recipes.stackoverflow_model import TagModel, first_learn, language_model, tag_losses, tag_metrics, word_metrics
from recipes.tables import Table, check_columns

logger = logging.getLogger("recipes.stackoverflow")

SOURCES = ("train_file", "validation_file")
COUNTS = ("max_words", "vocabulary_size", "num_tags", "width", "layers", "max_train_samples", "max_eval_samples")
EMBEDDED: dict[str, Any] = {
    "target_epsilon": 8.0,
    "target_delta": 1e-4,
    "user_id_column": "file",
    "text_column": "text",
    "expected_batch_size": 50,
    "records_per_user": 16,
    "per_device_train_batch_size": 256,
    "per_device_eval_batch_size": 256,
    "max_steps": 60,
    "learning_rate": 5e-3,
    "clipping_norm": 0.3,
    "user_weighting": "mean",
    "logging_steps": 20,
    "save_strategy": "no",
    "public_steps": 300,
    "vocabulary_size": 4000,
    "width": 64,
    "layers": 1,
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: vocabulary and first weights come from public text",
}


@dataclass
class ModelArguments:
    """How large the model is."""

    width: int = field(default=96, metadata={"help": "Of the word vectors and layers of the language model."})
    layers: int = field(default=2, metadata={"help": "Of the language model."})


@dataclass
class DataTrainingArguments:
    """Which data, and which task."""

    task: str = field(
        default="next_word",
        metadata={"help": "Predict the next word, or the tags of a post.", "choices": ["next_word", "tags"]},
    )
    train_file: str | None = field(default=None, metadata={"help": "Table with a column of user ids; see above."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, of users who are held out."})
    train_split: str = field(default="train", metadata={"help": "Of an sqlite file: which rows."})
    validation_split: str = field(default="heldout", metadata={"help": "Of an sqlite file: which rows."})
    text_column: str = field(
        default=TOKENS,
        metadata={"help": "Column of texts. `tokens` holds words separated by blanks; any other, raw text."},
    )
    tags_column: str = field(default="tags", metadata={"help": "Column of tags, separated by |."})
    vocabulary_file: str | None = field(
        default=None,
        metadata={"help": "Public words, the most frequent first: the benchmark's word_count, a list, or JSON."},
    )
    public_file: str | None = field(
        default=None, metadata={"help": "Public texts to count words in, if there is no vocabulary_file."}
    )
    tags_file: str | None = field(
        default=None, metadata={"help": "Public tags: the benchmark's tag_count, a list, or JSON."}
    )
    num_tags: int = field(default=500, metadata={"help": "Tags that are predicted: the first of tags_file."})
    vocabulary_size: int = field(default=10_000, metadata={"help": "Words that have an id of their own."})
    max_words: int = field(default=20, metadata={"help": "Words of a text that are used."})
    public_steps: int = field(
        default=0, metadata={"help": "Steps of ordinary training on the public texts first; next_word only."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first so many training records."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Only the first so many evaluation records."})

    @property
    def files(self) -> dict[str, str | None]:
        """Split name -> file."""
        return {"train": self.train_file, "validation": self.validation_file}

    @property
    def embedded(self) -> bool:
        """Whether the text comes from the Python installation."""
        return not any(self.files.values())


def main(argv: list[str]) -> None:
    """Read, train, evaluate."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    running.set_up(training_args)
    tables, vocabulary, public_texts = load(data_args, training_args)
    user = training_args.user_id_column
    assert user is not None
    known_tags: tuple[str, ...] = ()
    if data_args.task == "tags":
        known_tags = read_names(str(data_args.tags_file), "tags_file", data_args.num_tags)
    splits = {
        name: records(table, data_args, user, vocabulary, known_tags, getattr(data_args, f"max_{limit}_samples"))
        for (name, table), limit in zip(tables.items(), ("train", "eval"), strict=False)
    }
    tell_of_shared_users(splits, user)
    torch.manual_seed(training_args.seed)  # of the first weights, which are public
    if data_args.task == "tags":
        model: Any = TagModel(len(vocabulary), len(known_tags))
    else:
        size = dict(width=model_args.width, layers=model_args.layers, max_words=data_args.max_words)
        model = language_model(len(vocabulary), **size)
    collate = Collator(len(known_tags))
    if data_args.public_steps:
        known = [vocabulary.sentence(text, data_args.max_words) for text in public_texts]
        first_learn(model, known, collate, data_args.public_steps)
    trainer = DPTrainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        data_collator=collate,
        per_example_loss_func=tag_losses if data_args.task == "tags" else None,
    )
    held_out = splits.get("validation")
    measure = tag_metrics if data_args.task == "tags" else word_metrics
    results = functools.partial(measured, trainer, held_out, user, collate, measure)
    before = results() if held_out is not None and training_args.do_eval else {}
    if training_args.do_train:
        running.train(trainer, training_args)
    after = results() if before else {}
    running.publish(trainer, training_args)
    if trainer.is_world_process_zero():
        if after:
            trainer.save_metrics("eval", {f"eval_{name}": value for name, value in after.items()})
        lines = summary(trainer, tables, splits, before, after)
        print(running.result_text(lines + running.closing_lines(training_args, start)))


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, or one .json file with their values.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES,
        embedded_defaults={"privacy_unit": "user", **EMBEDDED}, run_name="stackoverflow",
    )  # fmt: skip
    training_args.privacy_unit = "user"
    training_args.user_id_column = training_args.user_id_column or "user"
    training_args.remove_unused_columns = False
    for name in COUNTS:
        value = getattr(model_args if hasattr(model_args, name) else data_args, name)
        if value is not None and value < 1:
            raise DPConfigError(f"{name}={value} is not a positive count. Use 1 or more.")
    if model_args.width % 32:
        raise DPConfigError(f"width={model_args.width} is no multiple of 32, the width of a head. Use 64, 96, 128 ...")
    if not embedded:
        if not data_args.train_file:
            raise DPConfigError("There is no train_file. Add --train_file <table with a column of user ids>.")
        if not (data_args.vocabulary_file or data_args.public_file):
            raise DPConfigError(
                "Words need public ids, and counting them in the private records would cost privacy that nobody "
                "accounts for. Give --vocabulary_file <one word per line>, or --public_file <public texts>."
            )
        if data_args.task == "tags" and not data_args.tags_file:
            raise DPConfigError("Tags are published with the model. Give --tags_file <public tags>.")
        if data_args.public_steps and (data_args.task == "tags" or not data_args.public_file):
            raise DPConfigError(
                "public_steps trains the next word on public texts. Add --public_file, or leave public_steps out."
            )
    elif data_args.task == "tags":
        raise DPConfigError("The embedded text has no tags. Give --train_file with a column of tags.")
    training_args.do_eval = embedded or bool(data_args.validation_file)
    training_args.privacy_config(training_args.expected_batch_size or 1)
    check_arguments(training_args)
    return model_args, data_args, training_args


Loaded = tuple[dict[str, Table], Vocabulary, list[str]]


def load(data_args: DataTrainingArguments, training_args: DPTrainingArguments) -> Loaded:
    """The tables, the words that have ids, and public texts."""
    if data_args.embedded:
        return load_embedded(data_args)
    tables = {
        name: read_users(path, split)
        for name, path, split in (
            ("train", data_args.train_file, data_args.train_split),
            ("validation", data_args.validation_file, data_args.validation_split),
        )
        if path
    }
    wanted = {str(training_args.user_id_column): "user_id_column", data_args.text_column: "text_column"}
    wanted |= {data_args.tags_column: "tags_column"} if data_args.task == "tags" else {}
    for table in tables.values():
        check_columns(table, wanted, "Name columns that are there.")
    texts: list[str] = []
    if data_args.public_file:
        public = read_users(data_args.public_file, data_args.train_split)
        column = data_args.text_column if data_args.text_column in public.columns else next(iter(public.columns))
        texts = texts_of(public, column)
    if data_args.vocabulary_file:
        return tables, Vocabulary.read(data_args.vocabulary_file, data_args.vocabulary_size), texts
    return tables, Vocabulary.of(texts, data_args.vocabulary_size), texts


def load_embedded(data_args: DataTrainingArguments) -> Loaded:
    """The standard library of Python; a source file is a user. An eighth of the files is held out."""
    from recipes.embedded.corpus import read_corpus

    corpus = read_corpus()
    texts = [text for text, _ in [*corpus.train, *corpus.evaluation]]
    files = [*corpus.train_files, *corpus.evaluation_files]
    held_out = {name for i, name in enumerate(sorted(set(files))) if i % 8 == 3}
    tables = {}
    for split in ("train", "validation"):
        rows = [i for i, name in enumerate(files) if (name in held_out) == (split == "validation")]
        columns = {"text": [texts[i] for i in rows], "file": [files[i] for i in rows]}
        tables[split] = Table(f"Python {platform.python_version()}'s standard library [{split}]", columns)
    public_texts = [separate_words(text) for text in corpus.public_text]
    return tables, Vocabulary.of(public_texts, data_args.vocabulary_size), public_texts


def records(
    table: Table,
    data_args: DataTrainingArguments,
    user: str,
    vocabulary: Vocabulary,
    known_tags: Sequence[str],
    limit: int | None,
) -> Dataset:
    """The records of a split; only the first `limit`."""
    if data_args.task == "tags":
        found = tagged(table, data_args.text_column, data_args.tags_column, user, vocabulary, known_tags)
        if not any(found["tags"]):
            raise DPConfigError(
                f"tags_file={data_args.tags_file}: {table.name} has none of its {len(known_tags)} tags, such as "
                f"{known_tags[0]!r}. Give the tags of these posts, or the column that holds them: --tags_column."
            )
    else:
        found = sentences(table, data_args.text_column, user, vocabulary, data_args.max_words)
    if not any(i > UNKNOWN for ids in found["input_ids"] for i in ids):
        raise DPConfigError(
            f"vocabulary_file={data_args.vocabulary_file}: {table.name} has none of its {len(vocabulary.words)} "
            f"words, such as {vocabulary.words[0]!r}. Give a vocabulary of these texts, or their column, "
            "--text_column."
        )
    return found if limit is None else found.select(range(min(limit, len(found))))


def tell_of_shared_users(splits: dict[str, Dataset], user: str) -> None:
    """Held-out records of training users are theirs, too."""
    if "validation" not in splits:
        return
    shared = set(splits["train"][user]) & set(splits["validation"][user])
    if shared:
        logger.warning(
            "Some users are in the training and in the validation set. Metrics on what they wrote are exact values of "
            "protected users: hold out users, or keep the metrics with the data."
        )


def measured(trainer: Trainer, dataset: Dataset, user: str, collate: Collator, measure: Any) -> dict[str, float]:
    """Metrics of the model as it is."""
    size = trainer.args.per_device_eval_batch_size
    return measure(trainer.model, dataset.remove_columns(user), dataset[user], collate, size)


def summary(
    trainer: Trainer,
    tables: dict[str, Table],
    splits: dict[str, Dataset],
    before: dict[str, float],
    after: dict[str, float],
) -> list[tuple[str, str]]:
    """The last lines of a run: what was run, what came out, what it cost."""
    num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    data = ", ".join(running.records_of(t.name, splits[s], trainer, s) for s, t in tables.items())
    lines = [("what was run", f"{type(trainer.model).__name__} ({num_parameters:,} parameters) on {data}")]
    lines += [(name, f"{before[name]:.4f} before training, {value:.4f} after") for name, value in after.items()]
    return [*lines, ("privacy", running.privacy_line(trainer))]


def run(argv: list[str]) -> int:
    """Exit status of a run; see `running.run`."""
    return running.run(argv, main)


if __name__ == "__main__":
    processes.start_requested(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))
