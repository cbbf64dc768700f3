"""Private evaluations and what becomes of their ledger: lines that are cut, kills, and a folder that is put back."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer
from tests.adversary.forging import records_of
from tests.helpers import tiny

LOG = Path("run/privacy/ledger.jsonl")


class Watched(list):
    """Records that call a function when the first of them is read."""

    def __init__(self, rows: list[Any], tell: Callable[[], None]):
        super().__init__(rows)
        self.tell = tell

    def __getitem__(self, i: Any) -> Any:
        self.tell()
        return super().__getitem__(i)


def trainer(home: Path, tell: Callable[[], None] = lambda: None, **changes: Any) -> DPTrainer:
    held_out = [{**row, "input_ids": [3, *row["input_ids"]]} for row in tiny.records(20)]
    options = dict(eval_data_privacy="private", eval_target_epsilon=4.0, eval_times=4)
    return tiny.trainer(
        home / "run", model=tiny.model(dropout=0.0), private_state_dir=str(home / "keys"),
        eval_dataset=Watched(held_out, tell), **options | changes,
    )  # fmt: skip


def evaluate(home: Path, moved: float) -> float:
    """Evaluate weights that were not evaluated before; return epsilon of all evaluations, as it is told."""
    made = trainer(home)
    with torch.no_grad():
        made.model.classifier.bias.add_(moved)
    return made.evaluate()["eval_epsilon"]


def charges(home: Path) -> int:
    return sum(one["kind"] == "evaluation" for one in records_of(home / "run"))


@pytest.mark.parametrize("last", ["charge", "answer"])
def test_a_line_without_its_newline_was_charged(tmp_path, last):
    """An editor takes the last newline off, or a kill comes before it."""
    told = [evaluate(tmp_path, moved) for moved in (1.0, 2.0)]
    lines = (tmp_path / LOG).read_bytes().splitlines()
    kept = lines if last == "answer" else lines[:-1]
    (tmp_path / LOG).write_bytes(b"\n".join(kept))
    told.append(evaluate(tmp_path, 3.0))
    assert charges(tmp_path) == 3 and told[0] < told[1] < told[2]


def test_half_a_line_was_not_charged(tmp_path):
    evaluate(tmp_path, 1.0)
    whole = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(whole + whole[:50])
    evaluate(tmp_path, 2.0)
    assert charges(tmp_path) == 2


def test_evaluations_that_were_put_back_are_charged(tmp_path):
    """6 answers were given for the price of 2."""
    evaluate(tmp_path, 1.0)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    for moved in (2.0, 3.0):
        evaluate(tmp_path, moved)
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "backup", tmp_path / "run")
    try:
        evaluate(tmp_path, 4.0)
    except (DPBudgetExceeded, DPConfigError):
        return
    assert charges(tmp_path) == 4


def test_kills_in_evaluations_do_not_stop_the_training(tmp_path):
    """As a step that was charged and not released, the evaluation is lost, and training goes on."""
    home, left = tmp_path / "home", tmp_path / "left"
    options = dict(
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=4, eval_times=None,
    )  # fmt: skip

    def kill(killed: int) -> None:
        """A kill between charge and answer leaves what is on the disk now."""
        if (home / LOG).exists() and charges(home) > killed and not left.exists():
            shutil.copytree(home, left)

    for killed in range(2):
        trainer(home, functools.partial(kill, killed), **options).train(resume_from_checkpoint=True)
        shutil.rmtree(home)
        left.rename(home)
    made = trainer(home, **options)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 4 and (home / "run/checkpoint-4").is_dir()
