"""`PrivacyConfig`: every value out of range is refused with the way out."""

from __future__ import annotations

import math

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.config import PrivacyConfig

VALID = {"target_epsilon": 8.0, "expected_batch_size": 64}


def config(**changes):
    return PrivacyConfig(**{**VALID, **changes})


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({"target_epsilon": None}, "Neither of target_epsilon and noise_multiplier is.*Give exactly one"),
        ({"noise_multiplier": 1.0}, "Both target_epsilon and noise_multiplier are.*Give exactly one"),
        ({"target_epsilon": 0.0}, "Use a finite number > 0; 1 to 8 is usual"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan.*Use a finite number > 0"),
        ({"target_epsilon": "8"}, "target_epsilon='8'.*Use a finite number > 0"),
        (
            {"target_epsilon": None, "noise_multiplier": -0.1},
            "noise_multiplier=-0.1 .*Use a finite number > 0.*NOT PRIVATE",
        ),
        ({"target_epsilon": None, "noise_multiplier": math.nan}, "noise_multiplier=nan.*Use a finite number > 0"),
        ({"clipping_norm": 0.0}, "clipping_norm=0.0.*Use a finite number > 0"),
        ({"clipping_norm": math.nan}, "clipping_norm=nan.*Use a finite number > 0"),
        ({"clipping_norm": None}, "clipping_norm=None.*Use a finite number > 0"),
        ({"expected_batch_size": 0}, "Use an integer >= 1: the records of one optimizer step"),
        ({"expected_batch_size": 8.0}, "expected_batch_size=8.0.*Use an integer >= 1"),
        ({"expected_batch_size": True}, "expected_batch_size=True.*Use an integer >= 1"),
        ({"target_delta": 1.0}, "outside \\(0, 1\\). Use at most 1 / number of records"),
        ({"target_delta": math.nan}, "target_delta=nan.*Use a number in \\(0, 1\\)"),
        ({"clipping": "global"}, "clipping='global'.*'flat', 'per_layer', 'automatic'"),
        ({"sampling": "shuffle"}, "sampling='shuffle'.*'auto', 'poisson', 'truncated_poisson', 'fixed_order'"),
        ({"adjacency": "replace"}, "adjacency='replace'.*'add_or_remove_one', 'zero_out', 'replace_one'"),
        ({"privacy_unit": "user"}, "records_per_user=None.*Use an integer >= 1"),
        ({"privacy_unit": "user", "records_per_user": 0}, "records_per_user=0.*Use an integer >= 1"),
        ({"records_per_user": 4}, "records_per_user=4.*Add privacy_unit='user'"),
        ({"sampling": "capped_poisson"}, "capped_poisson.*Add privacy_unit='user'"),
        ({"local_training": {"learning_rate": 1}}, "add privacy_unit='user'"),
        ({"privacy_unit": "user", "records_per_user": 4, "user_weighting": "sum"}, "user_weighting='sum'.*'mean'"),
        ({"privacy_unit": "token"}, "privacy_unit='token'.*'example', 'user'"),
        ({"noise_mechanism": "laplace"}, "noise_mechanism='laplace'.*'gaussian'"),
        ({"unsafe_fixed_noise_key": "secret"}, "not 64 hexadecimal digits. Use '00' \\* 32 in a test"),
        ({"unsafe_fixed_noise_key": b"\0" * 32}, "not 64 hexadecimal digits"),
    ],
)
def test_refuses(changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        config(**changes)


def test_the_refused_key_is_not_printed():
    with pytest.raises(DPConfigError) as caught:
        config(unsafe_fixed_noise_key="c0ffee")
    assert "c0ffee" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, private",
    [
        ({}, True),
        ({"target_epsilon": None, "noise_multiplier": 1e-9}, True),
        ({"target_epsilon": None, "noise_multiplier": 0.0}, False),
        ({"target_epsilon": None, "noise_multiplier": 0}, False),
        ({"unsafe_fixed_noise_key": "00" * 32}, False),
    ],
)
def test_is_private(changes, private):
    assert config(**changes).is_private is private


@pytest.mark.parametrize(
    "changes, units",
    [
        ({}, 1000),
        ({"privacy_unit": "user", "records_per_user": 8, "sampling": "truncated_poisson"}, 1000),
        ({"privacy_unit": "user", "sampling": "capped_poisson", "records_per_user": 8}, 125),
        ({"privacy_unit": "user", "sampling": "capped_poisson", "records_per_user": 2000}, 1),
    ],
)
def test_units_are_users_unless_their_records_are_drawn_one_by_one(changes, units):
    """The default delta is made of them: fewer units than there are would allow a larger one."""
    assert config(**changes).num_units(1000) == units
