"""Datasets and budgets with which there is nothing to protect, or nothing protects; and the names that errors use."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError
from hf_dpopt.cli.app import app
from tests.helpers import tiny

BUDGET = {"noise_multiplier": None, "advisor": "none", "target_delta": None}


def read(folder: Path, name: str = "statement.md") -> str:
    return " ".join((folder / "privacy" / name).read_text().split())


# --- one record ---


@pytest.mark.parametrize(
    "options",
    [
        {"train_dataset": tiny.records(1)},
        {
            "train_dataset": [row | {"author": "she"} for row in tiny.records(8)], "privacy_unit": "user",
            "user_id_column": "author", "records_per_user": 2,
        },
    ],
)  # fmt: skip
@pytest.mark.parametrize("epsilon", [8.0, None])
def test_one_record_or_user_is_refused(options: dict[str, Any], epsilon: float | None, tmp_path: Path) -> None:
    asked = {**BUDGET, "target_epsilon": epsilon, "noise_multiplier": None if epsilon else 1.0}
    with pytest.raises(
        DPConfigError,
        match="The dataset has one record: .* hundreds of|there would be one user and nothing to hide in",
    ):
        tiny.trainer(tmp_path / "out", **options, **asked, expected_batch_size=1)
    assert not (tmp_path / "out" / "privacy").exists()


def test_the_command_line_refuses_one_record() -> None:
    said = CliRunner().invoke(app, ["plan", "-n", "1", "--batch", "1", "--epochs", "3", "--epsilon", "8"])
    assert said.exit_code and "The dataset has one record" in str(said.exception)


# --- budgets that do not protect ---


@pytest.mark.parametrize(
    "asked", [{"target_epsilon": 1e6, **BUDGET}, {"target_epsilon": None, "noise_multiplier": 0.1}]
)
def test_a_budget_that_does_not_protect_is_named_first(asked: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "hf_dpopt"):
        trainer = tiny.trainer(tmp_path / "out", **asked)
        before = len(caplog.messages)
        trainer.train()
        trainer.save_model()
        trainer.create_model_card()
    said = [line for line in caplog.messages[before:] if "self-check" not in line]
    assert said[0].startswith("NO PROTECTION: Epsilon ") and "factor of 10^" in said[0]
    if asked["target_epsilon"] is not None:
        assert "6 steps are too few" in " ".join(said) and "is noise" not in " ".join(said)
    assert read(tmp_path / "out").startswith("**NO PROTECTION:** Epsilon ")
    assert "gives no protection" in (tmp_path / "out" / "README.md").read_text()
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "out")]).exit_code in (0, 3), "no accountant goes so far"


def test_the_command_line_warns_of_a_budget_that_does_not_protect() -> None:
    asked = ["plan", "-n", "1000", "--batch", "100", "--epochs", "3", "--epsilon"]
    said = CliRunner().invoke(app, [*asked, "1000"])
    assert "hf-dpopt: warning: Epsilon 1000 gives no protection" in said.output.replace("\n", " ")
    assert "no protection" not in CliRunner().invoke(app, [*asked, "8"]).output


def test_a_usual_budget_is_not_warned_of(tmp_path: Path, caplog: Any) -> None:
    tiny.trainer(tmp_path / "out", **BUDGET | {"target_epsilon": 8.0}).train()
    assert "PROTECTION" not in " ".join(caplog.messages) + read(tmp_path / "out")


# --- the statement of a run that is under way ---


@pytest.mark.parametrize("steps", [None, 2])
def test_a_statement_says_how_far_the_run_has_come(steps: int | None, tmp_path: Path) -> None:
    seen: list[str] = []  # when training begins
    look = tiny.At("train_begin", lambda state, model: seen.append(read(tmp_path / "out")))
    tiny.trainer(tmp_path / "out", callbacks=[look, tiny.StopAt(steps or 6)]).train()
    (before,) = seen
    assert "No step of this run was charged so far, and nothing was released." in before
    assert "was trained with differential privacy" not in before
    after = read(tmp_path / "out")
    assert ("2 of the 6 steps of this run were charged so far." in after) == (steps == 2)
    assert ("This model was trained with differential privacy" in after) == (steps is None)
    assert re.search(r"\*\*epsilon = \S+, delta = 0.001\*\*", before)


# --- the batch that was given ---


@pytest.mark.parametrize(
    "given, named",
    [
        ({"per_device_train_batch_size": 9999}, "per_device_train_batch_size=9999: "),
        (
            {"per_device_train_batch_size": 25, "gradient_accumulation_steps": 4},
            "per_device_train_batch_size=25 x gradient_accumulation_steps=4: ",
        ),
        ({"per_device_train_batch_size": 4, "expected_batch_size": 65}, "expected_batch_size=65: "),
    ],
)
@pytest.mark.parametrize("sampling", ["auto", "cyclic_poisson", "fixed_order"])
def test_a_batch_beyond_the_dataset_is_named_as_it_was_given(
    given: dict[str, Any], named: str, sampling: str, tmp_path: Path
) -> None:
    options = {"expected_batch_size": None, "sampling": sampling, **given}
    with pytest.raises(DPConfigError) as refused:
        tiny.trainer(tmp_path / "out", **options)
    assert str(refused.value).startswith(named) and "64 records" in str(refused.value)
    assert "expected_batch_size" in named or "expected_batch_size" not in str(refused.value)
