"""A private run in one's own loop: chains that start, stop and go on, and what they release."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from hf_dpopt import PrivateRun
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run.checkpoint import MANIFEST, write_manifest
from hf_dpopt.run.earlier import recorded_plan
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.run_log import RunLog
from tests.run.one_run import EXPECTED, NUM_STEPS, SIZE, begin, plan_of, release

NOISES: dict[str, dict[str, Any]] = {
    "independent": {},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 3}},
    "of its history": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1}},
    "drawn again": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1, "backend": "regenerate"}},
    "by copies": {"noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 2}, "noise_restart_every": 4},
}


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    """Noise that is correlated over all steps: a stream at a wrong place releases other values."""
    return plan_of(**NOISES["of its history"])


@pytest.mark.parametrize("noise", NOISES)
def test_a_second_chain_that_is_resumed_goes_on_with_its_own_noise(noise, tmp_path):
    """The first chain has other steps; what the noise goes on after is the number of this chain's."""
    plan = plan_of(**NOISES[noise])
    first = begin(plan, tmp_path)
    for step in (1, 2, 3):
        release(first, step)
    first.close()
    second = begin(plan, tmp_path)
    release(second, 1)
    second.close()
    resumed = begin(plan, tmp_path, resume_step=1)
    assert resumed.chain.chain_id == second.chain.chain_id and resumed.charged == [3, 1]
    got = [release(resumed, step) for step in range(2, NUM_STEPS + 1)]
    source = ChaCha20Gaussian(second.chain.noise_key)
    whole = plan.mechanism.stream(source, plan.sensitivity, first_step=1, num_steps=NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        sums = {"weight": torch.zeros(SIZE)}
        whole.add_(sums, step)
        if step > 1:
            assert torch.equal(got[step - 2], sums["weight"] / EXPECTED)
    resumed.close()


def test_a_run_does_not_go_on_with_another_stream(plan, tmp_path, monkeypatch):
    run = begin(plan, tmp_path)
    release(run, 1)
    run.close()
    monkeypatch.setattr(ChaCha20Gaussian, "stream", "chacha20/2")
    with pytest.raises(DPConfigError, match="noise_rng: 'chacha20/1' in the ledger, 'chacha20/2' now"):
        begin(dataclasses.replace(plan), tmp_path, resume_step=1)  # a plan writes itself down once


def test_a_plan_whose_steps_are_done_takes_no_more(plan, tmp_path):
    """A run that is resumed at its end has no key; a step of it is refused in words, and not charged."""
    run = begin(plan, tmp_path)
    for step in range(1, NUM_STEPS + 1):
        release(run, step)
    run.close()
    again = begin(plan, tmp_path, resume_step=NUM_STEPS)
    with pytest.raises(DPConfigError, match=f"all {NUM_STEPS} steps of the plan are done"):
        release(again, NUM_STEPS + 1)
    assert again.charged == [NUM_STEPS, 0]
    again.close()


def test_a_budget_is_not_kept_on_top_of_steps_without_noise(tmp_path):
    """What the folder's run revealed has no epsilon; without a budget, it is continued as it was."""
    begin(plan_of(noise_multiplier=0.0), tmp_path).close()
    with pytest.raises(DPConfigError, match="had no noise.*another output_dir"):
        recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=True)
    recorded = recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=False)
    assert recorded is not None and recorded.noise_multiplier == 0


def test_a_folder_with_a_private_run_gives_its_plan_to_both(plan, tmp_path):
    assert recorded_plan(tmp_path / "out", tmp_path / "keys", keeps_budget=True) is None
    begin(plan, tmp_path).close()
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
    run, checkpoint = begin(plan, tmp_path), tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    release(run, 1)
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
