"""Options that are refused where the weights lie in shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.refusals.training_arguments import check_shards

USERS = dict(privacy_unit="user", records_per_user=4)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "opening query": (dict(preconditioner="one_query"), {}, None, "asks a query before the first step.*dp2_"),
    "public gradients": ({}, {}, [1], "Gradients of public records.*plain data parallel"),
    "local users": ({**USERS, "local_training": {"learning_rate": 0.1}}, {}, None, "train locally.*leave local"),
    "large users": (USERS, dict(per_device_train_batch_size=3), None, "records_per_user=4 is more than.*Raise --per"),
}


def check(options: dict[str, Any], changed: dict[str, Any], public: Any) -> None:
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=8, **options)
    plan = make_plan(config, num_examples=100, num_steps=5)
    args = SimpleNamespace(**{"per_device_train_batch_size": 4, **changed})
    check_shards(plan, TrainerInputs(args=args, public_dataset=public))


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    options, changed, public, message = CASES[case]
    with pytest.raises(DPConfigError, match=message):
        check(options, changed, public)


@pytest.mark.parametrize(
    "options",
    [{}, USERS, dict(preconditioner="dp2_rmsprop", preconditioner_kwargs={"delay": 2}), dict(noise_mechanism="blt")],
)
def test_allowed(options):
    check(options, {}, None)
