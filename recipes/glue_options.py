"""Command line of `recipes/glue.py`: the flags of run_glue.py, LoRA, and what an absent flag means."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser

from hf_dpopt import DPConfigError, DPTrainingArguments
from hf_dpopt.refusals import check_arguments
from recipes.glue_data import GLUE_LABELS

SOURCES = ("model_name_or_path", "task_name", "dataset_name", "train_file", "validation_file", "test_file")
ACTIONS = ("do_train", "do_eval", "do_predict")
RUNS = Path("runs")

# The embedded job: some twenty seconds of reading, building and evaluating, the rest is training.
EMBEDDED: dict[str, Any] = {
    "target_epsilon": 8.0,
    "target_delta": 1e-5,
    "clipping_norm": 10.0,
    "expected_batch_size": 1024,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 256,
    "max_steps": 120,
    "learning_rate": 3e-3,
    "max_seq_length": 40,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "logging_steps": 25,
    "save_strategy": "no",
    "eval_data_privacy": "public",
    "data_dependent_preprocessing": "none: the labels are declared, and the tokenizer comes from public text",
}


@dataclass
class ModelArguments:
    """Which model, and how much of it is trained."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder of a model, or its name on the hub. Absent: the small embedded RoBERTa."},
    )
    config_name: str | None = field(default=None, metadata={"help": "Configuration, if not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where to keep what is fetched from the hub."})
    use_fast_tokenizer: bool = field(default=True, metadata={"help": "Use the tokenizers library where possible."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the hub."})
    token: str | None = field(
        default=None, metadata={"help": "Access token for the hub; default: that of `hf auth login`."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model of the hub."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager or sdpa; on a CPU in bf16, eager is much faster for short texts."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Load a model whose head has another number of labels; the head starts anew."}
    )
    dropout: float = field(
        default=0.0,
        metadata={"help": "Every dropout rate of the model; 0 suits private training, -1 keeps the model's own."},
    )
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA; 0 trains all parameters."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of LoRA; default: twice the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout inside LoRA."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Layers that get LoRA, e.g. query value; default: peft's choice for the model."},
    )


@dataclass
class DataTrainingArguments:
    """Which data, and how it is read."""

    task_name: str | None = field(default=None, metadata={"help": f"GLUE task: {', '.join(sorted(GLUE_LABELS))}."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are cut to so many tokens."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again instead of using the cache."})
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Pad everything to max_seq_length (as run_glue.py does) instead of to the batch."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first so many training records."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Only the first so many evaluation records."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Only the first so many test records."})
    train_file: str | None = field(default=None, metadata={"help": "csv, tsv, json or jsonl, each optionally .gz."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, for evaluation."})
    test_file: str | None = field(default=None, metadata={"help": "The same, for prediction; labels are not used."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the text, if it is not recognised."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of the second text of a pair."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the label, if it is not recognised."})
    label_list: str | None = field(
        default=None, metadata={"help": "All labels, public, in the order of their ids: negative,positive."}
    )
    non_private: bool = field(
        default=False,
        metadata={"help": "NO PRIVACY: the stock Trainer with the same data and batch, to compare with."},
    )

    @property
    def embedded(self) -> bool:
        """Whether the text comes from the Python installation."""
        return not (self.task_name or self.dataset_name or self.train_file or self.validation_file or self.test_file)


def parse(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, DPTrainingArguments]:
    """Reads flags, or one .json file with their values, and fills in what is absent.

    Without a model and data the embedded job's settings are the defaults. Without do_train, do_eval, do_predict there
    is training, and evaluation if there is something to evaluate on. Without output_dir a folder in `runs` is made.

    Raises:
        DPConfigError: for values that are wrong or do not fit together.
    """
    parser = _Parser((ModelArguments, DataTrainingArguments, DPTrainingArguments), allow_abbrev=False)
    from_file = _json_flags(Path(argv[0])) if len(argv) == 1 and argv[0].endswith(".json") else None
    flags = {a.split("=")[0].lstrip("-").replace("-", "_") for a in argv if a.startswith("--")}
    given = flags if from_file is None else set(from_file)
    embedded = not given & set(SOURCES)
    defaults = dict(EMBEDDED) if embedded else {}
    if "noise_multiplier" in given:
        defaults.pop("target_epsilon", None)
    defaults["output_dir"] = _new_run_folder("embedded" if embedded else "glue")
    if from_file is None:
        parser.set_defaults(**defaults)
        model_args, data_args, training_args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    else:
        model_args, data_args, training_args = parser.parse_dict({**defaults, **from_file})
    if not given & set(ACTIONS):
        training_args.do_train = True
        training_args.do_eval = embedded or not data_args.train_file or bool(data_args.validation_file)
    if "output_dir" not in given:  # the clocks of several processes differ
        training_args.output_dir = broadcast_object_list([training_args.output_dir])[0]
    _check(model_args, data_args, training_args, embedded)
    return model_args, data_args, training_args


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse prints 200 flags before it says what is wrong
        raise DPConfigError(f"{message}. --help lists all flags.")


def _json_flags(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DPConfigError(
            f'{path} cannot be read as a file of arguments: {error}. Write {{"task_name": ...}}.'
        ) from None
    if not isinstance(values, dict):
        raise DPConfigError(f'{path} holds a {type(values).__name__}. Write one object: {{"task_name": "sst2", ...}}.')
    return values


def _new_run_folder(name: str) -> str:
    return str(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _check(model_args: Any, data_args: Any, training_args: Any, embedded: bool) -> None:
    """What can be told to be wrong before a file is opened."""
    if data_args.task_name is not None:
        data_args.task_name = data_args.task_name.lower().replace("-", "")
        if data_args.task_name not in GLUE_LABELS:
            raise DPConfigError(
                f"task_name={data_args.task_name!r} is unknown. Use one of: {', '.join(sorted(GLUE_LABELS))}."
            )
    if not embedded and model_args.model_name_or_path is None:
        raise DPConfigError("Data is given but no model. Add --model_name_or_path <folder or name on the hub>.")
    name = model_args.model_name_or_path or ""
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise DPConfigError(
            f"model_name_or_path={name!r} is not a folder. Name a model's folder, or a model on the hub."
        )
    if not embedded and data_args.embedded:
        raise DPConfigError(
            "A model is given but no data. Add --task_name <GLUE task>, --dataset_name <name on the hub>, or "
            "--train_file and --validation_file; without any of these and without a model the embedded job runs."
        )
    _check_files(data_args, training_args)
    for name in ("max_train_samples", "max_eval_samples", "max_predict_samples", "max_seq_length"):
        value = getattr(data_args, name)
        if value is not None and value < 1:
            raise DPConfigError(f"{name}={value} is not a positive count. Use 1 or more, or leave it out.")
    if model_args.lora_r < 0:
        raise DPConfigError(f"lora_r={model_args.lora_r} is negative. Use 4 to 64, or 0 to train all parameters.")
    if model_args.dropout > 1 or model_args.dropout != model_args.dropout:
        raise DPConfigError(f"dropout={model_args.dropout} is not a rate. Use 0 to 1, or -1 to keep the model's own.")
    if data_args.non_private:
        if (Path(training_args.output_dir) / "privacy").exists():
            raise DPConfigError(
                f"{training_args.output_dir} holds the privacy statement of another run, which would stand beside a "
                "model trained without privacy. Choose another --output_dir."
            )
        _accumulate(training_args)
    elif training_args.do_train:
        # wrong values end here, not after loading
        training_args.privacy_config(training_args.expected_batch_size or 1)
        check_arguments(training_args)


def _check_files(data_args: Any, training_args: Any) -> None:
    files = (data_args.train_file, data_args.validation_file, data_args.test_file)
    if data_args.dataset_name is not None and any(files):
        raise DPConfigError("Both dataset_name and files are given. Keep one of them.")
    if data_args.dataset_name is None and not any(files):
        return
    needed = (
        ("train_file", training_args.do_train, "do_train"),
        ("validation_file", training_args.do_eval, "do_eval (or eval_strategy)"),
        ("test_file", training_args.do_predict, "do_predict"),
    )
    for name, wanted, why in needed:
        if any(files) and wanted and not getattr(data_args, name):
            raise DPConfigError(
                f"{why} is set but there is no {name}. Add --{name} <file>, or leave {why.split()[0]} out."
            )


def _accumulate(training_args: Any) -> None:
    """The stock Trainer reaches a logical batch by accumulation."""
    if training_args.expected_batch_size is not None:
        physical = training_args.per_device_train_batch_size * training_args.world_size
        training_args.gradient_accumulation_steps = max(1, training_args.expected_batch_size // physical)
