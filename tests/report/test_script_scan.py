"""What a script prints about training records is found by its lines, told at the start and repeated in the statement."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from hf_dpopt.report.script_scan import printed_rows
from tests import tiny

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

TELLS = [
    'logger.info(f"Sample {index} of the training set: {train_dataset[index]}.")',
    "print(train_dataset[0])",
    'print(raw_datasets["train"][0]["text"])',
    'logging.getLogger(__name__).warning("first: %s", train_data[0])',
    'print("label", str(dataset["train"][3]["label"]))',
    'counts = Counter(dataset["label"])\nfor label, count in counts.items():\n    logger.info(f"{label}: {count}")',
    'counts = Counter(train_dataset["label"])\nprint(counts)',
    'self.log({"first": tokenized_train_dataset[0]})',
]
SILENT = [
    'logger.info(f"Training on {len(train_dataset)} records")',
    'print(raw_datasets["train"].features, raw_datasets["train"].column_names)',
    'print(eval_dataset[0], raw_datasets["validation"][0])',
    'print(len(raw_datasets["train"][0]))',
    'x = train_dataset[0]\nlogger.info("ready")',
    "counts = Counter(words)\nprint(counts)",
    'print(metrics["train"][0])',
    "print(train_dataset)",
]


@pytest.mark.parametrize("source", TELLS)
def test_lines_that_print_records(source):
    assert printed_rows(source) == [source.count("\n") + 1]


@pytest.mark.parametrize("source", SILENT)
def test_lines_that_do_not(source):
    assert printed_rows(source) == []


def test_a_silent_logger_prints_nothing():
    source = "logger.info(train_dataset[0])\nprint(train_dataset[0])\nlogger.warning(train_dataset[0])\n"
    assert printed_rows(source) == [1, 2, 3]
    assert printed_rows(source, frozenset({"debug", "info"})) == [2, 3]


def test_our_own_recipes_print_no_records():
    assert not [path.name for path in RECIPES.glob("*.py") if printed_rows(path.read_text(encoding="utf-8"))]


def _as_main(monkeypatch, path: Path) -> None:
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", module)


def test_the_trainer_warns_and_the_statement_repeats_it(tmp_path, monkeypatch, caplog):
    script = tmp_path / "train.py"
    script.write_text("import x\n\nprint(f'{train_dataset[0]}')\n")
    _as_main(monkeypatch, script)
    trainer = tiny.trainer(tmp_path / "out", max_steps=1, private_state_dir=str(tmp_path / "keys"))
    assert "train.py, line 3: print(f'{train_dataset[0]}')" in caplog.text
    trainer.train()
    statement = (tmp_path / "out" / "privacy" / "statement.md").read_text()
    not_covered = statement.split("## What is not covered")[1].split("##")[0]
    assert "the script itself prints or logs about training records" in not_covered
    assert "train.py, line 3: print(f'{train_dataset[0]}')" in not_covered


@pytest.mark.parametrize("source", ["print(train_dataset", "\0", "print('{')"])
def test_scripts_that_cannot_be_read_or_print_nothing_stop_nobody(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "train.py").write_text(source)
    _as_main(monkeypatch, tmp_path / "train.py")
    assert tiny.trainer(tmp_path / "out").printed_rows == ()
    _as_main(monkeypatch, tmp_path / "not_there.py")
    assert tiny.trainer(tmp_path / "out").printed_rows == () and "prints training records" not in caplog.text
