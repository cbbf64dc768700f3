"""Epsilon of a log line: never less than that of the fine accounting, at most 1% more, and soon there."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant

from hf_dpopt.accounting import accountants, events
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig

pytestmark = pytest.mark.slow

SETTINGS = {
    "poisson": {"sampling": "poisson"},
    "truncated": {"sampling": "truncated_poisson"},
    "swapped": {"sampling": "poisson", "adjacency": "replace_one"},
    "zeroed": {"sampling": "poisson", "adjacency": "zero_out"},
    "fixed order": {"sampling": "fixed_order", "adjacency": "zero_out"},
    "groups": {"sampling": "cyclic_poisson", "noise_mechanism": "banded", "noise_kwargs": {"num_bands": 4}},
    "places": {"sampling": "capped_poisson", "privacy_unit": "user", "records_per_user": 3},
    "strict": {"sampling": "poisson", "target_epsilon": 0.05},
    "loose": {"sampling": "poisson", "target_epsilon": 30.0},
}  # fmt: skip
NUM_STEPS = 60


def _plan(name: str):
    config = PrivacyConfig(
        **{"clipping_norm": 1.0, "expected_batch_size": 30, "target_epsilon": 3.0, "target_delta": 1e-5, **SETTINGS[name]}
    )  # fmt: skip
    return make_plan(config, num_examples=3000, num_steps=NUM_STEPS)


@pytest.mark.parametrize("name", ["poisson", "swapped", "zeroed", "strict", "loose"])
@pytest.mark.parametrize("steps", [1, 2, 19, NUM_STEPS - 1, NUM_STEPS + 1])
def test_a_log_line_is_above_what_is_spent(name, steps):
    """Above a lower bound of the true epsilon: its losses are rounded down where those of a log line are rounded up."""
    plan = _plan(name)
    line = plan.epsilon(steps, is_for_log=True)
    ((leaf, count),) = events.flatten(plan.event_after(steps))
    below = from_gaussian_mechanism(
        events.noise_of(leaf), value_discretization_interval=line / 1e4, sampling_prob=leaf.sampling_probability,
        neighboring_relation=events.relation(plan.adjacency), pessimistic_estimate=False,
    )  # fmt: skip
    spent = below.self_compose(count).get_epsilon_for_delta(plan.delta)
    assert 0.98 * line < spent <= line


@pytest.mark.parametrize("name", ["truncated", "swapped", "strict"])
def test_what_is_kept_changes_no_bit(name):
    """Asked for in any order, after others or first, a number of steps has one epsilon; and more steps have more."""
    plan, steps = _plan(name), [1, 4, 20, 37, 38, 59]
    once = [plan.epsilon(t, is_for_log=True) for t in steps]
    for t, value in reversed(list(zip(steps, once, strict=True))):
        for cache in (accountants._epsilon, accountants._one_step, accountants._rdp, accountants.divergences):
            cache.cache_clear()
        assert plan.epsilon(t, is_for_log=True) == value
    assert once == sorted(once)


def test_renyi_divergences_that_are_kept_are_those_of_the_accountant():
    composition = (
        (PoissonSampledDpEvent(0.01, GaussianDpEvent(0.8)), 1000),
        (GaussianDpEvent(20.0), 7),
        (PoissonSampledDpEvent(0.2, GaussianDpEvent(3.0)), 3),
    )
    accountant = RdpAccountant()
    for leaf, count in composition:
        accountant.compose(leaf, count)
    assert accountants._rdp(composition, 1e-6) == accountant.get_epsilon(1e-6)
    orders = tuple(accountant.orders)
    total = sum(count * accountants.divergences(leaf, orders) for leaf, count in composition)
    assert np.array_equal(total, accountant.rdp)
    assert events.num_compositions(composition) == 1004
