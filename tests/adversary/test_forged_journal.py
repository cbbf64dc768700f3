"""Somebody who can write to `output_dir` forges its journal: a resume refuses it in words, or goes on."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt import DPConfigError
from tests.adversary.test_forged_ledgers import NUM_STEPS, RAN, SAVED_AT, Scene, made, scene, train
from tests.helpers import tiny

__all__ = ["made", "scene"]  # fixtures


def _forge(scene: Scene, step: int, kind: str, **content: Any) -> Path:
    """Write an entry with the right checksum."""
    path: Path = scene.out / "_journal" / f"{scene.chain['chain_id']}-{step:09d}-{kind}.release"
    made = io.BytesIO()
    torch.save({"entry": path.name, "base": "", "values": {}} | content, made)
    path.write_bytes(made.getvalue() + hashlib.sha256(made.getvalue()).digest())
    return path


@pytest.mark.parametrize(
    "values",
    [
        [1.0], {1: torch.zeros(2)}, {"weight": 1.0}, {"weight": torch.zeros(2, dtype=torch.float64)},
        {"weight": torch.zeros(2, 2).to_sparse()}, {"weight": torch.zeros(3)}, {},
    ],
    ids=str,
)  # fmt: skip
def test_entries_that_no_step_writes_are_refused(scene, values):
    base = f"{scene.chain['chain_id']}:{SAVED_AT}"
    (scene.out / f"checkpoint-{RAN}" / "privacy_ledger.json").unlink()
    _forge(scene, SAVED_AT, "base", base=base)
    _forge(scene, SAVED_AT + 1, "step", values=values)
    _forge(scene, RAN, "step")
    with pytest.raises(DPConfigError, match="journal"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)


def test_nothing_in_an_entry_is_run(scene, tmp_path):
    (scene.out / f"checkpoint-{RAN}" / "privacy_ledger.json").unlink()
    _forge(scene, SAVED_AT, "base", base=f"{scene.chain['chain_id']}:{SAVED_AT}")
    _forge(scene, SAVED_AT + 1, "step", values=tiny.Bomb(tmp_path / "ran"))
    with pytest.raises(DPConfigError, match="journal"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)
    assert not (tmp_path / "ran").exists()


def test_files_with_names_like_those_of_entries_hinder_no_run(scene):
    for name in ("1x", "0", "step", "step-000", "step²"):
        (scene.out / "_journal" / f"{scene.chain['chain_id']}-{RAN}-{name}.release").touch()
    made, again = train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)
    assert sorted(again) == [RAN + 1, RAN + 2] and made.privacy_spent().num_steps == NUM_STEPS
