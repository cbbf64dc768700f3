"""No tuning here is read from disk, and none is written to the home directory of whoever runs the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DPOPT_CACHE_DIR", os.devnull)
        yield
