"""Frozen outputs: what a plan promises, a statement says, a stream draws and a step releases changes on purpose only.

A difference here is either a fault or a `privacy:` commit that says why, and writes the file anew
(`python -m tests.frozen --write`). Numbers are compared to 1e-5, for other processors; the command compares bits.
"""

from __future__ import annotations

import pytest

from tests.frozen import cases, compare

FROZEN = compare.frozen()
CASES = dict(cases.every_output())


def test_nothing_was_added_or_lost():
    assert FROZEN.keys() == CASES.keys()


@pytest.mark.slow_but(24)
@pytest.mark.parametrize("name", CASES)
def test_an_output_is_what_it_was(name):
    assert not list(compare.differences({name: FROZEN[name]}, {name: CASES[name]()}, tolerance=1e-5))
