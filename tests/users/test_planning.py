"""Users or their records: the noise of both at equal compute, and what the planner says."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, make_plan
from hf_dpopt.cli.app import app
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.users import UserPlans, plan_for_users

pytestmark = pytest.mark.slow


def _plans(epsilon=2.0, **changes):
    config = PrivacyConfig(target_epsilon=epsilon, target_delta=1e-5, expected_batch_size=1)
    return plan_for_users(
        config, **{"num_users": 5000, "records_per_user": 8, "records_per_step": 800, "num_steps": 100, **changes}
    )


def test_both_keep_the_budget_at_the_same_compute():
    found = _plans()
    for plan in (found.by_users, found.by_records):
        assert 1.97 < plan.epsilon() <= 2.0 and plan.unit == "user" and plan.delta == 1e-5
    assert found.by_users.config.expected_batch_size == 100 and found.by_records.config.expected_batch_size == 800
    assert found.noise_by_users == pytest.approx(found.by_users.noise_multiplier / 100)
    assert found.noise_by_records == pytest.approx(found.by_records.noise_multiplier / 800)


def test_with_one_record_each_both_are_the_same():
    found = _plans(records_per_user=1, records_per_step=100)
    assert found.break_even == pytest.approx(1, rel=2e-2)  # the cap of a batch aside


def test_the_break_even_is_where_both_have_the_same_noise():
    found = _plans()
    assert found.break_even * found.noise_by_users == pytest.approx(found.noise_by_records)
    assert 1 / math.sqrt(8) < found.break_even < 1
    assert f"shorter than {found.break_even:.2f} times" in found.advice()


def test_small_budgets_and_large_batches_favour_users():
    """What arXiv:2407.07737 finds, in words."""
    assert _plans(epsilon=0.5).break_even > _plans().break_even > _plans(epsilon=8.0).break_even
    assert _plans(records_per_step=8000).break_even > _plans().break_even
    assert "example-level sampling (--sampling capped_poisson), however different" in _plans(epsilon=8.0).advice()


@pytest.mark.parametrize(
    "ratio, words",
    [(1.05, "user-level sampling, however alike"), (0.95, "shorter than 0.95"), (0.2, "however different")],
)
def test_the_advice_turns_where_records_are_alike_and_where_they_have_nothing_in_common(ratio, words):
    """4 records each: between 1/2 and 1 times the norm of a record, it depends on the data."""

    def plan(noise_multiplier: float):
        config = PrivacyConfig(noise_multiplier=noise_multiplier, target_delta=1e-5, expected_batch_size=10)
        return make_plan(config, num_examples=1000, num_steps=10)

    found = UserPlans(by_users=plan(1.0), by_records=plan(ratio), records_per_user=4)
    assert found.break_even == pytest.approx(ratio) and words in found.advice()


def test_the_command_prints_both_and_an_advice():
    flags = ["plan", "-n", "40000", "-b", "800", "--steps", "100", "--epsilon", "2", "--delta", "1e-5"]
    result = CliRunner().invoke(app, [*flags, "--users", "5000", "--records_per_user", "8"])
    assert result.exit_code == 0, result.output
    assert "users sampled: 100 users a step of 5000" in result.output
    assert "records sampled: 800 records a step of 40000" in result.output and "Predicted better" in result.output


def test_a_budget_is_needed():
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=1)
    with pytest.raises(DPConfigError, match="give target_epsilon"):
        plan_for_users(config, num_users=100, records_per_user=2, records_per_step=10, num_steps=5)
