"""Refusals of options by their values alone: types, choices, JSON, and ranges of the options of transformers.

Each option is described once, where it is declared: its annotation says the type and its metadata the choices. Ranges
of our own options are checked where they are used (`hf_dpopt.plan.config` and the stages); those of transformers'
options that decide a step are below, for transformers hands them to torch as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from hf_dpopt.common.checks import check_choice, check_kind, check_mapping, check_real, kinds_of
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.optim.stock_options import pairs_of
from hf_dpopt.plan.options import HeadOptions, RunOptions

OWN = (RunOptions, HeadOptions)
LARGEST = 1e30  # of numbers that torch multiplies in float32
_NOT_NEGATIVE = (0.0, LARGEST, "a finite number >= 0")
_STEPS = (0.0, 1e15, "a finite number >= 0")
_SEED = (0.0, 2.0**32 - 1, "a whole number from 0 to 4294967295")
RANGES: dict[str, tuple[float, float, str]] = {  # option -> smallest, largest, what is allowed
    "per_device_train_batch_size": (1.0, 1e15, "an integer >= 1; it changes memory and speed, never the result"),
    "per_device_eval_batch_size": (1.0, 1e15, "an integer >= 1"),
    "dataloader_num_workers": (0.0, 1e15, "an integer >= 0"),
    "gradient_accumulation_steps": (1.0, 1e15, "an integer >= 1"),
    "learning_rate": (0.0, LARGEST, "a finite number >= 0, such as 1e-3"),
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": (0.0, 1 - 1e-9, "a number in [0, 1), such as 0.9"),
    "adam_beta2": (0.0, 1 - 1e-9, "a number in [0, 1), such as 0.999"),
    "adam_epsilon": _NOT_NEGATIVE,
    "label_smoothing_factor": (0.0, 1.0, "a number in [0, 1]"),
    "max_length": (2.0, 1e15, "an integer >= 2: one token leaves nothing to predict"),  # of TRL's arguments
    "max_grad_norm": (0.0, LARGEST, "a finite number >= 0; 0 is off"),
    "warmup_steps": _STEPS,
    "journal_limit": (0.0, LARGEST, "a finite number of GB >= 0, such as 4; 0 keeps no journal"),
    "logging_steps": _STEPS,
    "save_steps": _STEPS,
    "seed": _SEED,
    "data_seed": _SEED,
}
FILES = ("accelerator_config", "fsdp_config")  # may be named in place of JSON
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}  # to a schedule, by transformers
_JSON = ("lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_values(args: TrainingArguments) -> None:
    """Refuse values of the wrong type or out of range, and unknown choices."""
    check_types(args)
    for name in _JSON:
        check_mapping(name, getattr(args, name) or {}, '{"name": 1}')
    for group in OWN:
        for field in dataclasses.fields(group):
            value = getattr(args, field.name, field.default)
            if "choices" in field.metadata and value is not None:
                check_choice(field.name, value, field.metadata["choices"])
    for name, (smallest, largest, allowed) in RANGES.items():
        if (value := getattr(args, name, None)) is not None:
            check_real(name, value, allowed)
            if not smallest <= value <= largest:
                raise DPConfigError(f"{name}={shown(value)} is out of range. Use {allowed}.")
    pairs_of(args.optim_args)  # what they say is for the optimizer to read
    make_schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(args.lr_scheduler_type)]
    schedule, given = inspect.signature(make_schedule).parameters, args.lr_scheduler_kwargs
    if isinstance(given, Mapping) and "kwargs" not in schedule:  # which takes any
        _check_keys("lr_scheduler_kwargs", given, [*schedule.keys() - GIVEN])
    for name in [args.report_to] if isinstance(args.report_to, str) else args.report_to or []:
        check_choice("report_to", name, [*INTEGRATION_TO_CALLBACK, "all", "none"])
    _check_length(args)


def _check_length(args: Any) -> None:
    """Refuse lengths that are none: no steps, or epochs that are no number."""
    if args.max_steps == 0:
        raise DPConfigError("max_steps=0 takes no step. Use an integer >= 1, or -1 and num_train_epochs.")
    if args.max_steps < 0:
        check_real("num_train_epochs", args.num_train_epochs, "a finite number > 0, such as 3")
        if args.num_train_epochs <= 0:
            raise DPConfigError(f"num_train_epochs={args.num_train_epochs} takes no step. Use a number > 0.")


def check_types(args: TrainingArguments) -> None:
    """Refuse values that are not of their option's type; may be called before transformers has looked at them."""
    for group in OWN:
        for name, hint in _hints(group).items():
            if hasattr(args, name) and not (name == "max_grad_norm" and args.max_grad_norm is None):
                check_kind(name, getattr(args, name), hint)
    is_seq2seq = isinstance(args, Seq2SeqTrainingArguments)
    for name, hint in _hints(Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments).items():
        kinds, value = kinds_of(hint), getattr(args, name)
        if kinds is None or name == "max_grad_norm":
            continue
        if {bool} == set(kinds) - {type(None)}:
            kinds = (bool, int, type(None))  # transformers takes 0 and 1
        if set(kinds) <= {bool, int, float, type(None)} or name in ("optim_args", "output_dir"):
            check_kind(name, value, typing.Union[kinds])  # noqa: UP007  # of a tuple


def check_json(args: Any) -> None:
    """Refuse texts of options that take JSON on a command line, and hold none; before transformers reads them."""
    _check_padding(args)
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str):
            value = check_mapping(name, _read_json(name, value), '{"name": 1}')
        if name == "accelerator_config" and isinstance(value, Mapping):
            _check_keys(name, value, [field.name for field in dataclasses.fields(AcceleratorConfig)])


def _read_json(name: str, text: str) -> Any:
    """Read a text as JSON, or the file that it names; return the text itself where it is neither."""
    if name in FILES and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    elif not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "too many brackets" if isinstance(error, RecursionError) else error
        raise DPConfigError(
            f"{name}={shown(text)} is not JSON ({why}). Use double quotes, and single ones around all for the shell: "
            f"--{name} '{{\"name\": 1}}'."
        ) from None


def _check_keys(name: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keys of an option that nothing reads."""
    if unknown := sorted(given.keys() - {*known}):
        allowed = ", ".join(sorted(known)) or "none: leave it out"
        raise DPConfigError(f"{name}={shown(given)}: {unknown[0]!r} is no key of it. Its keys: {allowed}.")


def _check_padding(args: Any) -> None:
    """Refuse what TRL, which takes texts too, would read as no number, or a collator could not pad to."""
    value = str(getattr(args, "pad_to_multiple_of", None)).lower()
    if value not in ("none", "null", "auto") and not (value.isdecimal() and int(value)):
        raise DPConfigError(f"pad_to_multiple_of={shown(args.pad_to_multiple_of)}: must be an integer >= 1. Use 8.")
