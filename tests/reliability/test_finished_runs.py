"""A run that has ended leaves no key and no journal, however often it is resumed."""

from __future__ import annotations

from tests import tiny


def test_a_finished_run_leaves_no_key(tmp_path):
    for resume in (False, True):
        tiny.trainer(
            tmp_path / "out", private_state_dir=str(tmp_path / "keys"), max_steps=4, save_strategy="steps", save_steps=2,
            logging_strategy="no",
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        runs = tmp_path / "keys/runs"
        kept = [*runs.glob("*/*.key"), *(tmp_path / "out/_journal").glob("*")]
        assert not kept and len(list(runs.glob("*/log.jsonl"))) == 1
