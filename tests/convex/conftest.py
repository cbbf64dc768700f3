"""What finished runs of a head forget."""

from __future__ import annotations

import pytest

from hf_dpopt.convex import HeadRun


@pytest.fixture
def keys(monkeypatch):
    """The chains of runs, which forget their keys when they are finished."""
    seen = []
    choose = HeadRun._chain
    monkeypatch.setattr(HeadRun, "_chain", lambda self, ledger: seen.append(choose(self, ledger)) or seen[-1])
    return seen
