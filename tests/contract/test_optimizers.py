"""Every registered optimizer keeps the contract; a new one is found by itself."""

from __future__ import annotations

import pytest

from hf_dpopt.optim import OPTIMIZERS
from tests.contract import optimizers


@pytest.mark.parametrize("check", optimizers.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, check):
    check(name)
