#!/usr/bin/env python
"""Finetune a chat model with differential privacy: TRL's `sft.py` with the two names changed.

The flags are those of TRL's `SFTConfig` and `ModelConfig` and of `DPTrainingArguments`; `--config run.yaml` reads them
from a file.

    python recipes/sft.py                    # no arguments: SmolLM2-135M-Instruct learns from Python's documentation
    accelerate launch recipes/sft.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
        --train_file chats.jsonl --validation_file held_out.jsonl --target_epsilon 8 \
        --use_peft --lora_r 8 --lora_target_modules all-linear --output_dir private-chat

A record is one line of a file of JSON lines: `messages`, or `prompt` and `completion`, or `text`. To protect people
who have several lines: `--privacy_unit user --user_id_column person`. The answers to the first held-out questions are
printed before and after training.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes import flags, processes

    flags.refuse_unknown(sys.argv[1:])  # before the imports below, which take seconds
    processes.start_requested(sys.argv[1:])

    if importlib.util.find_spec("trl") is None:
        sys.exit("error: recipes/sft.py needs the package trl. Run: pip install 'hf-dpopt[chat]'")

import yaml
from accelerate.utils import broadcast_object_list
from datasets import Dataset, Features, Json
from transformers import AutoConfig, GenerationConfig

from hf_dpopt import DPConfigError, DPSFTConfig, DPSFTTrainer
from hf_dpopt.huggingface.arguments import check_no_statement
from hf_dpopt.huggingface.refusals.training_arguments import check_arguments
from recipes import flags, hub, models, options, running
from recipes.embedded.chats import build_smollm2, read_chats
from recipes.tables import TEXT_EXTENSIONS, columns_in, read_table

from trl import ModelConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config  # isort: skip

EMBEDDED = {
    "target_epsilon": 8.0, "num_train_epochs": 1.0, "per_device_train_batch_size": 16, "max_length": 128,
    "per_device_eval_batch_size": 32, "max_eval_samples": 128, "save_strategy": "no",
    "eval_data_privacy": "public", "output_dir": "sft",
    "use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear", "completion_only_loss": True,
    "data_dependent_preprocessing": "none: public model and chat template",
}  # fmt: skip
LAYOUTS = (("messages",), ("prompt", "completion"), ("text",))
STRING, MESSAGES = "a string that is not empty", "a list of messages with `role` and `content`"
KINDS = {"messages": (list, MESSAGES), "text": (str, STRING)}  # all rows of another column are as its first is
SHOWN, NEW_TOKENS = 3, 48


@dataclass
class DataArguments:
    """Which conversations."""

    train_file: str | None = options.flag(None, "jsonl, json, csv or parquet; one record a row.")
    validation_file: str | None = options.flag(None, "The same, held out; for loss and answers.")
    max_train_samples: int | None = options.flag(None, "Use the first N records only.")
    max_eval_samples: int | None = options.flag(None, "The same for the held-out records.")
    non_private: bool = options.flag(False, "Train with the stock SFTTrainer, without privacy.")


def main(argv: list[str]) -> None:
    """The whole run."""
    start = time.monotonic()
    data_args, training_args, model_args, is_embedded = parse(argv)
    running.set_up(training_args)
    running.check_evaluates_exactly(training_args)
    rows = load_rows(data_args, embedded_rows() if is_embedded else None)
    set_model(training_args, model_args, is_embedded)
    trainer_class = SFTTrainer if data_args.non_private else DPSFTTrainer
    trainer = make_trainer(trainer_class, training_args, model_args, rows)
    lines = [("model", str(model_args.model_name_or_path)), running.size_line(trainer, "records")]
    if rows["validation"]:
        questions = [prompt_of(row) for row in rows["validation"][:SHOWN]]
        before = answer(trainer, questions), trainer.evaluate()["eval_loss"]
    running.train(trainer, training_args)
    if rows["validation"]:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        after = answer(trainer, questions), metrics["eval_loss"]
        lines.append(("held-out loss", f"{before[1]:.3f} before, {after[1]:.3f} after"))
    running.publish(trainer, training_args)
    if trainer.is_world_process_zero():
        if rows["validation"]:
            for question, old, new in zip(questions, before[0], after[0], strict=True):
                print(f"\n  asked   {shown(question)}\n  before  {old}\n  after   {new}")
        lines.append(("privacy", running.privacy_line(trainer)))
        print(running.result_text(lines + running.closing_lines(training_args, start)))


class Parser(TrlParser):
    error = options.Parser.error


def parse(
    argv: list[str],
    data: type = DataArguments,
    config: type = DPSFTConfig,
    embedded: Mapping[str, Any] = EMBEDDED,
    name: str = "sft",
) -> tuple[Any, Any, ModelConfig, bool]:
    """Arguments of data, training and model; and whether this is the embedded job (no model and no file named).

    Args:
        data, config: classes of the first two.
        embedded: defaults of the embedded job.
        name: of the folder that results go to.

    Raises:
        DPConfigError: for a flag that there is not, or a value out of range.
    """
    # TRL reads `--config file`, not `--config=file`; with dashes a flag is the same one
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    is_embedded = not given & {"config", "model_name_or_path", "train_file"}
    defaults: dict[str, Any] = {}
    if is_embedded:
        defaults = {**embedded} | ({"target_epsilon": None, "learning_rate": 2e-4} if "non_private" in given else {})
    elif "config" not in given:
        defaults = {"output_dir": options.RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"}
    given |= set(read_config(dict(pairwise(argv)).get("--config")))
    words = [word for name, value in defaults.items() if value is not None for word in (f"--{name}", str(value))]
    parser = Parser((data, config, ModelConfig), allow_abbrev=False)
    data_args, training_args, model_args, unknown = parser.parse_args_and_config(
        [*words, *argv], return_remaining_strings=True
    )
    if unknown:
        known = {flag for action in parser._actions for flag in action.option_strings}
        raise flags.unknown_flag([word for word in unknown if word.startswith("-")] or unknown[:1], known)
    if not is_embedded and (data_args.train_file is None or model_args.model_name_or_path is None):
        missing = "train_file" if data_args.train_file is None else "model_name_or_path"
        raise DPConfigError(f"{missing}: missing. Name a model and a training file, or neither for the embedded job.")
    for name in sorted(given - {"lora_task_type"}):
        if name.startswith(("lora_", "use_dora", "use_rslora")) and (value := getattr(model_args, name)):
            options.check_lora(name, value, "use_peft", is_on=model_args.use_peft)
    options.check_counts(data_args)
    options.check_counts(model_args, ("lora_r", "lora_alpha"))
    if data_args.non_private:
        check_no_statement(training_args.output_dir)
    else:  # wrong values end here, not after loading
        if not is_embedded:
            options.check_cut(data_args.max_train_samples, training_args)
        training_args.privacy_config(training_args.expected_batch_size or 1)
        check_arguments(training_args)
    if "output_dir" not in given:  # the clocks of several processes differ
        training_args.output_dir = broadcast_object_list([training_args.output_dir])[0]
    training_args.do_train = True  # asked for or not; `running.publish` writes the card of what was trained
    return data_args, training_args, model_args, is_embedded


def read_config(path: str | None) -> dict[str, Any]:
    """Flags of a YAML file; none without a file.

    Raises:
        DPConfigError: if there is no such file, or it holds no flags.
    """
    if path is None:
        return {}
    if not Path(path).is_file():
        raise DPConfigError(f"config={path}: there is no such file. Name a YAML file of flags.")
    found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise DPConfigError(f"config={path}: the file has no flags. Write one `key: value` per line.")
    return found


def set_model(training_args: Any, model_args: ModelConfig, is_embedded: bool) -> None:
    """Unpack the embedded model, and set how a model is loaded.

    Raises:
        DPConfigError: if there is no such model.
    """
    if is_embedded:
        with training_args.main_process_first(desc="unpacking the model"):
            folder = Path(training_args.output_dir).absolute().parent / "smollm2-135m-instruct"
            model_args.model_name_or_path = str(build_smollm2(folder))
    hub.load(
        f"The configuration of {model_args.model_name_or_path!r}", AutoConfig.from_pretrained,
        model_args.model_name_or_path, fix=models.FIX, revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )  # fmt: skip
    training_args.model_init_kwargs = (training_args.model_init_kwargs or {}) | {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        # float32: half-precision weights lose the small updates of private training
        "dtype": "float32" if model_args.dtype in (None, "auto") else model_args.dtype,
    }


def load_rows(
    data_args: DataArguments,
    embedded: Mapping[str, list[dict[str, Any]]] | None,
    layouts: Sequence[tuple[str, ...]] = LAYOUTS,
) -> dict[str, list[dict[str, Any]]]:
    """Split -> rows; "validation" may be empty.

    Args:
        embedded: the same of the embedded job, which reads no file.
        layouts: columns of a record, as `read_rows` takes them.

    Raises:
        DPConfigError: if a file cannot be read.
    """
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    rows = embedded or {
        split: read_rows(path, layouts, f"{split}_file") if path else [] for split, path in files.items()
    }
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    return {split: found[: limits[split]] for split, found in rows.items()}


def make_trainer(
    trainer_class: Any, training_args: Any, model_args: ModelConfig, rows: Mapping[str, list[dict[str, Any]]]
) -> Any:
    """A trainer of the model, with the adapter that the flags ask for.

    Args:
        rows: training records, and held-out ones if there are any.
    """
    datasets = {split: dataset_of(found) for split, found in rows.items() if found}
    return trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=datasets["train"],
        eval_dataset=datasets.get("validation"),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def dataset_of(rows: list[dict[str, Any]]) -> Dataset:
    """Rows as a dataset, with what is nested as JSON.

    With a type that fits all rows, one record of other `tool_calls` would change the text of all others: a key that
    only it has is a null there, 2 becomes 2.0, and keys have its order.
    """
    features = Dataset.from_list(rows, on_mixed_types="use_json").features
    nested = {name for row in rows for name, value in row.items() if isinstance(value, list | dict)}
    return Dataset.from_list(rows, features=Features(features | dict.fromkeys(nested, Json())))


def read_rows(
    path: str, layouts: Sequence[tuple[str, ...]] = LAYOUTS, option: str | None = None
) -> list[dict[str, Any]]:
    """Rows of a file, all with the same columns.

    Args:
        layouts: columns of a record; the first of which a file has all is taken.
        option: what named the file, for messages.

    Raises:
        DPConfigError: if it cannot be read; naming the first row that is not a record of one of the layouts.
    """
    table = read_table(path, kinds=TEXT_EXTENSIONS, option=option)
    layout = next((layout for layout in layouts if set(layout) <= set(table.columns)), None)
    if layout is None:
        raise DPConfigError(
            f"{table.name} has the columns {columns_in(table)}. Needed are "
            f"{', or '.join(' and '.join(f'`{column}`' for column in columns) for columns in layouts)}: rename them."
        )
    rows = [dict(zip(table.columns, values, strict=True)) for values in zip(*table.columns.values(), strict=True)]
    either = type(rows[0][layout[0]]), f"{STRING}, or {MESSAGES}, and of one kind in all rows"
    kind, needed = KINDS.get(layout[0], either)
    for i, row in enumerate(rows):
        for column in layout:
            if type(row[column]) is not kind or not _is_filled(row[column]):
                raise DPConfigError(
                    f"{table.where(i)}: {column!r} must be {needed}. Correct the row, or leave it out."
                )
            if kind is list:  # a message that only calls tools may have no content
                row[column] = [{**message, "content": message.get("content") or ""} for message in row[column]]
    return rows


def _is_filled(value: Any) -> bool:
    """Whether a value is a prompt, an answer or a conversation."""
    if isinstance(value, list):
        return bool(value) and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and (isinstance(message.get("content"), str) or bool(message.get("tool_calls")))
            for message in value
        )
    return isinstance(value, str) and bool(value.strip())


def embedded_rows() -> dict[str, list[dict[str, Any]]]:
    """Split -> embedded conversations."""
    return {split: [as_pair(row) for row in found] for split, found in read_chats().items()}


def as_pair(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation as a prompt with its last answer; only that is learned, with any chat template."""
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def prompt_of(row: dict[str, Any]) -> Any:
    """What the model is asked: the messages before the last one, if there are any, or the prompt."""
    if "messages" in row:
        return row["messages"][:-1] or row["messages"]
    return row["prompt"] if "prompt" in row else " ".join(row["text"].split()[:8])


def shown(prompt: Any) -> str:
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def answer(trainer: Any, prompts: list[Any]) -> list[str]:
    """Greedy answers, on one line each."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    greedy = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    was_training = model.training
    model.eval()
    found = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=False
        )  # fmt: skip
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
        out = model.generate(**inputs, generation_config=greedy)[0, inputs["input_ids"].shape[1] :]
        found.append(" ".join(tokenizer.decode(out, skip_special_tokens=True).split()))
    model.train(was_training)
    return found


run = functools.partial(running.run, entry=main)  # of a list of flags


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
