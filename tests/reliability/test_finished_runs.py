"""A run that has ended leaves no key and no journal, however often it is resumed."""

from __future__ import annotations

from pathlib import Path

from tests import tiny


def left(root: Path) -> list[str]:
    """Keys, noise and journals that are kept."""
    kept = [*root.glob("keys/runs/*/*.key"), *root.glob("keys/runs/*/*.noise"), *(root / "out/_journal").glob("*")]
    return sorted(path.name for path in kept)


def finish(root: Path, resume: bool) -> None:
    tiny.trainer(
        root / "out", private_state_dir=str(root / "keys"), max_steps=4, save_strategy="steps", save_steps=2,
        logging_strategy="no",
    ).train(resume_from_checkpoint=resume)  # fmt: skip


def test_a_finished_run_leaves_no_key(tmp_path):
    finish(tmp_path, False)
    assert left(tmp_path) == []


def test_a_finished_run_that_is_resumed_leaves_no_key(tmp_path):
    finish(tmp_path, False)
    finish(tmp_path, True)
    assert left(tmp_path) == []
