"""The promise of a sampler is asserted on what is drawn, also after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt import DPConfigError, PrivacyConfig, PrivateRun, make_plan
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.check import ParticipationCheck

KEY = bytes(range(32))


def _sampler(name):
    return SAMPLERS[name](num_examples=40, expected_batch_size=8)


def test_poisson_sampling_promises_nothing():
    assert not ParticipationCheck.is_needed(_sampler("poisson"), 17)
    assert ParticipationCheck.is_needed(_sampler("fixed_order"), 17)


def test_a_record_that_comes_back_too_soon_is_found():
    sampler = _sampler("fixed_order")
    check = ParticipationCheck(sampler, KEY, 1)
    for step in range(1, 5):
        check.observe(step, sampler.draw(KEY, step))
    with pytest.raises(DPConfigError, match="at most 1 participations in so many steps, at least 5 apart"):
        check.observe(5, sampler.draw(KEY, 4))


def test_after_a_resume_the_earlier_steps_count():
    sampler = _sampler("fixed_order")
    check = ParticipationCheck(sampler, KEY, 1)
    with pytest.raises(DPConfigError, match="Step 8 was not run"):
        check.observe(8, sampler.draw(KEY, 6))


def test_too_many_participations_and_repetitions_are_found():
    sampler = _sampler("fixed_order")
    check = ParticipationCheck(sampler, KEY, 1)
    for step in range(1, 6):
        check.observe(step, sampler.draw(KEY, step))
    with pytest.raises(DPConfigError, match="at most 2 participations"):
        check.observe(6, np.arange(40))
    twice = ParticipationCheck(sampler, KEY, 1)
    with pytest.raises(DPConfigError, match="Step 1"):
        twice.observe(1, np.repeat(sampler.draw(KEY, 1), 2))


def test_a_run_refuses_a_batch_that_breaks_the_promise(tmp_path, monkeypatch):
    """Through `PrivateRun`: what the accountant relies on is looked at where batches are drawn."""
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=8, noise_mechanism="blt", sampling="fixed_order")
    plan = make_plan(config, num_examples=40, num_steps=10)
    run = PrivateRun(plan, output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")
    first = run.draw(1)
    monkeypatch.setattr(type(plan.sampler), "draw", lambda self, key, step: first)
    with pytest.raises(DPConfigError, match="Step 2 was not run"):
        run.draw(2)
    run.close()
