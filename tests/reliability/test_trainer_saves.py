"""What else the stock Trainer does with a checkpoint it does with the one that is in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_dpopt import DPConfigError, DPTrainer, DPTrainerMixin
from tests.helpers import tiny
from tests.helpers.run_files import MANIFEST, UNFINISHED


def trainer(folder: Path, **changes: Any) -> DPTrainer:
    values: dict[str, Any] = dict(
        max_steps=3, save_strategy="steps", save_steps=1, private_state_dir=str(folder / "keys"), learning_rate=1e-2
    )
    return tiny.trainer(folder / "out", **values | changes)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _replace_best(state: Any, model: Any) -> None:
    path = Path(state.best_model_checkpoint) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_best_checkpoint_is_named_kept_and_checked(tmp_path: Path, is_replaced: bool) -> None:
    scores = iter([0.2, 0.9, 0.5, 0.5])
    made = trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_total_limit=1,
        metric_for_best_model="score", eval_dataset=tiny.records(128)[64:], eval_data_privacy="public",
        compute_metrics=lambda _: {"score": next(scores)}, callbacks=[tiny.At("save", _replace_best, 3)] if is_replaced else [],
    )  # fmt: skip
    best = tmp_path / "out" / "checkpoint-2"
    if is_replaced:
        with pytest.raises(DPConfigError, match=r"checkpoint-2 is no checkpoint .*model\.safetensors is not what"):
            made.train()
        return
    made.train()
    assert made.state.best_model_checkpoint == str(best)
    assert _names(tmp_path / "out") == {"privacy", "checkpoint-2"}, "the limit is 1, and the last one was not the best"
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)


def test_a_push_gets_the_checkpoint_that_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, bool]] = []

    def push(self: Trainer, checkpoint_folder: str) -> None:
        pushed.append((checkpoint_folder, (Path(checkpoint_folder) / MANIFEST).exists()))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    made = trainer(tmp_path)
    made.args.push_to_hub = True
    made.train()
    assert pushed == [(str(tmp_path / f"out/checkpoint-{step}"), True) for step in (1, 2, 3)]


def test_a_file_that_a_subclass_puts_in_by_name_is_kept_and_listed(tmp_path: Path) -> None:
    class Stock(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(exist_ok=True)
            (folder / "notes.txt").write_text("mine")

    class Own(DPTrainerMixin, Stock):
        pass

    trainer(tmp_path, cls=Own).train()
    for step in (1, 2, 3):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        assert (folder / "notes.txt").read_text() == "mine"
        assert {"notes.txt", "model.safetensors"} <= json.loads((folder / MANIFEST).read_text())["files"].keys()
    assert UNFINISHED not in _names(tmp_path / "out")


def test_weights_alone_are_saved_whole_and_not_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, save_only_model=True).train()
    assert "optimizer.pt" not in _names(tmp_path / "out" / "checkpoint-3")
    with pytest.raises(DPConfigError, match=r"no whole checkpoint.*checkpoint-3: it has no optimizer\.pt"):
        trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_a_step_that_is_saved_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    """A branch from step 1 saves steps 2 and 3 a second time."""
    first = trainer(tmp_path)
    first.train()
    before = torch.load(tmp_path / "out/checkpoint-3/optimizer.pt")
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
    after = torch.load(tmp_path / "out/checkpoint-3/optimizer.pt")
    assert not torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])
    assert _names(tmp_path / "out") == {"privacy", "checkpoint-1", "checkpoint-2", "checkpoint-3"}
