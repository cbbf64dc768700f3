"""Every registered noise mechanism keeps the contract; a new one is found by itself."""

from __future__ import annotations

import json

import pytest

from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.make import make_plan
from tests.contract import noise


@pytest.mark.parametrize("check", noise.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism(name, check):
    check(name)


def test_a_plan_of_normalized_bands_is_resumed():
    """Their base is of one kind, which the ledger does not name."""
    config = PrivacyConfig(
        noise_multiplier=0.7, expected_batch_size=noise.BATCH_SIZE, noise_mechanism="banded",
        noise_kwargs={"num_bands": 3, "column_normalize": True},
    )  # fmt: skip
    sizes = {"num_examples": noise.NUM_EXAMPLES, "num_steps": noise.NUM_STEPS}
    plan = make_plan(config, **sizes)
    recorded = json.loads(json.dumps(plan.public_dict()))
    assert make_plan(config, **sizes, recorded=recorded).strategy == plan.strategy
