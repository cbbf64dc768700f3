"""Plans of tuning: every run gets the noise for the whole, and whoever reads the plan is told both epsilons."""

from __future__ import annotations

import json

import pytest

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.plan.release import EarlierRun
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import render_statement
from hf_dpopt.verify.outcome import Unknown
from hf_dpopt.verify.plan_events import Mechanism
from hf_dpopt.verify.reading import Fields
from tests.report.conftest import make_facts, plan  # noqa: F401  # fixtures

SIZES = {"num_examples": 4000, "num_steps": 40}


def config(**changes):
    return PrivacyConfig(**{"target_epsilon": 8.0, "target_delta": 1e-5, "expected_batch_size": 200, **changes})


@pytest.mark.slow_but(1)
def test_the_budget_is_that_of_all_runs():
    made = make_plan(config(tuned_runs=10.0), **SIZES)
    single = make_plan(config(), **SIZES)
    assert 7.9 < made.epsilon() <= 8 and made.noise_multiplier > 1.05 * single.noise_multiplier
    alone = make_plan(config(target_epsilon=None, noise_multiplier=made.noise_multiplier), **SIZES)
    assert made.run_epsilon == pytest.approx(alone.epsilon()) and made.run_epsilon < 7
    law = RunCount(mean=10.0)
    assert events.flatten(made.event) == events.flatten(law.event(alone.event))
    assert made.epsilon((0,)) == 0 and 0 < made.epsilon(20) < made.epsilon() < made.epsilon((40, 40))


def test_a_plan_says_that_it_is_one_of_several_and_a_resume_has_to_agree():
    public = make_plan(config(tuned_runs=5.0), **SIZES).record.to_json()
    assert public["tuned"] == {"mean": 5.0, "shape": 1.0} and "tuned" in PlanRecord.mechanism_fields()
    assert json.loads(json.dumps(public))["run_epsilon"] < public["epsilon"]
    assert "tuned" not in make_plan(config(), **SIZES).record.to_json()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"tuned_runs": 1.0}, "tuned_runs=1 is no mean"),
        ({"tuned_runs": 5.0, "sampling": "balls_in_bins"}, "has no analysis"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(DPConfigError, match=match):
        make_plan(config(**changes), **SIZES)


def test_earlier_runs_are_refused():
    before = make_plan(config(), **SIZES)
    earlier = EarlierRun.from_json({"ledger_digest": "0" * 64, "charged": [40], **before.record.to_json()})
    with pytest.raises(DPConfigError, match="Leave earlier_runs out"):
        make_plan(config(tuned_runs=5.0, target_epsilon=20.0), **SIZES, earlier=[earlier])


# --- what others read ---


def test_verify_leaves_it_open():
    """What the number of runs costs has no second implementation, so it is neither verified nor refused."""
    made = make_plan(config(tuned_runs=8.0), **SIZES)
    with pytest.raises(Unknown, match="the best of several runs"):
        Mechanism(Fields(made.record.to_json(), "plan")).leaves((40,))


def test_the_statement_promises_the_whole(make_facts):  # noqa: F811
    made = make_plan(config(tuned_runs=10.0), **SIZES)
    facts: RunFacts = make_facts(plan=made.record.to_json(), epsilon_spent=made.epsilon(), delta=made.delta)
    text = " ".join(render_statement(facts).split())
    assert "best of a random number of runs (a geometric number of mean 10)" in text
    assert f"had it been the only one | {made.run_epsilon:.4g} |" in text
    assert "knowing how many runs the tuning took" in text
    assert facts.epsilon >= made.epsilon() > made.run_epsilon
    before = render_statement(make_facts())
    assert "best of" not in before and "how many runs" not in before


def test_divergences_are_asked_for_once_per_order():
    """The Renyi bound of a plan is that of dp_accounting on the whole set of orders."""
    made = make_plan(config(tuned_runs=10.0, sampling="poisson"), **SIZES)
    rdp = accountants.rdp_epsilon(events.flatten(made.event), made.delta, "add_or_remove_one")
    assert rdp is not None and rdp > made.epsilon()
