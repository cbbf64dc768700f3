"""A part of the drawn cases, always the same: each ends in a run or in one line, and nothing is charged for an error."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from tests.fuzz.drawing import PARTS, drawn  # needs hypothesis

CASES, SEED = 60, 5
SECONDS = 20.0  # of a processor that is slow, or shared; the command measures with the five that are promised


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("part", PARTS)
def test_bad_input_ends_in_a_run_or_in_one_line(part, tmp_path):
    found = drawn(part, max(2, round(CASES * PARTS[part])), SEED, tmp_path, seconds=SECONDS)
    ends = [(case, end) for case, end, _ in found]
    assert ends and not [f"{case!r}: {end}" for case, end in ends if not end.is_good]
