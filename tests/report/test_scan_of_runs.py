"""What the release scan stops at the start of a run, at a save and before a push."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.release_guard import ReleaseGuard
from hf_dpopt.run.checkpoint import UNPUBLISHED
from tests.helpers import tiny


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
    (out / "trainer_state.json").write_text("{")  # a kill tore it
    for _ in range(3):
        guard.check(out)
    warned = [r.getMessage() for r in caplog.records if "debug-core.log: a link" in r.getMessage()]
    assert len(warned) == 1
    with pytest.raises(DPConfigError, match="debug-core.log: a link"):
        guard.check(out, is_push=True)
    (out / "train_results.json").write_text('{"train_loss": 0.5}')
    with pytest.raises(DPConfigError, match=r"1 finding.*train_results.json: un-noised value of train_loss"):
        guard.check(out)


def test_folders_that_no_push_takes_are_left_out(guard: ReleaseGuard, out: Path) -> None:
    for name in UNPUBLISHED:
        (out / name / "checkpoint-1").mkdir(parents=True)
        (out / name / "checkpoint-1" / "noise.key").touch()
    guard.check(out)
    guard.check(out, is_push=True)
    (out / "checkpoint-1").mkdir()
    (out / UNPUBLISHED[0]).rename(out / "checkpoint-1" / UNPUBLISHED[0])  # below another folder it is any folder
    with pytest.raises(DPConfigError, match="noise.key: a name that belongs to private state"):
        guard.check(out)
