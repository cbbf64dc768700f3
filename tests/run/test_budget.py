"""The budget at start-up: a call is refused where its steps cost more than `target_epsilon` by however little."""

from __future__ import annotations

import dataclasses

import pytest

from hf_dpopt import DPBudgetExceeded, DPConfigError
from hf_dpopt.plan.plan import PrivacyPlan
from tests.run.one_run import NUM_STEPS, begin, plan_of


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    return plan_of(noise_multiplier=None, target_epsilon=3.0)


def _with_target(plan: PrivacyPlan, target: float) -> PrivacyPlan:
    """The same noise, under another budget."""
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, target_epsilon=target))


@pytest.mark.parametrize("missing", [1e-9, 0.04])
def test_a_call_that_costs_a_little_more_than_its_budget_is_refused_before_a_step(plan, tmp_path, missing):
    """Two calls, so two chains: epsilon of both is compared, and no share of it is forgiven."""
    first = begin(plan, tmp_path)
    for step in range(1, NUM_STEPS + 1):
        first.charge(step)
    first.close()
    both = plan.epsilon((NUM_STEPS, NUM_STEPS))
    before = (tmp_path / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPBudgetExceeded, match=f"the {NUM_STEPS} steps still to run would bring epsilon to"):
        begin(_with_target(plan, both * (1 - missing)), tmp_path)
    assert (tmp_path / "out/privacy/ledger.jsonl").read_bytes() == before
    begin(_with_target(plan, both), tmp_path).close()


def test_a_first_call_that_costs_a_little_more_than_its_budget_is_refused(plan, tmp_path):
    """A resumed run keeps its noise, so a plan may cost more than the budget it is given."""
    with pytest.raises(DPBudgetExceeded, match="above target_epsilon"):
        begin(_with_target(plan, plan.epsilon() * 0.999), tmp_path)
    begin(_with_target(plan, plan.epsilon()), tmp_path).close()


def test_a_step_beyond_the_plan_is_refused(plan, tmp_path):
    """Also where the budget has room for it: the steps of the plan were found affordable, and are what was planned."""
    run = begin(_with_target(plan, plan.epsilon(NUM_STEPS + 1)), tmp_path)
    for step in range(1, NUM_STEPS + 1):
        run.charge(step)
    with pytest.raises(DPConfigError, match=f"all {NUM_STEPS} steps of the plan are done. Plan more steps"):
        run.charge(NUM_STEPS + 1)
    assert run.charged == [NUM_STEPS] and run.spent().epsilon == plan.epsilon()
    run.close()
