"""Command line that the recipes share: which model, LoRA, which data, and what an absent flag means."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser

from hf_dpopt import DPConfigError, DPTrainingArguments
from hf_dpopt.huggingface.arguments import check_no_statement
from hf_dpopt.huggingface.refusals.training_arguments import check_arguments
from recipes import flags
from recipes.public_first import check_public

ACTIONS = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}  # split -> flag that uses it
RUNS = Path("runs")


def flag(default: Any, help: str, choices: Collection[str] | None = None) -> Any:
    """Field of a class of arguments; `MISSING` for one that must be given."""
    return field(default=default, metadata={"help": help, **({"choices": list(choices)} if choices else {})})


@dataclass
class ModelArguments:
    """Which model, and how much of it is trained."""

    model_name_or_path: str | None = flag(
        None, "Folder of a model, or its name on the hub. Absent: the small embedded model."
    )
    config_name: str | None = flag(None, "Configuration, if not the model's own.")
    tokenizer_name: str | None = flag(None, "Tokenizer, if not the model's own.")
    cache_dir: str | None = flag(None, "Where to keep what is fetched from the hub.")
    use_fast_tokenizer: bool = flag(True, "Use the tokenizers library where possible.")
    model_revision: str = flag("main", "Branch, tag or commit of the model on the hub.")
    token: str | None = flag(None, "Access token for the hub; default: that of `hf auth login`.")
    trust_remote_code: bool = flag(False, "Run code that comes with a model of the hub.")
    attn_implementation: str | None = flag(
        None, "eager or sdpa; on a CPU in bf16, eager is much faster for short texts."
    )
    dropout: float = flag(0.0, "Every dropout rate of the model; 0 suits private training, -1 keeps the model's own.")
    lora_r: int = flag(0, "Rank of LoRA; 0 trains all parameters.")
    lora_alpha: int | None = flag(None, "Scale of LoRA; default: twice the rank.")
    lora_dropout: float = flag(0.0, "Dropout inside LoRA.")
    lora_target_modules: list[str] | None = flag(
        None, "Layers that get LoRA, e.g. query value; default: all linear layers but the head."
    )
    freeze: str = flag(
        "none", "Part that is not trained: the encoder (all but the head).", choices=["none", "encoder"]
    )


@dataclass
class DataArguments:
    """Which data, and how much of it."""

    dataset_name: str | None = flag(None, "Dataset of the hub.")
    dataset_config_name: str | None = flag(None, "Configuration of that dataset.")
    max_train_samples: int | None = flag(None, "Only the first so many training records.")
    max_eval_samples: int | None = flag(None, "Only the first so many evaluation records.")
    train_file: str | None = flag(None, "csv, tsv, json or jsonl, each optionally .gz.")
    validation_file: str | None = flag(None, "The same, for evaluation.")
    public_file: str | None = flag(
        None,
        "Public records, in the form of train_file: ordinary training on them comes first, and --preconditioner "
        "adadps or subspace and --public_mirror_descent learn from them.",
    )
    public_epochs: float = flag(1.0, "Passes of ordinary training over public_file; 0 for none.")
    public_learning_rate: float | None = flag(
        None, "Of the training on public_file. Default: 5e-5, of adapters and heads 1e-3."
    )
    non_private: bool = flag(False, "NO PRIVACY: the stock Trainer with the same data and batch, to compare with.")

    @property
    def files(self) -> dict[str, str | None]:
        """Split name -> file."""
        return {"train": self.train_file, "validation": self.validation_file}

    @property
    def embedded(self) -> bool:
        """Whether the text comes from the Python installation."""
        return not (self.dataset_name or any(self.files.values()))


def read_flags(
    argv: list[str],
    classes: tuple[type, type],
    *,
    sources: Collection[str],
    embedded_defaults: Mapping[str, Any],
    run_name: str,
    training_class: type[DPTrainingArguments] = DPTrainingArguments,
    always: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, DPTrainingArguments, bool]:
    """Reads flags, and fills in what is absent.

    Without a model and data (none of `sources`) the embedded job's settings are the defaults. Without do_train,
    do_eval, do_predict there is training, and evaluation if there is something to evaluate on. Without output_dir a
    folder in `runs` is made.

    Args:
        classes: of the model's and the data's arguments.
        training_class: of the training arguments.
        always: defaults of the recipe, with any data.

    Returns:
        Arguments of model, data and training, and whether it is the embedded job.

    Raises:
        DPConfigError: for values that cannot be read.
    """
    parser = Parser((*classes, training_class), allow_abbrev=False)
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in argv if a.startswith("--")}
    embedded = not given & set(sources)
    defaults = {**(always or {}), **(embedded_defaults if embedded else {})}
    if given & {"noise_multiplier", "non_private"}:
        defaults.pop("target_epsilon", None)
    defaults["output_dir"] = str(RUNS / f"{'embedded' if embedded else run_name}-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.set_defaults(**defaults)
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    if not given & set(ACTIONS.values()):
        training_args.do_train = True
        training_args.do_eval = embedded or not data_args.train_file or bool(data_args.validation_file)
    if "output_dir" not in given:  # the clocks of several processes differ
        training_args.output_dir = broadcast_object_list([training_args.output_dir])[0]
    return model_args, data_args, training_args, embedded


class Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse prints 200 flags before it says what is wrong
        raise DPConfigError(f"{message}. --help lists all flags.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not unknown[0].startswith("-"):
            self.error(
                f"{unknown[0]!r} belongs to no flag. Write names with commas and no spaces (negative,positive), and "
                "put quotes around what has spaces"
            )
        if unknown:
            raise flags.unknown_flag(unknown[:1], self._option_string_actions)
        return found, unknown


def fill(training_args: DPTrainingArguments, chosen: Mapping[str, Any]) -> None:
    """Set batch and learning rate where they were left at their defaults, which fit no job of these recipes."""
    for name, value in chosen.items():
        if getattr(training_args, name) in (None, 5e-5):
            setattr(training_args, name, value)


def check_counts(args: Any, names: Collection[str] | None = None) -> None:
    """Refuse flags below 1, of those names or of all that are integers.

    Raises:
        DPConfigError: naming the first one.
    """
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and (names is None or name in names):
            raise DPConfigError(f"{name}={value} is not a positive count. Use 1 or more, or leave it out.")


def check(model_args: ModelArguments, data_args: Any, training_args: DPTrainingArguments, *, embedded: bool) -> None:
    """What can be told to be wrong before a file is opened; integers of `data_args` are counts.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    if not embedded and model_args.model_name_or_path is None:
        raise DPConfigError("Data is given but no model. Add --model_name_or_path <folder or name on the hub>.")
    name = model_args.model_name_or_path or ""
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise DPConfigError(
            f"model_name_or_path={name!r} is not a folder. Name a model's folder, or a model on the hub."
        )
    if not embedded and data_args.embedded:
        task = "--task_name <GLUE task>, " if hasattr(data_args, "task_name") else ""
        raise DPConfigError(
            f"A model is given but no data. Add {task}--dataset_name <name on the hub>, or --train_file and "
            "--validation_file; without any of these and without a model the embedded job runs."
        )
    check_files(data_args, training_args)
    check_public(data_args, training_args)
    check_counts(data_args)
    if model_args.lora_r < 0:
        raise DPConfigError(f"lora_r={model_args.lora_r} is negative. Use 4 to 64, or 0 to train all parameters.")
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
        if value := getattr(model_args, name):
            check_lora(name, value, "lora_r 8", is_on=model_args.lora_r > 0)
    if model_args.lora_r and model_args.freeze != "none":
        raise DPConfigError("LoRA freezes the model already. Leave --freeze encoder or --lora_r out.")
    if model_args.dropout > 1 or model_args.dropout != model_args.dropout:
        raise DPConfigError(f"dropout={model_args.dropout} is not a rate. Use 0 to 1, or -1 to keep the model's own.")
    if training_args.eval_data_privacy == "private" and (data_args.non_private or training_args.do_predict):
        raise DPConfigError(
            "eval_data_privacy='private' releases noisy metrics alone; non_private and do_predict give exact values "
            "of records. Leave what was set of them out, or evaluate on public data."
        )
    if data_args.non_private:
        check_no_statement(training_args.output_dir)
    if data_args.non_private:
        accumulate(training_args)
    elif training_args.do_train:
        if not embedded:
            check_cut(data_args.max_train_samples, training_args)
        # wrong values end here, not after loading
        training_args.privacy_config(training_args.expected_batch_size or 1)
        check_arguments(training_args)


def check_cut(max_train_samples: int | None, training_args: DPTrainingArguments) -> None:
    """Refuse a cut to the first rows where users are protected, which epsilon does not cover.

    If a user of 20 rows leaves, 20 other users can come in. A row that leaves lets in one: that is `replace_one`.

    Raises:
        DPConfigError: with both ways out.
    """
    if max_train_samples is not None and training_args.privacy_unit == "user":
        raise DPConfigError(
            f"max_train_samples={max_train_samples}: if one user were removed, rows of other users would come in, and "
            "epsilon does not cover that. Leave it out, or write a file with all rows of users chosen in advance."
        )


def check_lora(name: str, value: Any, switch: str, *, is_on: bool) -> None:
    """Refuse an option of LoRA where LoRA is off, for the whole model would be trained without a word.

    Args:
        switch: flag that switches LoRA on.

    Raises:
        DPConfigError: naming both ways out.
    """
    if not is_on:
        raise DPConfigError(
            f"{name}={value}: LoRA is off, so all weights would be trained. Add --{switch}, or leave {name} out."
        )


def check_files(data_args: Any, training_args: DPTrainingArguments) -> None:
    """Files or the hub, and a file for everything that is to be done."""
    files = data_args.files
    if data_args.dataset_name is not None and any(files.values()):
        raise DPConfigError("Both dataset_name and files are given. Keep one of them.")
    if not any(files.values()):
        return
    for split, action in actions(training_args).items():
        if split in files and not files[split]:
            why = "do_eval (or eval_strategy)" if action == "do_eval" else action
            raise DPConfigError(
                f"{why} is set but there is no {split}_file. Add --{split}_file <file>, or leave {action} out."
            )


def actions(training_args: DPTrainingArguments) -> dict[str, str]:
    """Splits that a run uses, and the flags that say so."""
    return {split: action for split, action in ACTIONS.items() if getattr(training_args, action)}


def accumulate(training_args: Any) -> None:
    """The stock Trainer reaches a logical batch by accumulation."""
    if training_args.expected_batch_size is not None:
        physical = training_args.per_device_train_batch_size * training_args.world_size
        training_args.gradient_accumulation_steps = max(1, training_args.expected_batch_size // physical)
