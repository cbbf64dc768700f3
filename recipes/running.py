"""What the recipes do alike: logging, training, model card, the last lines of a run, errors as one line."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sized
from itertools import pairwise
from pathlib import Path
from typing import Any

import transformers
import yaml
from jinja2 import TemplateError
from transformers import Trainer, set_seed

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainerMixin, DPTrainingArguments
from hf_dpopt.common import log
from hf_dpopt.common.disk_faults import find_fault

USAGE_ERROR, INTERRUPTED = 2, 130
# Wall-clock values depend on how many records were drawn. They are shown, not stored.
TIMINGS = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def set_up(training_args: DPTrainingArguments) -> None:
    """Seed what is public, and log one line per event on the main process; the libraries log at --log_level."""
    set_seed(training_args.seed)
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    if training_args.privacy_unit == "user":
        log.hide_rows()
    logging.getLogger("recipes").setLevel(logging.INFO if training_args.should_log else logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)  # the accountant's notes on orders it does not need
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())


def has_private_evaluation(training_args: DPTrainingArguments) -> bool:
    """Whether metrics are released with noise: then nothing else of the evaluation set may be printed."""
    return training_args.eval_data_privacy == "private"


def check_evaluates_exactly(training_args: DPTrainingArguments) -> None:
    """Refuse a private evaluation set where the recipe computes exact metrics of its own.

    Raises:
        DPConfigError: naming the recipe that releases noisy ones.
    """
    if has_private_evaluation(training_args):
        raise DPConfigError(
            "eval_data_privacy='private' is not supported by this recipe, which prints exact metrics. Use "
            "recipes/glue.py or DPTrainer itself, evaluate on public data, or leave out --do_eval."
        )


def train(trainer: Trainer, training_args: DPTrainingArguments) -> None:
    """Training, and what of its numbers may be kept."""
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    users = num_users(trainer)
    size = {"train_samples": len(trainer.train_dataset)} if users is None else {"train_users": users}
    metrics = {**result.metrics, **size}
    trainer.save_model()
    trainer.log_metrics("train", {k: v for k, v in metrics.items() if k != "delta"})  # it would round to 0.0
    hidden = TIMINGS if isinstance(trainer, DPTrainerMixin) else ()
    trainer.save_metrics("train", {k: v for k, v in metrics.items() if k not in hidden})
    trainer.save_state()


def num_users(trainer: Trainer) -> int | None:
    """Number of users, where users are protected: then the number of their records is private."""
    plan = trainer.plan if isinstance(trainer, DPTrainerMixin) else None
    return None if plan is None else plan.num_users


def size_line(trainer: Trainer, records: str) -> tuple[str, str]:
    """Line of a result with the number of records, or of users where that alone is public."""
    users = num_users(trainer)
    return (records, str(len(trainer.train_dataset))) if users is None else ("users", str(users))


def records_of(name: str, dataset: Sized, trainer: Trainer, split: str) -> str:
    """A split in words, with the number of its records where that is public."""
    users = num_users(trainer)
    if split == "train" and users is not None:
        return f"records of {name}, by {users} users"
    return f"{len(dataset)} records of {name}"


def publish(trainer: Trainer, training_args: DPTrainingArguments, **kwargs: Any) -> None:
    """Model card, or push to the hub."""
    if not training_args.do_train:
        return
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(model_name=Path(str(training_args.output_dir)).name, **kwargs)


def is_score(key: str) -> bool:
    """Whether an entry of the evaluation metrics says something about quality."""
    return not any(word in key for word in ("runtime", "per_second", "samples", "epoch", "epsilon", "preparation"))


def privacy_line(trainer: Trainer) -> str:
    if not isinstance(trainer, DPTrainerMixin):
        return "NONE (--non_private): trained with the stock Trainer, epsilon is infinite"
    if trainer.plan is None:
        return "nothing was trained, nothing was spent"
    spent = trainer.privacy_spent()
    return (
        f"epsilon {spent.epsilon:.3f} at delta {spent.delta:g} after {spent.num_steps} steps, unit: {spent.unit}, "
        f"adjacency: {spent.adjacency} (statement: {Path(trainer.args.output_dir) / 'privacy' / 'statement.md'})"
    )


def closing_lines(training_args: DPTrainingArguments, start: float) -> list[tuple[str, str]]:
    """How long it took since `start` (of `time.monotonic`), and where the result is."""
    seconds = time.monotonic() - start
    return [("wall time", f"{seconds:.0f} s"), ("output", str(Path(training_args.output_dir).resolve()))]


def result_text(lines: list[tuple[str, str]]) -> str:
    """The last lines of a run: name and value."""
    return "\n***** Result *****\n" + "\n".join(f"  {name:<15} {value}" for name, value in lines)


def run(argv: list[str], entry: Callable[[list[str]], None]) -> int:
    """Exit status of a run: 0, or with one line on stderr 2 for what the user can fix, and 130 for Ctrl-C."""
    try:
        entry(argv)
    except KeyboardInterrupt:
        said = "What was charged stays charged; hf-dpopt doctor OUTPUT_DIR says how much, and where the run goes on."
        print(f"error: interrupted. {said}", file=sys.stderr)
        return INTERRUPTED
    except (
        DPConfigError, DPBudgetExceeded, ValueError, OSError, TemplateError, yaml.YAMLError, ImportError, RuntimeError
    ) as error:  # fmt: skip
        is_known = not isinstance(error, RuntimeError) or isinstance(error, DPBudgetExceeded)
        if os.environ.get("HF_DPOPT_DEBUG") or not (is_known or "to be installed" in str(error)):  # of --report_to
            raise
        rank = os.environ.get("RANK", "0")
        said = " ".join(_explain(error, argv).split())
        print(f"error{'' if rank == '0' else f' (rank {rank})'}: {said}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _explain(error: Exception, argv: list[str]) -> str:
    """The error; of a disk, with the flag of the folder that it is in, or next to, and the space that is left."""
    if isinstance(error, TemplateError):  # of chats, whose authors refuse some orders of roles
        return (
            f"model_name_or_path: its chat template refuses a conversation ({error}). Change its roles, or the model."
        )
    if "tokenizer.chat_template is not set" in str(error):
        return (
            "model_name_or_path: its tokenizer has no chat template, and the records are messages. Use a chat model, "
            "or records whose columns are strings."
        )
    if isinstance(error, yaml.YAMLError):
        return f"config: the file is not YAML ({error}). Write one `key: value` per line."
    words = " ".join(argv).replace("=", " ").split()
    folders = {flag: Path(value).absolute() for flag, value in pairwise(words) if re.fullmatch("--[a-z_]*_dir", flag)}
    path = Path(getattr(error, "filename", None) or os.devnull).absolute()
    # such as the embedded model, which is kept next to the output
    beside = [f"next to {flag}={at}: " for flag, at in folders.items() if path.parent == at.parent and path != at]
    fault = None if isinstance(error, DPConfigError) else find_fault(error, [*folders.values(), *[path] * len(beside)])
    if fault is None:
        return str(error)
    said = f"{''.join(beside)}{fault.describe(folders)}"
    return f"{said}. Steps that were charged stay charged. {fault.remedy}, or name another folder."
