"""A private run in one's own loop: chains that start, stop and go on, and what they release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan
from hf_dpopt.clipping import make_engine
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import ClippedSums
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run.checkpoint import MANIFEST, write_manifest
from hf_dpopt.run.earlier import recorded_plan
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.run_log import RunLog

NUM_STEPS, EXPECTED, SIZE = 6, 4, 5


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    """Noise that is correlated over all steps: a stream at a wrong place releases other values."""
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=EXPECTED, noise_mechanism="nu_dpftrl",
        noise_kwargs={"nu": 0.1},
    )  # fmt: skip
    return make_plan(config, num_examples=40, num_steps=NUM_STEPS)


def _start(plan: PrivacyPlan, folder: Path, resume_step: int | None = None) -> PrivateRun:
    return PrivateRun(plan, output_dir=folder / "out", private_state_dir=folder / "keys", resume_step=resume_step)


def _release(run: PrivateRun, step: int) -> torch.Tensor:
    """The noise of a step, as it is released: that of a sum without records."""
    run.begin(step, make_engine(nn.Linear(1, 1), run.plan.clipper))
    return run.release(ClippedSums({"weight": torch.zeros(SIZE)}), step)["weight"]


def test_a_second_chain_that_is_resumed_goes_on_with_its_own_noise(plan, tmp_path):
    """The first chain has other steps; what the noise goes on after is the number of this chain's."""
    first = _start(plan, tmp_path)
    for step in (1, 2, 3):
        _release(first, step)
    first.close()
    second = _start(plan, tmp_path)
    _release(second, 1)
    second.close()
    resumed = _start(plan, tmp_path, resume_step=1)
    assert resumed.chain.chain_id == second.chain.chain_id and resumed.charged == [3, 1]
    got = [_release(resumed, step) for step in (2, 3)]
    source = ChaCha20Gaussian(second.chain.noise_key)
    whole = plan.mechanism.stream(source, plan.sensitivity, first_step=1, num_steps=NUM_STEPS)
    for step in (1, 2, 3):
        sums = {"weight": torch.zeros(SIZE)}
        whole.add_(sums, step)
        if step > 1:
            assert torch.equal(got[step - 2], sums["weight"] / EXPECTED)
    resumed.close()


def test_a_plan_whose_steps_are_done_takes_no_more(plan, tmp_path):
    """A run that is resumed at its end has no key; a step of it is refused in words, and not charged."""
    run = _start(plan, tmp_path)
    for step in range(1, NUM_STEPS + 1):
        _release(run, step)
    run.close()
    again = _start(plan, tmp_path, resume_step=NUM_STEPS)
    with pytest.raises(DPConfigError, match=f"all {NUM_STEPS} steps of the plan are done"):
        _release(again, NUM_STEPS + 1)
    assert again.charged == [NUM_STEPS, 0]
    again.close()


def test_a_budget_is_not_kept_on_top_of_steps_without_noise(tmp_path):
    """What the folder's run revealed has no epsilon; without a budget, it is continued as it was."""
    config = PrivacyConfig(noise_multiplier=0.0, target_delta=1e-3, expected_batch_size=EXPECTED)
    silent = make_plan(config, num_examples=40, num_steps=NUM_STEPS)
    _start(silent, tmp_path).close()
    with pytest.raises(DPConfigError, match="had no noise.*another output_dir"):
        recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=True)
    recorded = recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=False)
    assert recorded is not None and recorded.noise_multiplier == 0


def test_a_folder_with_a_private_run_gives_its_plan_to_both(plan, tmp_path):
    assert recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=True) is None
    _start(plan, tmp_path).close()
    for keeps_budget in (True, False):
        recorded = recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=keeps_budget)
        assert recorded is not None and recorded.noise_multiplier == 1.0


@pytest.mark.parametrize("keeps_budget", [True, False])
def test_a_ledger_that_does_not_say_how_the_noise_was_correlated_is_not_continued(tmp_path, keeps_budget):
    out, kept = tmp_path / "out", tmp_path / "keys"
    with RunLog.open(out, private_dir(kept, out)) as log:
        log.record_plan({"noise_multiplier": 1.0}, must_match=())
    with pytest.raises(DPConfigError, match="of another kind.*choose another output_dir"):
        recorded_plan(out, kept, keeps_budget=keeps_budget)


@pytest.mark.parametrize("other", [None, {"run": "0" * 16, "chain": "0" * 16, "step": 1, "files": {}}])
def test_a_checkpoint_that_the_ledger_does_not_know_is_refused_before_a_step(plan, tmp_path, other):
    """Without a manifest, and with that of another run; the one of this run is taken."""
    run, checkpoint = _start(plan, tmp_path), tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    _release(run, 1)
    write_manifest(checkpoint, *run.stand())
    run.close()
    own = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).unlink()
    if other is not None:
        (checkpoint / MANIFEST).write_text(json.dumps(other))
    options = {"output_dir": tmp_path / "out", "private_state_dir": tmp_path / "keys", "resume_step": 1}
    with pytest.raises(DPConfigError, match="no checkpoint to resume from.*ledger"):
        PrivateRun(plan, checkpoint=checkpoint, **options)
    (checkpoint / MANIFEST).write_text(own)
    PrivateRun(plan, checkpoint=checkpoint, **options).close()
