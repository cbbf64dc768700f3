#!/usr/bin/env python
"""Train on what users wrote, with a whole user as the unit of privacy: the next word, or the tags of a post.

The tasks of the StackOverflow benchmark of federated learning (arXiv:2003.00295), from scratch or with adapters:

    accelerate launch recipes/stackoverflow.py                    # no arguments: the embedded job, offline
    accelerate launch recipes/stackoverflow.py --train_file stackoverflow.sqlite.lzma \
        --validation_file stackoverflow.sqlite.lzma --validation_split heldout \
        --vocabulary_file stackoverflow.word_count
    accelerate launch recipes/stackoverflow.py --train_file messages.jsonl.gz --validation_file held_out.jsonl.gz \
        --user_id_column author --text_column text --vocabulary_file words.txt --target_epsilon 8 \
        --local_training '{"learning_rate": 0.5}' --optim sgd --optim_args momentum=0.95 --learning_rate 1
    accelerate launch recipes/stackoverflow.py --model_name_or_path gpt2 --lora_r 8    # and the flags above

Files: the HDF5 and sqlite layouts of TensorFlow Federated, csv, tsv, json(l) and parquet (text files may be .gz). They
are read once and converted to ids, which all processes map: `stackoverflow_files.py`. The embedded job has a synthetic
split in the benchmark's files: `stackoverflow_synthetic.py`. The vocabulary is published with the model, so it has to
be public: a file, or the most frequent words of --public_file.
Evaluation counts every word once, and every user once. A warning tells of users who are in both sets: metrics on their
records are exact values of what a protected user wrote.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags, processes

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds
    processes.start_requested(sys.argv[1:])

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.huggingface.refusals.training_arguments import check_arguments
from recipes import models, options, running, stackoverflow_synthetic
from recipes.public_first import learn_public, stages_on_public
from recipes.stackoverflow_data import (
    TOKENS,
    Collator,
    Encoder,
    NextWords,
    Pieces,
    Tags,
    Vocabulary,
    read_names,
    text_of,
)
from recipes.stackoverflow_files import convert
from recipes.stackoverflow_model import TagModel, language_model, tag_losses, tag_metrics, word_metrics
from recipes.tables import TEXT_EXTENSIONS, read_table

logger = logging.getLogger("recipes.stackoverflow")

SOURCES = ("train_file", "validation_file")
PIECES_PER_WORD = 5  # a longer text is cut
COUNTS = ("max_words", "vocabulary_size", "num_tags", "max_train_samples", "max_eval_samples")
EMBEDDED: dict[str, Any] = {
    "target_epsilon": 8.0,
    "target_delta": 1e-4,
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
    "vocabulary_size": 4000,
    "width": 64,
    "layers": 1,
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: the vocabulary is a public file",
}
OF_USERS = {"privacy_unit": "user", "user_id_column": "user", "remove_unused_columns": False}
EMBEDDED_SIZE: dict[str, Any] = {"num_users": 2000, "rows_per_user": 20}


@dataclass
class ModelArguments(options.ModelArguments):
    """A pretrained model, or how large a new one is."""

    width: int = options.flag(96, "Of the word vectors and layers of a new language model.")
    layers: int = options.flag(2, "Of a new language model.")


@dataclass
class DataTrainingArguments:
    """Which data, and which task."""

    task: str = options.flag(
        "next_word", "Predict the next word, or the tags of a post.", choices=["next_word", "tags"]
    )
    train_file: str | None = options.flag(None, "Table with a column of user ids; see above.")
    validation_file: str | None = options.flag(None, "The same, of users who are held out.")
    train_split: str = options.flag("train", "Of an sqlite file: which rows.")
    validation_split: str = options.flag("heldout", "Of an sqlite file: which rows.")
    text_column: str = options.flag(
        TOKENS, "Column of texts. `tokens` holds words separated by blanks; any other, raw text."
    )
    tags_column: str = options.flag("tags", "Column of tags, separated by |.")
    vocabulary_file: str | None = options.flag(
        None, "Public words, the most frequent first: the benchmark's word_count, a list, or JSON."
    )
    public_file: str | None = options.flag(
        None,
        "Public texts: to count words in, if there is no vocabulary_file, and for --preconditioner adadps or subspace "
        "and --public_mirror_descent.",
    )
    tags_file: str | None = options.flag(None, "Public tags: the benchmark's tag_count, a list, or JSON.")
    num_tags: int = options.flag(500, "Tags that are predicted: the first of tags_file.")
    vocabulary_size: int = options.flag(10_000, "Words that have an id of their own.")
    max_words: int = options.flag(20, "Words of a text that are used.")
    public_epochs: float = options.flag(0.0, "Passes of ordinary training over public_file first; next_word only.")
    public_learning_rate: float = options.flag(3e-3, "Of that training.")
    converted_dir: str | None = options.flag(
        None, "Folder for the records as ids; default: next to the file. Keep it private."
    )
    max_train_samples: int | None = options.flag(None, "Only the first so many training records.")
    max_eval_samples: int | None = options.flag(None, "Only the first so many evaluation records.")

    @property
    def files(self) -> dict[str, str | None]:
        """Split name -> file."""
        return {"train": self.train_file, "validation": self.validation_file}

    @property
    def embedded(self) -> bool:
        """Whether the split is a synthetic one."""
        return not any(self.files.values())


def main(argv: list[str]) -> None:
    """Read, train, evaluate."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    running.set_up(training_args)
    if data_args.embedded:
        use_synthetic_split(data_args, training_args)
    user = training_args.user_id_column
    assert user is not None
    vocabulary, public_texts = read_vocabulary(data_args)
    encoder, model = make_model(model_args, data_args, vocabulary, training_args.seed)
    splits = read_splits(data_args, training_args, encoder, user)
    tell_of_shared_users(splits, user)
    pieces = encoder if isinstance(encoder, Pieces) else None
    collate = Collator(len(encoder.tags) if isinstance(encoder, Tags) else 0)
    texts = public_texts if data_args.task == "next_word" else []  # public posts have no tags to learn from
    public = Dataset.from_dict(encoder.encode([{data_args.text_column: text} for text in texts]))
    if training_args.do_train:
        learn_public(model, public, collate, training_args, data_args)
    trainer = DPTrainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        data_collator=collate,
        public_dataset=public if stages_on_public(training_args) else None,
        per_example_loss_func=tag_losses if data_args.task == "tags" else None,
        processing_class=pieces.tokenizer if pieces is not None else None,
    )
    measure = tag_metrics if data_args.task == "tags" else functools.partial(word_metrics, pieces=pieces)
    size = training_args.per_device_eval_batch_size

    def results() -> dict[str, float]:
        return measure(trainer.model, splits["validation"], user, collate, size)

    before = results() if "validation" in splits and training_args.do_eval else {}
    if training_args.do_train:
        running.train(trainer, training_args)
    after = results() if before else {}
    running.publish(trainer, training_args)
    if trainer.is_world_process_zero():
        if after:
            trainer.save_metrics("eval", {f"eval_{name}": value for name, value in after.items()})
        lines = summary(trainer, data_args, splits, before, after)
        print(running.result_text(lines + running.closing_lines(training_args, start)))


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, as `options.read_flags` reads them.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES,
        embedded_defaults=EMBEDDED, run_name="stackoverflow", always=OF_USERS,
    )  # fmt: skip
    if training_args.privacy_unit != "user":
        raise DPConfigError(
            f"privacy_unit={training_args.privacy_unit!r}: this recipe protects whole users. Leave it out, or use "
            "recipes/clm.py."
        )
    options.check_counts(data_args, COUNTS)
    options.check_counts(model_args, ("width", "layers"))
    if model_args.width % 32:
        raise DPConfigError(f"width={model_args.width} is no multiple of 32, the width of a head. Use 64, 96, 128 ...")
    if not embedded:
        options.check_cut(data_args.max_train_samples, training_args)
        if not data_args.train_file:
            raise DPConfigError("There is no train_file. Add --train_file <table with a column of user ids>.")
        if not (data_args.vocabulary_file or data_args.public_file or model_args.model_name_or_path):
            raise DPConfigError(
                "Words need public ids, and counting them in the private records would cost privacy that nobody "
                "accounts for. Give --vocabulary_file <one word per line>, or --public_file <public texts>."
            )
        if data_args.task == "tags" and not data_args.tags_file:
            raise DPConfigError("Tags are published with the model. Give --tags_file <public tags>.")
    on_public = [*stages_on_public(training_args), *(["public_epochs"] if data_args.public_epochs else [])]
    if on_public and (data_args.task == "tags" or not data_args.public_file):
        raise DPConfigError(
            f"{' and '.join(on_public)}: learns the next word from public texts. Add --public_file, or leave it out."
        )
    if model_args.model_name_or_path and (data_args.task == "tags" or data_args.public_epochs):
        raise DPConfigError(
            "model_name_or_path: a pretrained model predicts the next word and needs no public texts. Leave out "
            "--task tags and --public_epochs, or the model."
        )
    if model_args.lora_r and not model_args.model_name_or_path:
        raise DPConfigError("lora_r adapts a pretrained model. Add --model_name_or_path gpt2, or leave --lora_r out.")
    training_args.do_eval = embedded or bool(data_args.validation_file)
    training_args.privacy_config(training_args.expected_batch_size or 1)
    check_arguments(training_args)
    return model_args, data_args, training_args


def use_synthetic_split(data_args: DataTrainingArguments, training_args: DPTrainingArguments) -> None:
    """Write the synthetic split next to the output, once, and name its files."""
    folder = Path(training_args.output_dir).parent / "synthetic-stackoverflow"
    with training_args.main_process_first(desc="writing the synthetic split"):
        stackoverflow_synthetic.write(folder, **EMBEDDED_SIZE)
    data_args.train_file = data_args.validation_file = str(folder / stackoverflow_synthetic.SQLITE)
    data_args.vocabulary_file = str(folder / stackoverflow_synthetic.WORD_COUNT)
    data_args.tags_file = str(folder / stackoverflow_synthetic.TAG_COUNT)


def read_vocabulary(data_args: DataTrainingArguments) -> tuple[Vocabulary | None, list[str]]:
    """The words that have ids, or that the accuracy counts, and public texts."""
    texts: list[str] = []
    if data_args.public_file:
        public = read_table(data_args.public_file, kinds=TEXT_EXTENSIONS, option="public_file")
        column = data_args.text_column if data_args.text_column in public.columns else next(iter(public.columns))
        texts = [text_of({column: text}, column) for text in public.columns[column]]
    if data_args.vocabulary_file:
        return Vocabulary.read(data_args.vocabulary_file, data_args.vocabulary_size), texts
    return Vocabulary.of(texts, data_args.vocabulary_size) if texts else None, texts


def make_model(
    model_args: ModelArguments, data_args: DataTrainingArguments, vocabulary: Vocabulary | None, seed: int
) -> tuple[Encoder, Any]:
    """The model of the task, and what makes ids of rows for it."""
    torch.manual_seed(seed)  # of the first weights, which are public
    text = data_args.text_column
    if model_args.model_name_or_path:
        config, tokenizer = models.load_config(model_args), models.load_tokenizer(model_args)
        most = min(PIECES_PER_WORD * data_args.max_words, getattr(config, "max_position_embeddings", 2**31) - 2)
        encoder = Pieces(tokenizer, vocabulary, text, data_args.max_words, most)
        model = models.load_weights(AutoModelForCausalLM, model_args, config, dtype=torch.float32)
        models.set_padding(tokenizer, model)
        return encoder, models.choose_trained(model, model_args, "CAUSAL_LM")
    assert vocabulary is not None
    if data_args.task == "tags":
        tags = read_names(str(data_args.tags_file), "tags_file", data_args.num_tags)
        return Tags(vocabulary, text, tags, data_args.tags_column), TagModel(len(vocabulary), len(tags))
    size = dict(width=model_args.width, layers=model_args.layers, max_words=data_args.max_words)
    return NextWords(vocabulary, text, data_args.max_words), language_model(len(vocabulary), **size)


def read_splits(
    data_args: DataTrainingArguments, training_args: DPTrainingArguments, encoder: Encoder, user: str
) -> dict[str, Dataset]:
    """The encoded records of the files: converted by one process of a machine, mapped by all."""
    splits = {}
    for name, path, split, limit in (
        ("train", data_args.train_file, data_args.train_split, data_args.max_train_samples),
        ("validation", data_args.validation_file, data_args.validation_split, data_args.max_eval_samples),
    ):
        if path:
            folder = Path(data_args.converted_dir) if data_args.converted_dir else None
            with training_args.main_process_first(desc=f"converting {path}"):
                splits[name] = convert(Path(path), split, encoder, user, folder=folder, limit=limit)
    return splits


def tell_of_shared_users(splits: dict[str, Dataset], user: str) -> None:
    """Held-out records of training users are theirs, too."""
    if "validation" not in splits:
        return
    shared = set(splits["train"].unique(user)) & set(splits["validation"].unique(user))
    if shared:
        logger.warning(
            "Some users are in the training and in the validation set. Metrics on what they wrote are exact values of "
            "protected users: hold out users, or keep the metrics with the data."
        )


def summary(
    trainer: Trainer,
    data_args: DataTrainingArguments,
    splits: dict[str, Dataset],
    before: dict[str, float],
    after: dict[str, float],
) -> list[tuple[str, str]]:
    """The last lines of a run: what was run, what came out, what it cost."""
    num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    data = ", ".join(running.records_of(str(data_args.files[s]), splits[s], trainer, s) for s in splits)
    lines = [("what was run", f"{type(trainer.model).__name__} ({num_parameters:,} parameters) on {data}")]
    lines += [(name, f"{before[name]:.4f} before training, {value:.4f} after") for name, value in after.items()]
    return [*lines, ("privacy", running.privacy_line(trainer))]


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
