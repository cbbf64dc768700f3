#!/usr/bin/env python
"""Finetune an encoder-decoder model (T5, BART) with differential privacy: sources and targets.

The flags are those of Hugging Face's sequence-to-sequence examples and of `DPTrainingArguments`, plus LoRA.

    accelerate launch recipes/seq2seq.py --model_name_or_path t5-small --target_epsilon 8 \
        --train_file trainset.csv --validation_file devset.csv --prompt_column mr --target_column ref --generate

A record is one row: a source with its target, each cut to its length, padded and never packed. A wrong setting or file
ends the run with one line and exit status 2, before anything is written; HF_DPOPT_DEBUG=1 shows the traceback. What is
not here is shared with `clm.py`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags, processes

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds
    processes.start_requested(sys.argv[1:])

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
)

from hf_dpopt import DPConfigError, DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments
from recipes import clm, models, options, running, sources
from recipes.clm import ModelArguments
from recipes.clm_data import (
    Pairs,
    Record,
    check_rows,
    choose_block_size,
    find_pairs,
)
from recipes.tables import TEXT_EXTENSIONS, Table, columns_in

FLAGS = "--model_name_or_path t5-small --train_file train.csv --validation_file dev.csv --target_epsilon 8"


@dataclass
class DataTrainingArguments(clm.PairArguments):
    """Which sources (prompts) and targets, and how much of each record."""

    max_source_length: int = options.flag(1024, "Most tokens of a source; the rest is cut.")
    max_target_length: int = options.flag(128, "Most tokens of a target; the rest is cut.")


def main(argv: list[str]) -> None:
    """The whole run, in the order of clm.py."""
    start = time.monotonic()
    model_args, data_args, training_args = arguments = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    tables = sources.load_used(model_args, data_args, training_args, kinds=TEXT_EXTENSIONS)
    tokenizer, model = load_model(model_args)
    for name in ("max_source_length", "max_target_length"):
        setattr(data_args, name, choose_block_size(getattr(data_args, name), tokenizer, model, name))
    kind = find_kind(tables, data_args, clm.users_in(data_args, training_args))
    lines = clm.finetune(
        model, tokenizer, tables, kind, data_args.max_target_length, arguments,
        trainers=(DPSeq2SeqTrainer, Seq2SeqTrainer), task="SEQ_2_SEQ_LM", tag="text2text-generation",
    )  # fmt: skip
    if training_args.process_index == 0:
        print(running.result_text(lines + running.closing_lines(training_args, start)))


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPSeq2SeqTrainingArguments]:
    """Flags, or one .json file with their values; see `options.read_flags`.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=clm.SOURCES, embedded_defaults={},
        run_name="seq2seq", training_class=DPSeq2SeqTrainingArguments,
    )  # fmt: skip
    if embedded:
        raise DPConfigError(f"Neither a model nor data is named, and this recipe brings none. For example: {FLAGS}")
    if training_args.predict_with_generate:
        raise DPConfigError(
            "predict_with_generate scores a batch against one reference each. Use --generate: it makes one text for "
            "each different source and scores it against all of its references."
        )
    clm.check_evaluation(data_args, training_args)
    data_args.prompt_template = clm.unescaped(data_args.prompt_template)
    options.check(model_args, data_args, training_args, embedded=False)
    return model_args, data_args, training_args  # type: ignore[return-value]


def load_model(model_args: ModelArguments) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model from a folder or the hub.

    Raises:
        DPConfigError: if the model has no encoder, or the tokenizer no end or padding of its own.
    """
    config = models.load_config(model_args)
    if not config.is_encoder_decoder:
        raise DPConfigError(
            f"{model_args.model_name_or_path!r} ({config.model_type}) has no encoder and decoder. Finetune it with "
            "recipes/clm.py, or name a model such as T5 or BART."
        )
    tokenizer = models.load_tokenizer(model_args)
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        raise DPConfigError(
            "The tokenizer needs an end token and a padding token that differ: padding is no target, an end is one. "
            "Use the tokenizer of the model, or add one: tokenizer.add_special_tokens({'pad_token': '<pad>'})."
        )
    dtype = getattr(torch, model_args.dtype)
    return tokenizer, models.load_weights(AutoModelForSeq2SeqLM, model_args, config, dtype=dtype)


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceTarget(Pairs):
    """The encoder reads the source and an end token; the loss is on the target and its end token.

    Args:
        max_source_length: tokens, the end included; of a longer source the beginning is kept.
    """

    shift: ClassVar[int] = 0
    max_source_length: int

    def unit(self, block_size: int) -> str:
        source = f"a source of at most {self.max_source_length} tokens"
        return f"one row: {source} with its target of at most {block_size} tokens"

    def prompt_ids(self, prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Tokens of the sources."""
        rows = _with_end(tokenizer(prompts, verbose=False)["input_ids"], tokenizer)
        return [_cut(row, self.max_source_length) for row in rows]

    def records(
        self, rows: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> Iterator[Record]:
        """Source and target of every row; `block_size` is the most tokens of a target."""
        sources = _with_end(tokenizer(self.prompts(rows), verbose=False)["input_ids"], tokenizer)
        targets = _with_end(tokenizer(text_target=list(rows[self.target]), verbose=False)["input_ids"], tokenizer)
        for source, target in zip(sources, targets, strict=True):
            is_cut = len(source) > self.max_source_length or len(target) > block_size
            yield Record(_cut(source, self.max_source_length), target[:block_size], is_cut)


def _with_end(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens with the special ones of the model, and an end where its tokenizer adds none."""
    end = tokenizer.eos_token_id
    return [row if row[-1:] == [end] else [*row, end] for row in rows]


def _cut(row: list[int], most: int) -> list[int]:
    """The beginning of a source, with its end token."""
    return row if len(row) <= most else [*row[: most - 1], row[-1]]


def find_kind(
    tables: Mapping[str, Table], args: DataTrainingArguments, user_id_column: str | None = None
) -> SourceTarget:
    """Sources and targets: the named columns, else those whose names say it.

    Args:
        user_id_column: of the training table.

    Raises:
        DPConfigError: if columns are missing, if none or several fit, or if a row does not.
    """
    first = next(iter(tables.values()))
    pairs = find_pairs(first, args)
    if len(pairs) != 1:
        raise DPConfigError(
            f"{first.name}: {'no' if not pairs else 'more than one'} source and target recognised among the columns "
            f"{columns_in(first)}. Name them with --prompt_column and --target_column."
        )
    kind = SourceTarget(*pairs[0], separator="", max_source_length=args.max_source_length)
    check_rows(kind, tables, user_id_column)
    return kind


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
