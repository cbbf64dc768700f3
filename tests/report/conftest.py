"""Facts of a run as it would report them, from a real plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.report.facts import RunFacts

MakeFacts = Callable[..., RunFacts]


@pytest.fixture(scope="session")
def plan() -> PrivacyPlan:
    config = PrivacyConfig(noise_multiplier=1.1, target_delta=1e-5, expected_batch_size=100, clipping_norm=0.25)
    return make_plan(config, num_examples=5000, num_steps=40)


@pytest.fixture(scope="session")
def make_facts(plan: PrivacyPlan) -> MakeFacts:
    """Facts of the finished run of `plan`, some of them replaced; ``plan={...}`` replaces entries of the plan."""
    facts = RunFacts(
        plan=plan.record.to_json(),
        epsilon_spent=plan.epsilon(),
        epsilon_replace_one=1.5,
        delta=plan.delta,
        steps_charged=40,
        steps_planned=40,
        chains=3,
        world_size=2,
        ledger_digest="ab" * 32,
        self_check="passed",
        unsafe=False,
        model_class="RobertaForSequenceClassification",
        num_trainable=123457,
        versions={"torch": "9.8.7"},
    )

    def make(plan: dict[str, Any] | None = None, **changes: Any) -> RunFacts:
        return dataclasses.replace(facts, plan=facts.plan | (plan or {}), **changes)

    return make
