"""Whoever starts a run again is told how to continue it at no cost, before he is told what costs more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer
from hf_dpopt.cli.app import app
from tests.helpers import tiny


def trainer(root: Path, stop: int = 4, **changes: Any) -> DPTrainer:
    options = dict(
        max_steps=4, save_strategy="steps", save_steps=2, noise_multiplier=None, target_epsilon=3.0,
        logging_strategy="no", callbacks=[tiny.StopAt(stop)], private_state_dir=str(root / "keys"),
    )  # fmt: skip
    return tiny.trainer(root / "out", **options | changes)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stopped")
    trainer(root, 2).train()
    return root


def test_a_second_start_names_the_resume_first(stopped):
    with pytest.raises(DPBudgetExceeded) as refused:
        trainer(stopped).train()
    said = str(refused.value)
    assert said.index("--resume_from_checkpoint True") < said.index("--target_epsilon to accept")
    assert f"hf-dpopt doctor {stopped / 'out'}" in said and "Another dataset needs another output_dir" in said


def test_the_doctor_prints_the_command(stopped):
    shown = CliRunner().invoke(app, ["doctor", str(stopped / "out"), "--private-state-dir", str(stopped / "keys")])
    assert re.search(r"^command +.*--resume_from_checkpoint True", shown.output, re.MULTILINE), shown.output


@pytest.mark.parametrize("num", [40, 80])
def test_another_dataset_is_named_as_such(stopped, num):
    with pytest.raises(DPConfigError, match=f"another dataset, of 64 records or users; this one has {num}"):
        trainer(stopped, train_dataset=tiny.records(num))


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_yes_is_yes_in_any_case(tmp_path, word):
    trainer(tmp_path, 2).train(resume_from_checkpoint="false")
    made = trainer(tmp_path)
    made.train(resume_from_checkpoint=word)
    assert made.state.global_step == 4 and made.privacy_spent().num_steps == 4
