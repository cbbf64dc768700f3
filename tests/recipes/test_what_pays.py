"""The table of what pays where."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recipes.paper import what_pays
from recipes.paper.runs import unpaired


def test_the_page_is_made_of_the_results():
    assert what_pays.PAGE.read_text(encoding="utf-8") == what_pays.page(), "python -m recipes.paper.what_pays --write"


def test_intervals_of_unpaired_runs_are_those_of_scipy():
    rng = np.random.default_rng(0)
    with_it, without = rng.normal(1.0, 0.3, 5).tolist(), rng.normal(0.0, 2.0, 3).tolist()
    gain, half = unpaired(with_it, without)
    low, high = stats.ttest_ind(with_it, without, equal_var=False).confidence_interval(0.95)
    assert (gain - half, gain + half) == pytest.approx((low, high))


@pytest.mark.parametrize(("gain", "half", "verdict"), [(1.0, 0.9, "pays"), (-1, 0.9, "costs"), (1.0, 1.1, "not seen")])
def test_a_verdict_needs_an_interval_on_one_side(gain, half, verdict):
    made = what_pays.Effect("m", "a", "t", 1.0, gain, half)
    assert made.verdict == verdict
