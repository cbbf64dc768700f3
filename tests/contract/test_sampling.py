"""Every registered sampler keeps the contract; a new one is found by itself."""

from __future__ import annotations

import pytest

from hf_dpopt.sampling import SAMPLERS
from tests.contract import sampling


@pytest.mark.parametrize("check", sampling.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler(name, check):
    check(name)
