#!/usr/bin/env python
"""Finetune a language model with differential privacy: prompts and targets, or plain text.

The flags are those of Hugging Face's `run_clm.py` and of `DPTrainingArguments`, plus LoRA.

    accelerate launch recipes/clm.py                      # no arguments: the embedded job, offline, a few minutes
    accelerate launch recipes/clm.py --model_name_or_path gpt2 --target_epsilon 8 --lora_r 8 --block_size 128 \
        --train_file trainset.csv --validation_file devset.csv --prompt_column mr --target_column ref --generate
    accelerate launch recipes/clm.py --model_name_or_path gpt2 --target_epsilon 8 --block_size 256 \
        --train_file reviews.jsonl.gz --validation_file held_out.jsonl.gz --text_column text

The columns decide what a record is and which of its tokens are learned: `clm_data.py`. Records are padded, never
packed, so one record is one row of the data. A model with an encoder (T5, BART) reads the prompts there. A wrong
setting or file ends the run with one line and exit status 2, before anything is written; HF_DPOPT_DEBUG=1 shows the
traceback. Next to this file: `clm_data.py` (records) and `generation.py`; what `glue.py` needs as well: `options.py`,
`sources.py`, `tables.py`, `models.py`, `running.py`.

B = records, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import functools
import logging
import math
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

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from hf_dpopt import DPConfigError, DPTrainer, DPTrainerMixin, DPTrainingArguments
from recipes import models, options, running, sources
from recipes.clm_data import (
    DEFAULT_BLOCK_SIZE,
    IGNORED,
    Kind,
    Pairs,
    Split,
    choose_block_size,
    find_kind,
    report,
    tokenize,
    with_encoder,
)
from recipes.generation import generate, generation_metrics, group_references, most_prompt_tokens
from recipes.public_first import SPLIT, learn_public, stages_on_public
from recipes.tables import TEXT_EXTENSIONS, Table

logger = logging.getLogger("recipes.clm")

SOURCES = ("model_name_or_path", "dataset_name", "train_file", "validation_file")
FILES = "csv, tsv, json, jsonl or txt, each optionally .gz, or parquet."

# Batch and learning rate of the embedded job are those of the advisor.
EMBEDDED: dict[str, Any] = {
    "target_epsilon": 8.0,
    "target_delta": 1e-5,
    "clipping_norm": 1.0,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 128,
    "num_train_epochs": 1.2,
    "block_size": 48,
    "eval_on_start": True,  # the perplexity before private training
    "logging_steps": 0.25,
    "save_strategy": "no",
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: tokenizer and first weights come from public text",
}

CHOSEN = {"expected_batch_size": 512, "learning_rate": 2e-3}  # for the same job without privacy, which has no advisor


@dataclass
class ModelArguments(options.ModelArguments):
    """Which model, and how much of it is trained."""

    dtype: str = options.flag(
        "float32",
        "Type of the weights. bfloat16 halves their memory and suits LoRA, whose own weights stay float32."
        " For faster arithmetic on float32 weights: --bf16.",
        choices=["float32", "bfloat16"],
    )


@dataclass
class DataTrainingArguments(options.DataArguments):
    """Which data, what a record is, which of its tokens are learned, and what is generated."""

    train_file: str | None = options.flag(None, FILES)
    validation_file: str | None = options.flag(None, f"The same, for evaluation: {FILES}")
    block_size: int | None = options.flag(
        None,
        "Most tokens of a record; of a model with an encoder, of a source and of its target. Default: what the model "
        f"takes, at most {DEFAULT_BLOCK_SIZE}.",
    )
    text_column: str | None = options.flag(
        None, "Column of plain text; the loss is on all of it. One document is one record."
    )
    prompt_column: str | None = options.flag(
        None, "Column of the prompts, if it is not recognised; the loss is on the target."
    )
    target_column: str | None = options.flag(None, "Column of the text to learn for a prompt.")
    prompt_template: str | None = options.flag(
        None, "How a prompt is made from columns, e.g. 'summarize: {article}\\n'. Default: the column."
    )
    separator: str = options.flag("\\n", "Between prompt and target, where one model reads both; \\n is a new line.")
    generate: bool = options.flag(
        False, "Prompts and targets: generate for the prompts of the validation set; BLEU, ROUGE-L, NIST."
    )
    num_beams: int = options.flag(1, "Beams of the search that generates; 1 is greedy.")
    max_new_tokens: int = options.flag(64, "Most tokens to generate for a prompt.")
    max_generate_samples: int | None = options.flag(None, "Only the first so many different prompts.")


def main(argv: list[str]) -> None:
    """The whole run, in the order of run_clm.py."""
    start = time.monotonic()
    model_args, data_args, training_args = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    tables = load_tables(model_args, data_args, training_args)
    kind = find_kind(tables, data_args, users_in(data_args, training_args))
    tokenizer, model = load_model(model_args)
    block_size = choose_block_size(data_args.block_size, tokenizer, model)
    has_encoder = model.config.is_encoder_decoder
    if has_encoder:
        kind = with_encoder(kind, block_size)
    if data_args.generate:
        most_prompt_tokens(tokenizer, model, data_args.max_new_tokens)
    declare_unit(kind, block_size, training_args)
    splits = tokenize_splits(tables, kind, tokenizer, data_args, training_args, block_size)
    model = models.choose_trained(model, model_args, "SEQ_2_SEQ_LM" if has_encoder else "CAUSAL_LM")
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)  # pads labels, too, on the side of the tokenizer
    if SPLIT in splits:
        learn_public(model, splits[SPLIT].dataset, collate, training_args, data_args)

    # The stock Trainer minimises the mean over all target tokens of a batch; DPTrainer the mean over records of each
    # record's mean, as no record may depend on the lengths of others. On records of like length the two are alike.
    trainer = (Trainer if data_args.non_private else DPTrainer)(
        model=model,
        args=training_args,
        train_dataset=splits["train"].dataset if training_args.do_train else None,
        eval_dataset=splits["validation"].dataset if training_args.do_eval else None,
        compute_metrics=perplexity_metrics,
        preprocess_logits_for_metrics=functools.partial(loss_of_records, shift=kind.shift),
        processing_class=tokenizer,
        data_collator=collate,
        **({"public_dataset": splits[SPLIT].dataset} if SPLIT in splits and stages_on_public(training_args) else {}),
    )
    if training_args.do_train:
        running.train(trainer, training_args)
    results = evaluate(trainer) if training_args.do_eval else {}
    if data_args.generate:
        assert isinstance(kind, Pairs)
        results |= write_generations(trainer, tables["validation"], kind, tokenizer, data_args, training_args)
    finetuned_from = None if data_args.embedded else model_args.model_name_or_path
    task = "text2text-generation" if has_encoder else "text-generation"
    running.publish(trainer, training_args, finetuned_from=finetuned_from, tasks=task)
    if trainer.is_world_process_zero():
        lines = summary(trainer, tables, splits, kind, block_size, results, model_args)
        lines += running.closing_lines(training_args, start)
        print(running.result_text(lines) + (f"\n{NEXT_STEPS}" if data_args.embedded else ""))


# --- flags -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, as `options.read_flags` reads them.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES, embedded_defaults=EMBEDDED, run_name="clm"
    )
    if embedded and data_args.non_private:
        options.fill(training_args, CHOSEN)
    if training_args.do_predict:
        raise DPConfigError("do_predict is not there. Use --generate, which writes a text for each prompt.")
    if data_args.generate and not training_args.do_eval:
        raise DPConfigError("generate uses the prompts of the validation set. Add --do_eval and --validation_file.")
    if training_args.do_train and data_args.train_file and data_args.train_file == data_args.validation_file:
        raise DPConfigError(
            f"{data_args.train_file} is both train_file and validation_file: the metrics would be exact values of the "
            "training records. Hold out records for evaluation."
        )
    if data_args.block_size is not None and data_args.block_size < 2:
        raise DPConfigError(
            f"block_size={data_args.block_size} leaves nothing to predict. Use 2 or more; 64 to 1024 is usual."
        )
    options.check(model_args, data_args, training_args, embedded=embedded)
    data_args.separator = unescaped(data_args.separator)
    data_args.prompt_template = unescaped(data_args.prompt_template)
    return model_args, data_args, training_args


def unescaped(value: str | None) -> str | None:
    """A shell passes \\n as two characters."""
    return value and value.replace("\\n", "\n").replace("\\t", "\t")


# --- records and model -----------------------------------------------------------------------------------------------


def load_tables(
    model_args: ModelArguments, data_args: DataTrainingArguments, training_args: DPTrainingArguments
) -> dict[str, Table]:
    """train and validation, as far as this run uses them.

    Raises:
        DPConfigError: if one is missing or cannot be read.
    """
    if data_args.embedded:
        return sources.used(load_embedded(model_args, training_args), training_args)
    return sources.load_used(model_args, data_args, training_args, kinds=TEXT_EXTENSIONS)


def load_embedded(model_args: ModelArguments, training_args: DPTrainingArguments) -> dict[str, Table]:
    """Text of the standard library; also builds the model."""
    from recipes.embedded.build import build_gpt2
    from recipes.embedded.corpus import read_corpus

    corpus = read_corpus()
    folder = Path(training_args.output_dir).parent / f"embedded-gpt2-{corpus.digest}"
    with training_args.main_process_first(desc="building the embedded model"):
        if not folder.is_dir():
            logger.info(f"Training a small GPT-2 on {len(corpus.public_text)} public passages: {folder}")
        model_args.model_name_or_path = str(build_gpt2(folder, corpus))
    return corpus.tables()


def load_model(model_args: ModelArguments) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model from a folder or the hub.

    Raises:
        DPConfigError: if a model with an encoder has a tokenizer without an end or padding of its own.
    """
    config = models.load_config(model_args)
    tokenizer = models.load_tokenizer(model_args)
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if config.is_encoder_decoder and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        raise DPConfigError(
            "The tokenizer needs an end token and a padding token that differ: padding is no target, an end is one. "
            "Use the tokenizer of the model, or add one: tokenizer.add_special_tokens({'pad_token': '<pad>'})."
        )
    tokenizer.padding_side = "right"  # of training; texts are generated from prompts padded on the left
    # not the type of the file: half-precision weights lose the small updates of private training
    model = models.load_weights(auto, model_args, config, dtype=getattr(torch, model_args.dtype))
    models.set_padding(tokenizer, model)
    return tokenizer, model


def declare_unit(kind: Kind, block_size: int, training_args: DPTrainingArguments) -> None:
    """For the privacy report: what one record is, and what was fitted on training records before training."""
    name = "block" if training_args.privacy_unit == "block" else "example"
    unit = f"One record ({name}) is {kind.unit(block_size)}"
    if training_args.privacy_unit == "user":
        unit += f"; all with one value of {training_args.user_id_column!r} are one user"
    declared = training_args.data_dependent_preprocessing
    if declared == "not declared":
        declared = "none: each record is tokenized alone, with the tokenizer of the model"
    training_args.data_dependent_preprocessing = f"{declared}. {unit}"
    if training_args.do_train:
        logger.info(f"{unit}.")


def tokenize_splits(
    tables: dict[str, Table],
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    data_args: Any,
    training_args: DPTrainingArguments,
    block_size: int,
) -> dict[str, Split]:
    """Records of every split; what was cut is said before training.

    Raises:
        DPConfigError: if no record of a split has a token to learn: a run would be charged for noise alone.
    """
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples, SPLIT: None}
    splits = {}
    for name, table in tables.items():
        with training_args.main_process_first(desc=f"tokenizing {name}"):
            users = users_in(data_args, training_args) if name == "train" else None
            splits[name] = tokenize(
                table, kind, tokenizer, block_size=block_size, limit=limits[name], user_id_column=users
            )
        if splits[name].num_without_target == len(splits[name].dataset):
            raise DPConfigError(
                f"block_size={block_size}: no record of {table.name} has a token to learn. Raise --block_size, or "
                "shorten what is before the target."
            )
        is_protected = name == "train" and not data_args.non_private and not training_args.log_unprivatized
        report(name, splits[name], block_size, counts=not is_protected)
    return splits


def users_in(data_args: Any, training_args: DPTrainingArguments) -> str | None:
    """The column of the training table that tells users apart, if they are protected."""
    return None if data_args.non_private else training_args.user_id_column


# --- evaluation ------------------------------------------------------------------------------------------------------


def loss_of_records(logits: Any, labels_BT: torch.Tensor, *, shift: int = 1) -> torch.Tensor:
    """Cross entropy summed over each record's target tokens, and how many those are; (B, 2).

    For `Trainer(preprocess_logits_for_metrics=...)`: what is kept of a batch is two numbers per record, no logits.

    Args:
        shift: 1 for a causal model, which predicts the label after the one it stands at; 0 for a decoder with an
            encoder, which predicts that one.
    """
    logits_BTV = logits[0] if isinstance(logits, tuple) else logits
    logits_BTV, labels_BT = logits_BTV[:, : logits_BTV.size(1) - shift], labels_BT[:, shift:]
    losses_BT = F.cross_entropy(
        logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels_BT.shape)
    return torch.stack([losses_BT.sum(1), (labels_BT != IGNORED).sum(1).to(losses_BT.dtype)], dim=1)


def perplexity_metrics(p: EvalPrediction) -> dict[str, float]:
    """Losses (nats per token) and perplexities over an evaluation set, whatever the batches were.

    * ``record_*``: the mean over records of each record's mean over its own tokens: what private training optimises. A
      short record weighs as much as a long one.
    * ``token_*``: the mean over all tokens of the set: the perplexity of the corpus, as papers report it.

    Records without a target token are in neither.
    """
    sums_B, counts_B = np.asarray(p.predictions, dtype=np.float64).T
    has_target_B = counts_B > 0
    if not has_target_B.any():
        return {}
    record_loss = float((sums_B[has_target_B] / counts_B[has_target_B]).mean())
    token_loss = float(sums_B.sum() / counts_B.sum())
    return {
        "record_loss": record_loss,
        "record_perplexity": _exp(record_loss),
        "token_loss": token_loss,
        "token_perplexity": _exp(token_loss),
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Loss and perplexity of the validation records, per record and per token."""
    metrics = trainer.evaluate()
    metrics.pop("eval_loss", None)  # a mean over batches: it depends on per_device_eval_batch_size
    metrics["eval_samples"] = len(trainer.eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return metrics


def write_generations(
    trainer: Trainer,
    table: Table,
    kind: Pairs,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
    training_args: DPTrainingArguments,
) -> dict[str, float]:
    """Generates a text per prompt, writes one per line to generations.txt, and compares them with the references.

    The file holds neither prompts nor references, as output_dir may be published; line i is the i-th different prompt.
    """
    references = group_references(table, kind)
    prompts = list(references)[: data_args.max_generate_samples]
    logger.info(
        f"Generating for {len(prompts)} different prompts, {sum(len(references[p]) for p in prompts)} references."
    )
    texts = generate(
        trainer, prompts, kind, tokenizer, num_beams=data_args.num_beams, max_new_tokens=data_args.max_new_tokens
    )
    metrics = {
        f"generate_{name}": value
        for name, value in generation_metrics(texts, [references[prompt] for prompt in prompts]).items()
    }
    metrics["generate_samples"] = len(prompts)
    trainer.log_metrics("generate", metrics)
    trainer.save_metrics("generate", metrics)
    if trainer.is_world_process_zero():
        path = Path(training_args.output_dir) / "generations.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        logger.info(f"Generated texts: {path}")
    return metrics


def summary(
    trainer: Trainer,
    tables: dict[str, Table],
    splits: dict[str, Split],
    kind: Kind,
    block_size: int,
    results: dict[str, float],
    model_args: ModelArguments,
) -> list[tuple[str, str]]:
    """The last lines of a run: what was run, what came out, what it cost."""
    num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    data = ", ".join(running.records_of(t.name, splits[s].dataset, trainer, s) for s, t in tables.items())
    lines = [("what was run", f"{model_args.model_name_or_path} ({num_parameters:,} trained parameters) on {data}")]
    before = next((entry for entry in trainer.state.log_history if entry["step"] == 0), {})
    for name, meaning in PERPLEXITIES.items():
        if f"eval_{name}" not in results:
            continue
        after = f"{results[f'eval_{name}']:.2f}"
        if trainer.state.global_step and f"eval_{name}" in before:  # --eval_on_start
            after = f"{before[f'eval_{name}']:.2f} before training, {after} after"
        lines.append(("perplexity", f"{after} ({meaning})"))
    if lines[1:]:
        lines.append(("", f"a uniform guess among all tokens has {trainer.model.config.vocab_size}, a perfect one 1"))
    if "generate_bleu" in results:
        scores = ", ".join(f"{name} {results[f'generate_{key}']:.2f}" for key, name in SCORES.items())
        lines.append(("generation", f"{scores} ({results['generate_samples']} prompts)"))
    lines.append(("privacy", running.privacy_line(trainer)))
    if isinstance(trainer, DPTrainerMixin) and trainer.plan is not None:
        column = trainer.args.user_id_column
        unit = "example" if trainer.plan.unit == "example" else f"user = all records of one {column!r}; record"
        lines.append(("unit", f"{unit} = {kind.unit(block_size)}"))
    return lines


PERPLEXITIES = {
    "token_perplexity": "of the corpus: over all tokens of the set, as papers report it",
    "record_perplexity": "of a record: each record's own mean counts once, as in private training",
}
SCORES = {"bleu": "BLEU", "rouge_l": "ROUGE-L", "nist": "NIST"}

NEXT_STEPS = """
  Perplexity is e^(mean loss): among about so many equally likely tokens the model still has to guess. The model knew
  the language reference and messages of Python's standard library, which are public here; what it gained it learned
  from its code lines, comments and docstrings, each of them one private record. Each run spends its own budget on the
  same records; epsilons of several runs add up. The real thing:
    accelerate launch recipes/clm.py --model_name_or_path gpt2 --target_epsilon 8 --lora_r 8 --block_size 128 \\
        --train_file trainset.csv --validation_file devset.csv --prompt_column mr --target_column ref --generate
    accelerate launch recipes/clm.py --model_name_or_path <dir> --target_epsilon 8 --block_size 256 \\
        --train_file train.jsonl --validation_file dev.jsonl   # columns text, or prompt and completion"""


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
