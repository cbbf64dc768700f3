"""Links that somebody puts into `output_dir` while something is written there: they lead to no other file."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from hf_dpopt import DPConfigError
from hf_dpopt.accounting.best_of_runs import RunCount
from tests.helpers import tiny
from tests.tuning.in_process import tune


def _victim(root: Path) -> Path:
    (root / "victim/checkpoint-2").mkdir(parents=True)
    (root / "victim/checkpoint-2/file").write_text("of somebody else")
    (root / "victim/model.safetensors").write_text("of somebody else")
    return root / "victim"


def _check(victim: Path) -> None:
    found = {str(path.relative_to(victim)): path.read_text() for path in victim.rglob("*") if path.is_file()}
    assert found == dict.fromkeys(["checkpoint-2/file", "model.safetensors"], "of somebody else")


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    victim = _victim(tmp_path)
    place = tmp_path / "run/_unfinished_checkpoints"
    callback = tiny.At("step_begin", lambda state, model: os.symlink(victim, place), 2)
    options = dict(max_steps=2, save_strategy="steps", save_steps=2, private_state_dir=str(tmp_path / "keys"))
    with pytest.raises(DPConfigError, match="_unfinished_checkpoints is a link"):
        tiny.trainer(tmp_path / "run", callbacks=[callback], **options).train()
    _check(victim)


@pytest.mark.parametrize("name", ["model.safetensors", "privacy"])
def test_the_best_of_a_tuning_is_not_copied_through_a_link(tmp_path, name, monkeypatch):
    victim, out = _victim(tmp_path), tmp_path / "out"
    out.mkdir()
    os.symlink(victim if name == "privacy" else victim / name, out / name)
    monkeypatch.setattr(RunCount, "draw", lambda self, source: 1)
    options = {"tuned_runs": 1.5, "target_epsilon": 8.0, "noise_multiplier": None, "max_steps": 2}
    make = functools.partial(
        tiny.trainer, eval_dataset=tiny.records(8), eval_data_privacy="not_protected", **options
    )  # fmt: skip
    try:
        tune(make, out, RunCount(mean=1.5), [1e-3])
    except DPConfigError as refused:
        assert f"{name} is a link" in str(refused)
    _check(victim)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "training_args.bin", "trainer_state.json", "train_results.json", "README.md"],
)
def test_what_is_saved_is_not_written_through_a_link(tmp_path, name):
    victim = _victim(tmp_path)
    trainer = tiny.trainer(tmp_path / "run", max_steps=1, private_state_dir=str(tmp_path / "keys"))
    trainer.train()
    os.symlink(victim / "model.safetensors", tmp_path / "run" / name)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"epsilon": 1.0})
    trainer.create_model_card()
    _check(victim)
    assert not (tmp_path / "run" / name).is_symlink()
