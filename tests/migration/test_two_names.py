"""docs/migrate.md, done: a stock script becomes private by the two changed names and one flag, and runs to its end."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

STOCK = "from transformers import Trainer, TrainingArguments\n"
PRIVATE = "from hf_dpopt import DPTrainer as Trainer, DPTrainingArguments as TrainingArguments\n"


def _run(argv: list[str], *, private: bool):
    source = (Path(__file__).parent / "glue_style.py").read_text()
    assert source.count(STOCK) == 1, "the formatter must leave the line of the names alone"
    module = types.ModuleType(f"migration_glue_style_{private}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(STOCK, PRIVATE) if private else source, "glue_style.py", "exec"), module.__dict__)
    return module.main(argv)


@pytest.mark.slow
def test_a_stock_script_runs_after_the_two_name_change(tmp_path):
    common = [
        "--do_train", "--do_eval", "--use_cpu", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4",
        "--num_train_epochs", "1.5", "--logging_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3",
        "--save_steps", "3", "--report_to", "none", "--disable_tqdm", "true", "--remove_unused_columns", "false",
    ]  # fmt: skip
    stock = _run([*common, "--output_dir", str(tmp_path / "stock")], private=False)
    budget = ["--target_epsilon", "8", "--advisor", "none"]  # the same learning rates
    private = _run([*common, "--output_dir", str(tmp_path / "out"), *budget], private=True)
    assert type(private.model) is type(stock.model)
    assert private.state.global_step == stock.state.global_step == 6
    rates = [
        [line["learning_rate"] for line in t.state.log_history if "learning_rate" in line] for t in (stock, private)
    ]
    assert rates[0] == rates[1]
    steps = [[line["step"] for line in t.state.log_history if "eval_loss" in line] for t in (stock, private)]
    assert steps[0] == steps[1]
    out = tmp_path / "out"
    same = {"model.safetensors", "config.json", "training_args.bin", "README.md", "trainer_state.json", "checkpoint-3"}
    assert same <= {p.name for p in (tmp_path / "stock").iterdir()} & {p.name for p in out.iterdir()}
    assert (out / "privacy/statement.md").exists()
    assert (
        "epsilon" in (out / "README.md").read_text().lower()
        and "train_loss" not in (out / "trainer_state.json").read_text()
    )
    if (out / "train_results.json").exists():
        assert "train_loss" not in json.loads((out / "train_results.json").read_text())
    assert private.privacy_spent().epsilon <= 8
