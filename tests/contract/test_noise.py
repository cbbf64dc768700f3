"""Every registered noise mechanism keeps the contract; a new one is found by itself."""

from __future__ import annotations

import pytest

from hf_dpopt.noise import MECHANISMS
from tests.contract import noise


@pytest.mark.parametrize("check", noise.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism(name, check):
    check(name)
