"""Plans of balls in bins with correlated noise: an epsilon that was verified by samples before the first step."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hf_dpopt.accounting import certificates
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.record import PlanRecord

pytestmark = pytest.mark.slow

SIZES = {"num_examples": 400, "num_steps": 30}
CONFIG = PrivacyConfig(
    noise_multiplier=3.0, expected_batch_size=40, target_delta=1e-3, noise_mechanism="nu_dpftrl",
    noise_kwargs={"nu": 0.2}, sampling="balls_in_bins", amplification_samples=300_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def certified():
    return make_plan(CONFIG, **SIZES)


@pytest.fixture(scope="module")
def computed():
    return make_plan(dataclasses.replace(CONFIG, amplification_samples=0), **SIZES)


def test_the_smaller_of_the_two_bounds_is_claimed(certified, computed):
    assert computed.certificate is None and "certificate" not in computed.record.to_json()
    assert certified.epsilon() == certified.certificate.epsilon < 0.95 * computed.epsilon()
    assert certified.noise_multiplier == computed.noise_multiplier
    assert "300000 samples" in certified.record.to_json()["accountant"]
    for steps in (1, 12, 30):
        assert certified.epsilon(steps) <= certified.epsilon()
    assert certified.epsilon(31) >= certified.epsilon() and certified.epsilon((10, 20)) == computed.epsilon((10, 20))


def test_the_certificate_states_what_was_tested(certified):
    proof = certified.certificate
    assert proof.is_accepted and proof.delta == certified.delta and proof.event.num_steps == 30
    stated = certified.record.to_json()["certificate"]
    assert stated["num_samples"] == 300_000 and stated["failure"] == 1e-3
    assert stated["event"]["strategy"] == json.loads(json.dumps(certified.strategy.parameters()))
    again = certificates.verify(proof.event, proof.epsilon, proof.delta, num_samples=300_000)
    assert again.is_accepted, "fresh samples agree"


def test_a_resumed_run_keeps_it_and_draws_no_sample(certified, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("samples were drawn")

    monkeypatch.setattr(certificates, "verify", refuse)
    recorded = json.loads(json.dumps(certified.record.to_json()))
    resumed = make_plan(CONFIG, **SIZES, recorded=PlanRecord.from_json(recorded))
    assert resumed.certificate == certified.certificate and resumed.record.to_json() == certified.record.to_json()
    longer = make_plan(CONFIG, num_examples=400, num_steps=40, recorded=PlanRecord.from_json(recorded))
    assert longer.certificate is None and longer.epsilon() > certified.epsilon()
    larger = make_plan(
        dataclasses.replace(CONFIG, target_delta=2e-3), **SIZES, recorded=PlanRecord.from_json(recorded)
    )
    assert larger.epsilon() <= certified.epsilon()
    smaller = make_plan(
        dataclasses.replace(CONFIG, target_delta=1e-4), **SIZES, recorded=PlanRecord.from_json(recorded)
    )
    assert smaller.certificate is None


def test_a_run_without_a_certificate_goes_on_with_the_computed_bound(certified, computed):
    recorded = json.loads(json.dumps(certified.record.to_json()))
    del recorded["certificate"]
    assert make_plan(CONFIG, **SIZES, recorded=PlanRecord.from_json(recorded)).epsilon() == computed.epsilon()


@pytest.mark.parametrize(
    "edit",
    [
        {"epsilon": "0.1"},
        {"remove": 1.0},
        {"accepted": False},
        {"num_samples": None},
        {"event": {}},
        {"epsilon": 0.01},
        {"epsilon": -3.0},
        {"epsilon": float("nan")},
        {"failure": 0.9},
        {"num_samples": 1},
        {"remove_threshold": 1.0},
        {"delta": 1e-9},
    ],
    ids=str,
)
def test_an_edited_certificate_is_refused(certified, edit):
    recorded = json.loads(json.dumps(certified.record.to_json()))
    recorded["certificate"] |= edit
    with pytest.raises(DPConfigError, match="certificate"):
        make_plan(CONFIG, **SIZES, recorded=PlanRecord.from_json(recorded))


def test_a_budget_buys_less_noise(certified):
    asked = dataclasses.replace(CONFIG, noise_multiplier=None, target_epsilon=1.0)
    plan = make_plan(asked, **SIZES)
    without = make_plan(dataclasses.replace(asked, amplification_samples=0), **SIZES)
    assert plan.noise_multiplier < 0.97 * without.noise_multiplier
    assert plan.epsilon() == plan.certificate.epsilon <= 1.0
    assert plan.certificate.event.noise_multiplier <= plan.draw_stddev


def test_nothing_is_sampled_where_the_computed_bound_is_exact():
    assert (
        make_plan(dataclasses.replace(CONFIG, noise_mechanism="gaussian", noise_kwargs={}), **SIZES).certificate
        is None
    )
    assert make_plan(dataclasses.replace(CONFIG, sampling="fixed_order"), **SIZES).certificate is None


def test_too_few_samples_leave_the_computed_bound(computed):
    assert make_plan(dataclasses.replace(CONFIG, amplification_samples=500), **SIZES).epsilon() == computed.epsilon()


def test_another_plan_does_not_take_it(certified, computed):
    """A plan that was changed by hand is not the one that was verified."""
    longer = dataclasses.replace(certified.release, steps=80)
    for change in ({"num_steps": 80, "release": longer}, {"delta": 1e-8}):
        changed = dataclasses.replace(certified, **change)
        assert changed.epsilon() == pytest.approx(dataclasses.replace(computed, **change).epsilon())
        assert changed.epsilon() > certified.epsilon()


@pytest.mark.parametrize("samples", [-1, 2.5, "many", True, None])
def test_numbers_of_samples_are_checked(samples):
    with pytest.raises(DPConfigError, match="amplification_samples=.*Use an integer"):
        dataclasses.replace(CONFIG, amplification_samples=samples)
