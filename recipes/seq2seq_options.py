"""Command line of `recipes/seq2seq.py`: which data, how long its two sides are, what is generated."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpopt import DPConfigError, DPSeq2SeqTrainingArguments
from recipes import clm_options, options

FLAGS = "--model_name_or_path t5-small --train_file train.csv --validation_file dev.csv --target_epsilon 8"


@dataclass
class DataTrainingArguments(options.DataArguments):
    """Which data, and how much of each record."""

    train_file: str | None = field(default=None, metadata={"help": clm_options.FILES})
    validation_file: str | None = field(
        default=None, metadata={"help": f"The same, for evaluation: {clm_options.FILES}"}
    )
    prompt_column: str | None = field(default=None, metadata={"help": "Column of the sources, if not recognised."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the text to learn for a source."})
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "How a source is made from columns, e.g. 'summarize: {article}'. Default: the column."},
    )
    max_source_length: int = field(default=1024, metadata={"help": "Most tokens of a source; the rest is cut."})
    max_target_length: int = field(default=128, metadata={"help": "Most tokens of a target; the rest is cut."})
    generate: bool = field(
        default=False, metadata={"help": "Generate for the sources of the validation set; BLEU, ROUGE-L, NIST."}
    )
    num_beams: int = field(default=1, metadata={"help": "Beams of the search that generates; 1 is greedy."})
    max_new_tokens: int = field(
        default=clm_options.MAX_NEW_TOKENS, metadata={"help": "Most tokens to generate for a source."}
    )
    max_generate_samples: int | None = field(
        default=None, metadata={"help": "Only the first so many different sources."}
    )


def parse(argv: list[str]) -> tuple[clm_options.ModelArguments, DataTrainingArguments, DPSeq2SeqTrainingArguments]:
    """Flags, or one .json file with their values; see `options.read_flags`.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    model_args, data_args, training_args, embedded = options.read_flags(
        argv, (clm_options.ModelArguments, DataTrainingArguments), sources=clm_options.SOURCES, embedded_defaults={},
        run_name="seq2seq", training_class=DPSeq2SeqTrainingArguments,
    )  # fmt: skip
    if embedded:
        raise DPConfigError(f"Neither a model nor data is named, and this recipe brings none. For example: {FLAGS}")
    if training_args.predict_with_generate:
        raise DPConfigError(
            "predict_with_generate scores a batch against one reference each. Use --generate: it makes one text for "
            "each different source and scores it against all of its references."
        )
    clm_options.check_evaluation(data_args, training_args)
    data_args.prompt_template = clm_options.unescaped(data_args.prompt_template)
    options.check(
        model_args, data_args, training_args, embedded=False,
        data_flags="--dataset_name <name on the hub>, or --train_file and --validation_file",
        counts=(*clm_options.COUNTS, "max_source_length", "max_target_length"),
    )  # fmt: skip
    return model_args, data_args, training_args  # type: ignore[return-value]
