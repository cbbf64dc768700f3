#!/usr/bin/env python
"""Finetune an encoder-decoder model (T5, BART) with differential privacy: sources and targets.

The flags are those of Hugging Face's sequence-to-sequence examples and of `DPTrainingArguments`, plus LoRA.

    accelerate launch recipes/seq2seq.py --model_name_or_path t5-small --target_epsilon 8 \
        --train_file trainset.csv --validation_file devset.csv --prompt_column mr --target_column ref --generate

A record is one row: a source with its target, each cut to its length, padded and never packed. A wrong setting or file
ends the run with one line and exit status 2, before anything is written; HF_DPOPT_DEBUG=1 shows the traceback. Beside
this file: `seq2seq_options.py` (flags), `seq2seq_data.py`; the rest is shared with `clm.py`.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import recipes  # noqa: F401  first of all: it names missing packages and quiets imports

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
)

from hf_dpopt import DPConfigError, DPSeq2SeqTrainer
from recipes import clm, models, processes, running, sources
from recipes.clm_data import choose_block_size
from recipes.clm_generate import most_prompt_tokens
from recipes.clm_metrics import loss_of_records, perplexity_metrics
from recipes.clm_options import ModelArguments
from recipes.public_first import SPLIT, learn_public
from recipes.seq2seq_data import find_pairs
from recipes.seq2seq_options import parse
from recipes.tables import TEXT_EXTENSIONS

logger = logging.getLogger("recipes.seq2seq")


def main(argv: list[str]) -> None:
    """The whole run, in the order of clm.py."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    tables = sources.load_used(model_args, data_args, training_args, kinds=TEXT_EXTENSIONS)
    tokenizer, model = load_model(model_args)
    if data_args.generate:
        most_prompt_tokens(tokenizer, model, data_args.max_new_tokens)
    for name in ("max_source_length", "max_target_length"):
        setattr(data_args, name, choose_block_size(getattr(data_args, name), tokenizer, model, name))
    kind = find_pairs(tables, data_args, clm.users_in(data_args, training_args))
    clm.declare_unit(kind, data_args.max_target_length, training_args)
    splits = clm.tokenize_splits(tables, kind, tokenizer, data_args, training_args, data_args.max_target_length)
    model = models.choose_trained(model, model_args, "SEQ_2_SEQ_LM")
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)  # makes what a smoothed evaluation loss needs
    if SPLIT in splits:
        learn_public(model, splits[SPLIT].dataset, collate, training_args, data_args)

    trainer_class = Seq2SeqTrainer if data_args.non_private else DPSeq2SeqTrainer
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=splits["train"].dataset if training_args.do_train else None,
        eval_dataset=splits["validation"].dataset if training_args.do_eval else None,
        compute_metrics=perplexity_metrics,
        preprocess_logits_for_metrics=functools.partial(loss_of_records, shifted=False),
        processing_class=tokenizer,
        data_collator=collate,
    )
    results = clm.train_and_evaluate(trainer, tables, kind, tokenizer, data_args, training_args)
    running.publish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="text2text-generation")
    if trainer.is_world_process_zero():
        lines = clm.summary(trainer, tables, splits, kind, data_args.max_target_length, results, model_args)
        print(running.result_text(lines + running.closing_lines(training_args, start)))


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


def run(argv: list[str]) -> int:
    """Exit status of a run; see `running.run`."""
    return running.run(argv, main)


if __name__ == "__main__":
    processes.start_requested(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))
