"""Lower bounds on epsilon: never too high more often than they say, 0 for nothing, strong for a Gaussian release."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpopt import DPConfigError
from hf_dpopt.audit.auditing import Audit
from hf_dpopt.audit.bounds import (
    Guesses,
    epsilon_of_gaussian,
    guess,
    lower_bounds,
    one_run_p_value,
)

DELTA = 1e-5


def _one_release(mu: float, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log likelihood ratios of a Gaussian mechanism, and coins."""
    generator = np.random.default_rng(seed)
    coins = generator.random(num) < 0.5
    return mu * (mu * coins + generator.standard_normal(num)) - mu**2 / 2, coins


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 3.0])
def test_bounds_are_too_high_as_often_as_they_may(mu):
    """200 runs: 5 % are 10, and more than 21 have a probability of 1e-3."""
    true = epsilon_of_gaussian(mu, DELTA)
    above = dict.fromkeys(("one_run", "independent"), 0)
    for seed in range(200):
        for method, bound in lower_bounds(*_one_release(mu, 200, seed), delta=DELTA, threshold=0.0).items():
            above[method] += bound > true
    assert all(count <= 21 for count in above.values()), above
    assert above["independent"] > 0, "a bound that is never too high is not as strong as it could be"


def test_one_run_of_a_thousand_canaries_shows_most_of_a_gaussian_release():
    mu = 0.925
    true = epsilon_of_gaussian(mu, DELTA)
    assert true == pytest.approx(4, abs=0.01)
    found = [lower_bounds(*_one_release(mu, 1000, seed), delta=DELTA, threshold=0.0) for seed in range(20)]
    assert np.median([one["independent"] for one in found]) > 0.75 * true
    assert np.median([one["one_run"] for one in found]) > 1.0


def test_p_value_is_that_of_randomised_response_and_bounds_more():
    """At delta 0 the p-value is the binomial tail, which randomised response reaches; delta adds at most 2 m delta."""
    guesses = Guesses(num_canaries=10, num_guesses=10, num_correct=8)
    right = 1 / (1 + math.exp(-1.0))
    tail = sum(math.comb(10, k) * right**k * (1 - right) ** (10 - k) for k in range(8, 11))
    assert one_run_p_value(guesses, 1.0, 0.0) == pytest.approx(tail, rel=1e-12)
    with_delta = one_run_p_value(guesses, 1.0, 1e-3)
    best = max(
        (sum(math.comb(10, k) * right**k * (1 - right) ** (10 - k) for k in range(8 - i, 8))) / i for i in range(1, 9)
    )
    assert with_delta == pytest.approx(tail + 2 * 10 * 1e-3 * best, rel=1e-12)


def test_p_value_holds_for_a_mechanism_that_gives_everything_away_with_probability_delta():
    """With delta a canary's bit is published, else it is told by randomised response: exact law by enumeration."""
    epsilon, delta, m = 0.7, 0.05, 6
    right = delta + (1 - delta) / (1 + math.exp(-epsilon))
    for v in range(m + 1):
        exact = sum(math.comb(m, k) * right**k * (1 - right) ** (m - k) for k in range(v, m + 1))
        assert exact <= one_run_p_value(Guesses(m, m, v), epsilon, delta) + 1e-12


def test_guesses_are_the_extremes():
    scores = np.array([5.0, -3.0, 0.1, 4.0, -2.0, 0.0])
    coins = np.array([1, 0, 1, 0, 0, 1])
    made = {one.num_guesses: one.num_correct for one in guess(scores, coins)}
    assert made == {2: 2, 6: 4}, "5 in, -3 out; then 5, 4, 0.1 in and -3, -2, 0 out"


@pytest.mark.parametrize("order", [1, -1])
def test_equal_scores_carry_nothing_in_whatever_order_the_rows_stand(order):
    """A file that lists those who took part first, or last, with a score that is the same for all."""
    coins = np.sort(np.random.default_rng(0).random(400) < 0.5)[::order]
    assert lower_bounds(np.zeros(400), coins, delta=DELTA) == {"one_run": 0.0}


def test_the_bound_of_the_verdict_is_fixed_beforehand():
    """The larger of two bounds would be too high more often than each of them."""
    bounds = {"one_run": 9.0, "independent": 1.5}
    found = Audit(4.0, DELTA, bounds, (), 0.05, {}, np.zeros(2), np.zeros(2, dtype=bool))
    assert "at least 1.50 (independent" in found.verdict and "chance" not in found.verdict


@pytest.mark.parametrize(
    ("scores", "coins", "options", "match"),
    [
        ([1.0, np.nan], [1, 0], {}, "finite score"),
        ([1.0], [1], {}, "at least 2"),
        ([1.0, 2.0, 3.0], [1, 0], {}, "finite score"),
        ([1.0, 2.0], [1, 2], {}, "0 or 1"),
        ([1.0, 2.0], [1, 0], {"delta": 0.0}, "delta=0.0"),
        ([1.0, 2.0], [1, 0], {"significance": 1.0}, "significance=1.0"),
    ],
)
def test_what_makes_no_bound_is_refused(scores, coins, options, match):
    with pytest.raises(DPConfigError, match=match):
        lower_bounds(np.array(scores), np.array(coins), **{"delta": DELTA, **options})
