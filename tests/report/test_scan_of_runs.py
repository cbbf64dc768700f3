"""What the release scan stops at the start of a run, at a save and before a push."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface import release
from hf_dpopt.huggingface.release import ReleaseGuard
from hf_dpopt.run.cleaning import UNPUBLISHED
from hf_dpopt.run.keys import PrivateState
from tests import tiny


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def guard(out: Path) -> ReleaseGuard:
    return tiny.trainer(out)._release


def test_a_link_out_is_a_warning_at_a_save_and_refused_at_a_push(
    guard: ReleaseGuard, out: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loggers such as wandb link to logs elsewhere; a save does not publish them."""
    monkeypatch.setattr(logging.getLogger("hf_dpopt"), "propagate", True)
    logs = out / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/etc/hostname")
    for is_start in (True, False, False):
        guard.check(out, is_start=is_start)
    warned = [r.getMessage() for r in caplog.records if "debug-core.log: a link out of the folder" in r.getMessage()]
    assert len(warned) == 1
    with pytest.raises(DPConfigError, match="debug-core.log: a link out of the folder"):
        guard.check(out, is_thorough=True)
    (out / "train.json").write_text('{"train_loss": 0.5}')
    with pytest.raises(DPConfigError, match=r"1 finding.*train.json"):
        guard.check(out)


def test_a_damaged_file_refuses_a_save_and_no_start(guard: ReleaseGuard, out: Path) -> None:
    (out / "checkpoint-3").mkdir()
    torch.save(torch.zeros(999), out / "checkpoint-3" / "optimizer.pt")
    whole = (out / "checkpoint-3" / "optimizer.pt").read_bytes()
    (out / "checkpoint-3" / "optimizer.pt").write_bytes(whole[: len(whole) // 2])
    (out / "checkpoint-3" / "trainer_state.json").write_text("{")
    guard.check(out, is_start=True)
    for is_thorough in (False, True):
        with pytest.raises(DPConfigError, match=r"2 finding.*optimizer.pt: .*not checked.*trainer_state.json: .*not"):
            guard.check(out, is_thorough=is_thorough)
    (out / "checkpoint-3" / "notes.json").write_text('{"train_loss": 0.5}')
    with pytest.raises(DPConfigError, match=r"1 finding.*train_loss"):
        guard.check(out, is_start=True)


def test_a_run_begins_beside_a_damaged_file_and_stops_at_its_save(out: Path) -> None:
    (out / "checkpoint-x").mkdir()
    (out / "checkpoint-x" / "torn.pkl").write_bytes(b"\x80\x04\x95garbage")
    trainer = tiny.trainer(out, max_steps=1)
    trainer.train()
    with pytest.raises(DPConfigError, match="torn.pkl: not checked"):
        trainer.save_model()


def test_folders_that_no_push_takes_are_left_out(guard: ReleaseGuard, out: Path) -> None:
    for name in UNPUBLISHED:
        (out / name / "checkpoint-1").mkdir(parents=True)
        (out / name / "checkpoint-1" / "torn.pkl").write_bytes(b"\x80\x04\x95garbage")
    assert len(UNPUBLISHED) == 3
    guard.check(out)
    guard.check(out, is_thorough=True)
    (out / "checkpoint-1").mkdir()
    (out / UNPUBLISHED[0]).rename(out / "checkpoint-1" / UNPUBLISHED[0])  # below another folder it is any folder
    with pytest.raises(DPConfigError, match="torn.pkl: not checked"):
        guard.check(out)


def test_saves_with_new_markers_compare_a_text_once(
    guard: ReleaseGuard, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The noise state of correlated noise changes with every step, and with it the secrets that are looked for."""
    guard.trainer.args.private_state_dir = str(tmp_path / "keys")
    state = PrivateState(tmp_path / "keys", forbidden=out)
    chain = state.new_chain()
    read: list[int] = []
    rows = release.training_records

    def counted(*args: Any) -> Any:
        records = rows(*args)
        assert records is not None
        return type(records)(lambda: read.append(1) or records.blocks(), records.users)

    monkeypatch.setattr(release, "training_records", counted)
    (out / "tokenizer.txt").write_text("a text that is long enough to be compared with records of training")
    markers = set()
    for _ in range(3):
        torch.save({"step": 1, "buffers": torch.randn(99)}, state._noise_file(chain.chain_id))
        markers |= set(state.secrets())
        guard.check(out)
    assert len(read) == 1 and len(markers) >= 3 + 5, "the markers did change"
    guard.check(out, is_thorough=True)
    assert len(read) == 2, "a push compares with records that are drawn anew"
