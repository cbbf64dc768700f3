"""The random stream of a run: a ledger names it, and a run that goes on draws from the one it began with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.clipping import make_engine
from hf_dpopt.common.types import ClippedSums, JointSums
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.run.run import PrivateRun

NUM_STEPS, EXPECTED, SIZE = 6, 10, 700
NOISES: dict[str, dict[str, Any]] = {
    "independent": {},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 3}},
    "drawn again": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1, "backend": "regenerate"}},
    "by copies": {"noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 2}, "noise_restart_every": 4},
}


@pytest.fixture(params=NOISES)
def plan(request: pytest.FixtureRequest) -> PrivacyPlan:
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=EXPECTED, sampling="auto", **NOISES[request.param]
    )
    return make_plan(config, num_examples=40, num_steps=NUM_STEPS)


def _start(plan: PrivacyPlan, tmp_path: Any, **more: Any) -> PrivateRun:
    return PrivateRun(plan, output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys", **more)


def _release(run: PrivateRun, step: int) -> torch.Tensor:
    run.begin(step, make_engine(nn.Linear(1, 1), run.plan.clipper))
    return run.release(JointSums(ClippedSums({"weight": torch.zeros(SIZE)})), step)["weight"]


def _steps(plan: PrivacyPlan, source: Any) -> list[torch.Tensor]:
    stream, found = plan.mechanism.stream(source, plan.sensitivity, first_step=1, num_steps=NUM_STEPS), []
    for step in range(1, NUM_STEPS + 1):
        stream.add_(sums := {"weight": torch.zeros(SIZE)}, step)
        found.append(sums["weight"] / EXPECTED)
    return found


def test_a_run_goes_on_with_the_stream_it_began_with(plan, tmp_path):
    begun = _start(plan, tmp_path)
    got = [_release(begun, step) for step in (1, 2, 3)]
    begun.close()
    resumed = _start(plan, tmp_path, resume_step=3)
    assert resumed.chain.chain_id == begun.chain.chain_id
    got += [_release(resumed, step) for step in (4, 5, 6)]
    resumed.close()
    for one, other in zip(got, _steps(plan, ChaCha20Gaussian(begun.chain.noise_key)), strict=True):
        assert torch.equal(one, other)
    assert Ledger.read(tmp_path / "out" / LEDGER).plan["noise_rng"] == ChaCha20Gaussian.stream


def test_a_run_does_not_go_on_with_another_stream(plan, tmp_path, monkeypatch):
    run = _start(plan, tmp_path)
    _release(run, 1)
    run.close()
    monkeypatch.setattr(ChaCha20Gaussian, "stream", "chacha20/2")
    with pytest.raises(DPConfigError, match="noise_rng: 'chacha20/1' in the ledger, 'chacha20/2' now"):
        _start(dataclasses.replace(plan), tmp_path, resume_step=1)  # a plan writes itself down once
