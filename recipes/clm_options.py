"""Command line of `recipes/clm.py`: the flags of run_clm.py, kinds of data, LoRA, and what an absent flag means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dpopt import DPConfigError, DPTrainingArguments
from recipes import options

COUNTS = ("max_train_samples", "max_eval_samples", "max_generate_samples", "num_beams", "max_new_tokens")
SOURCES = ("model_name_or_path", "dataset_name", "train_file", "validation_file")
DEFAULT_BLOCK_SIZE = 1024
MAX_NEW_TOKENS = 64
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

    dtype: str = field(
        default="float32",
        metadata={
            "help": "Type of the weights. bfloat16 halves their memory and suits LoRA, whose own weights stay float32."
            " For faster arithmetic on float32 weights: --bf16.",
            "choices": ["float32", "bfloat16"],
        },
    )


@dataclass
class DataTrainingArguments(options.DataArguments):
    """Which data, what a record is, and which of its tokens are learned."""

    train_file: str | None = field(default=None, metadata={"help": FILES})
    validation_file: str | None = field(default=None, metadata={"help": f"The same, for evaluation: {FILES}"})
    overwrite_cache: bool = field(default=False, metadata={"help": "As in run_clm.py; nothing is cached here."})
    block_size: int | None = field(
        default=None,
        metadata={"help": f"Most tokens of a record. Default: what the model takes, at most {DEFAULT_BLOCK_SIZE}."},
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column of the prompts, if it is not recognised; the loss is on the target."}
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of the text to learn for a prompt."})
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "How a prompt is made from columns, e.g. '{instruction}\\n{input}'. Default: the column."},
    )
    separator: str = field(default="\\n", metadata={"help": "Between prompt and target; \\n is a new line."})
    messages_column: str | None = field(
        default=None,
        metadata={"help": "Column of conversations: lists of {role, content}; the loss is on assistant turns."},
    )
    chat_template: str | None = field(
        default=None,
        metadata={"help": "plain: the recipe's own, also used for a tokenizer without one. Default: the tokenizer's."},
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column of plain text; the loss is on all of it. One document is one record."}
    )
    chunk_documents: bool = field(
        default=False,
        metadata={
            "help": "Plain text: cut each document into chunks of block_size tokens, each a record of its own. The "
            "guarantee is then about one chunk, not about a document. Default: a document is cut off at block_size."
        },
    )
    packing: bool = field(default=False, metadata={"help": "Refused: a row that holds several records."})
    generate: bool = field(
        default=False,
        metadata={"help": "Prompts and targets: generate for the prompts of the validation set; BLEU, ROUGE-L, NIST."},
    )
    num_beams: int = field(default=1, metadata={"help": "Beams of the search that generates; 1 is greedy."})
    max_new_tokens: int = field(default=MAX_NEW_TOKENS, metadata={"help": "Most tokens to generate for a prompt."})
    max_generate_samples: int | None = field(
        default=None, metadata={"help": "Only the first so many different prompts."}
    )


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Flags, or one .json file with their values; see `options.read_flags`.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (ModelArguments, DataTrainingArguments), sources=SOURCES, embedded_defaults=EMBEDDED, run_name="clm"
    )
    if embedded and data_args.non_private:
        options.fill(training_args, CHOSEN)
    if data_args.packing:
        raise DPConfigError(
            "packing puts several documents into one row. The row would be clipped as one record, so the guarantee "
            "would be about rows and not about documents, and a document that is spread over rows would be weighed "
            "several times. Remove --packing; padding is added per batch. To train on all of a long document: "
            "--chunk_documents, which states the unit it protects."
        )
    check_evaluation(data_args, training_args)
    if data_args.block_size is not None and data_args.block_size < 2:
        raise DPConfigError(
            f"block_size={data_args.block_size} leaves nothing to predict. Use 2 or more; 64 to 1024 is usual."
        )
    if data_args.chat_template not in (None, "plain"):
        raise DPConfigError(
            f"chat_template={data_args.chat_template!r} is unknown. Use plain, or leave it out: the tokenizer's own."
        )
    options.check(
        model_args,
        data_args,
        training_args,
        embedded=embedded,
        data_flags="--dataset_name <name on the hub>, or --train_file and --validation_file",
        counts=COUNTS,
    )
    data_args.separator = unescaped(data_args.separator)
    data_args.prompt_template = unescaped(data_args.prompt_template)
    return model_args, data_args, training_args


def check_evaluation(data_args: Any, training_args: DPTrainingArguments) -> None:
    """What is evaluated and generated, and on whose records.

    Raises:
        DPConfigError: if an action has nothing to work on, or would show training records.
    """
    if training_args.do_predict:
        raise DPConfigError("do_predict is not there. Use --generate, which writes a text for each prompt.")
    if data_args.generate and not training_args.do_eval:
        raise DPConfigError("generate uses the prompts of the validation set. Add --do_eval and --validation_file.")
    if training_args.do_train and data_args.train_file and data_args.train_file == data_args.validation_file:
        raise DPConfigError(
            f"{data_args.train_file} is both train_file and validation_file: the metrics would be exact values of the "
            "training records. Hold out records for evaluation."
        )


def unescaped(value: str | None) -> str | None:
    """A shell passes \\n as two characters."""
    return value and value.replace("\\n", "\n").replace("\\t", "\t")
