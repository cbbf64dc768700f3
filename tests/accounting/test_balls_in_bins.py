"""Balls in bins: Monte Carlo deltas, their verification, and what the accountants are told.

Deltas are within 4 standard errors of known values (a false alarm in 16,000 each). Noise for the settings of the seed
paper, with full verifications (minutes): ``pytest tests/accounting/test_balls_in_bins.py -m slow``.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from scipy import stats

from hf_dpopt.accounting import accountants, certificates
from hf_dpopt.accounting.certificates import (
    Certificate,
    calibrate_balls_in_bins,
    largest_accepted_mean,
    verified_epsilon,
    verify,
)
from hf_dpopt.accounting.random_allocation import (
    BallsInBinsDpEvent,
    balls_in_bins_epsilon,
    bin_grams,
    bin_lags,
    without_amplification,
)
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import BandedInverse, BandedToeplitz, IdentityStrategy, NuDPFTRL, Participation
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.tree import TreeAggregation
from tests.reference.balls_in_bins import balls_in_bins_delta

EVENT = BallsInBinsDpEvent(NuDPFTRL(0.1), 4.0, 64, 16)


def _normalized(num_steps):
    bands = BandedToeplitz((1.0, 0.5)).strategy_matrix(num_steps)
    return DenseStrategy(bands / np.linalg.norm(bands, axis=0))


def test_one_bin_is_the_gaussian_mechanism():
    strategy, stddev, epsilon = NuDPFTRL(0.1), 4.0, 1.0
    found = balls_in_bins_delta(strategy, stddev, epsilon, num_steps=8, num_bins=1, num_samples=400_000)
    shift = strategy.sensitivity(8, Participation(8, 1)) / stddev
    want = stats.norm.cdf(shift / 2 - epsilon / shift) - np.exp(epsilon) * stats.norm.cdf(-shift / 2 - epsilon / shift)
    assert found.remove == pytest.approx(want, abs=4 * found.remove_error)
    assert found.add == pytest.approx(want, abs=4 * found.add_error)


@pytest.mark.parametrize("stddev, epsilon", [(0.8, 1.0), (0.5, 3.0)])
def test_two_bins_of_one_step(stddev, epsilon):
    """The pair in one dimension of two: summed over a grid on the plane."""
    found = balls_in_bins_delta(IdentityStrategy(), stddev, epsilon, num_steps=2, num_bins=2, num_samples=400_000)

    grid = np.arange(-6, 7, 0.005)
    near, far = (stats.norm.pdf(grid, mean, stddev) for mean in (0, 1))
    without = np.outer(near, near)
    with_record = 0.5 * (np.outer(far, near) + np.outer(near, far))

    def delta(first, second):
        return np.maximum(0, first - np.exp(epsilon) * second).sum() * 0.005**2

    assert found.remove == pytest.approx(delta(with_record, without), abs=4 * found.remove_error + 1e-5)
    assert found.add == pytest.approx(delta(without, with_record), abs=4 * found.add_error + 1e-5)


@pytest.mark.parametrize("stddev, remove, add", [(2.0, 0.0577, 0.0552), (4.0, 7.34e-4, 7.02e-4)])
def test_known_values(stddev, remove, add):
    """nu = 0.1, 64 steps, 16 bins, epsilon 1; without amplification delta is 0.218 and 0.0225."""
    strategy = NuDPFTRL(0.1)
    found = balls_in_bins_delta(strategy, stddev, 1.0, num_steps=64, num_bins=16, num_samples=1_000_000)
    spread = 2e-4 if stddev == 2.0 else 5e-6  # the known values' own
    assert found.remove == pytest.approx(remove, abs=4 * (found.remove_error + spread) + 5e-7)
    assert found.add == pytest.approx(add, abs=4 * (found.add_error + spread) + 5e-7)
    known = stddev / strategy.sensitivity(64, Participation(4, 16))
    assert get_epsilon_gaussian(known, found.delta) > 1.0


@pytest.mark.parametrize("n, bins", [(11, 4), (12, 4), (3, 5), (7, 7)])
@pytest.mark.parametrize(
    "make", [lambda n: NuDPFTRL(0.2), lambda n: BandedToeplitz((1.0, 0.5)), lambda n: _normalized(n)]
)
def test_grams_by_definition(make, n, bins):
    strategy = make(n)
    met = [strategy.strategy_matrix(n) @ (np.arange(n) % bins == j) for j in range(bins)]
    gram = bin_grams(strategy, n, bins)
    np.testing.assert_allclose(gram, [[a @ b for a in met] for b in met], atol=1e-14)
    np.testing.assert_allclose(bin_lags(strategy, n, bins), [gram.diagonal(k).max() for k in range(bins)], atol=1e-14)


def test_a_known_bin_is_the_fixed_order():
    sensitivity = EVENT.strategy.sensitivity(64, Participation(4, 16))
    assert without_amplification(EVENT).noise_multiplier == pytest.approx(4.0 / sensitivity)


# --- verification ---


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "stddev, epsilon, num_steps, num_bins", [(3.0, 1.0, 64, 16), (1.0, 3.0, 5, 5), (40.0, 0.0, 64, 16)]
)
def test_shares_are_below_their_ceilings_and_unbiased(stddev, epsilon, num_steps, num_bins):
    """Against plain samples of the loss, within 6 standard errors of the two."""
    gram = bin_grams(NuDPFTRL(0.1), num_steps, num_bins)
    shares = certificates.Shares(gram, stddev, epsilon)
    drawn = shares.draw(40_000, np.random.default_rng())
    assert (drawn >= 0).all() and (drawn <= shares.ceilings[:, None]).all()
    rng, num = np.random.default_rng(), 400_000
    noise = rng.standard_normal((num, num_bins)) @ (np.linalg.cholesky(gram + 1e-12 * np.eye(num_bins)).T * stddev)
    with_record = noise + gram[rng.integers(num_bins, size=num)]
    for direction, (products, sign) in enumerate([(with_record, 1), (noise, -1)]):
        loss = sign * np.log(np.exp((2 * products - np.diag(gram)) / (2 * stddev**2)).mean(axis=1))
        plain = -np.expm1(np.minimum(0, epsilon - loss))
        error = math.hypot(plain.std() / math.sqrt(num), drawn[direction].std() / 200)
        assert drawn[direction].mean() == pytest.approx(plain.mean(), abs=6 * error)


@pytest.mark.parametrize(
    "limit, ceiling, num, false_accept",
    [(1e-5, 1.0, 2_000_000, 1e-4), (1e-3, 0.01, 3000, 1e-2), (9e-3, 0.01, 500, 1e-3)],
)
def test_thresholds_are_passed_too_rarely(limit, ceiling, num, false_accept):
    """Exact for shares that are 0 or the ceiling: ``mu P[accepted] <= limit * false_accept`` from the limit on."""
    threshold = largest_accepted_mean(limit, ceiling, num, false_accept)
    assert 0 < threshold < limit
    hits = math.floor(threshold / ceiling * num)
    for mu in limit * np.geomspace(1, ceiling / limit, 50):
        accepted = stats.binom.cdf(hits, num, min(1.0, mu / ceiling))
        assert mu * accepted <= limit * false_accept * (1 + 1e-9)
    # and not needlessly low: 4 standard deviations of the bound further up, more would pass
    further = stats.binom.isf(1 - 5 * false_accept, num, limit / ceiling) + math.sqrt(num * limit / ceiling)
    assert hits <= further


def test_thresholds_at_the_edges():
    assert largest_accepted_mean(0.1, 0.1, 10, 1e-3) == math.inf
    with pytest.raises(DPConfigError, match="num_samples > "):
        largest_accepted_mean(1e-5, 1.0, 1000, 1e-3)
    with pytest.raises(DPConfigError, match="failure=0.5"):
        verify(EVENT, 1.0, 1e-3, failure=0.5)
    with pytest.raises(DPConfigError, match="delta in"):
        verify(EVENT, 1.0, 1.5)


def test_the_whole_statement_holds_for_any_true_deltas():
    """The delta of a search is the sum of w_i d_i: at most delta, whether the mechanisms are good or bad."""
    delta, failure, attempts, ceiling, num = 1e-3, 0.05, 4, 0.01, 20_000
    limit = delta / (1 + failure)
    hits = math.floor(largest_accepted_mean(limit, ceiling, num, failure / attempts) / ceiling * num)
    rng = np.random.default_rng()
    worst = 0.0
    for spread in (0.003, 0.03, 0.3) * 200:
        true = np.sort(limit * np.exp(rng.normal(0, spread, attempts)))[::-1]
        accepted = stats.binom.cdf(hits, num, np.minimum(1, true / ceiling))
        reached = np.concatenate([[1.0], np.cumprod(1 - accepted)[:-1]])
        worst = max(worst, (reached * accepted * true).sum())
    assert 0.5 * delta < worst <= delta


def test_too_little_noise_is_hardly_ever_accepted():
    """True delta 10% above the limit: 60 fresh verifications, each false with probability <= 0.1.

    More than 20 acceptances have probability < 1e-6. With delta well below, nearly all accept.
    """
    true = balls_in_bins_delta(EVENT.strategy, 4.0, 1.0, num_steps=64, num_bins=16, num_samples=400_000)
    assert true.remove_error < 0.01 * true.remove
    bad = [verify(EVENT, 1.0, true.delta / 1.1, num_samples=20_000, failure=0.1).is_accepted for _ in range(60)]
    good = [verify(EVENT, 1.0, true.delta * 2, num_samples=20_000, failure=0.1).is_accepted for _ in range(20)]
    assert sum(bad) <= 20 and sum(good) >= 15


def test_samples_are_fresh():
    first, second = (verify(EVENT, 1.0, 1e-3, num_samples=20_000) for _ in range(2))
    assert first.remove != second.remove and first.add != second.add


def test_verified_epsilon_is_kept_and_near_the_truth():
    found = verified_epsilon(EVENT, 1e-4, num_samples=200_000)
    assert verified_epsilon(EVENT, 1e-4, num_samples=200_000) is found and found.is_accepted
    truth = balls_in_bins_delta(EVENT.strategy, 4.0, found.epsilon, num_steps=64, num_bins=16, num_samples=100_000)
    assert 0.3e-4 < truth.delta < 1e-4
    assert found.epsilon < balls_in_bins_epsilon(((EVENT, 1),), 1e-4, "zero_out")


# --- calibration, and what the accountants ask ---


@pytest.mark.slow
def test_calibration_reaches_the_target():
    found = calibrate_balls_in_bins(EVENT.strategy, 64, 16, epsilon=1.0, delta=1e-4, num_samples=200_000)
    truth = balls_in_bins_delta(
        EVENT.strategy, found.event.noise_multiplier, 1.0, num_steps=64, num_bins=16, num_samples=100_000
    )
    assert 0.3e-4 < truth.delta < 1e-4 and found.epsilon == 1.0 and found.num_samples == 200_000
    assert found.is_accepted and found.covers(found.event, 1e-4)
    json.dumps(found.parameters())


def test_independent_noise_needs_no_samples():
    assert calibrate_balls_in_bins(IdentityStrategy(), 64, 16, epsilon=1.0, delta=1e-4, num_samples=200_000) is None


def test_a_calibration_that_cannot_be_proven_is_refused():
    with pytest.raises(DPConfigError, match="epsilon=0"):
        calibrate_balls_in_bins(EVENT.strategy, 64, 16, epsilon=0.0, delta=1e-4)
    with pytest.raises(DPConfigError, match="samples"):
        verify(EVENT, 1.0, 1e-4, num_samples=3)


def test_certificates_cover_what_they_prove_and_no_more():
    certificate = verify(EVENT, 1.05, 1e-3, num_samples=100_000, failure=0.1)
    assert certificate.is_accepted
    plain = balls_in_bins_epsilon(((EVENT, 1),), 1e-3, "zero_out")
    assert certificate.covers(EVENT, 1e-3) and certificate.epsilon == 1.05 < plain
    assert accountants.epsilon(EVENT, 1e-3, "zero_out").epsilon == plain  # it is not told of any
    for allowed in [{"num_steps": 60}, {"noise_multiplier": 4.5}]:
        assert certificate.covers(_changed(**allowed), 1e-3)
    for other in [{"num_steps": 65}, {"noise_multiplier": 3.99}, {"num_bins": 17}, {"strategy": NuDPFTRL(0.2)}]:
        assert not certificate.covers(_changed(**other), 1e-3)
    assert not certificate.covers(EVENT, 0.9e-3)
    refused = verify(EVENT, 0.3, 1e-3, num_samples=20_000)
    assert not refused.is_accepted and not refused.covers(EVENT, 1e-3)


def _changed(**values):
    given = {"strategy": EVENT.strategy, "noise_multiplier": 4.0, "num_steps": 64, "num_bins": 16, **values}
    return BallsInBinsDpEvent(**given)


def test_a_strategy_with_a_horizon_is_covered_for_it_alone():
    strategy = _normalized(64)
    assert not strategy.anytime
    event = BallsInBinsDpEvent(strategy, 4.0, 64, 16)
    certificate = Certificate(event, 1.0, 1e-3, 0.0, 0.0, 1.0, 1.0, 10, 0.1, 1)
    assert certificate.covers(event, 1e-3)
    shorter = Certificate(BallsInBinsDpEvent(_normalized(63), 4.0, 63, 16), 1.0, 1e-3, 0.0, 0.0, 1.0, 1.0, 10, 0.1, 1)
    assert not certificate.covers(shorter.event, 1e-3) and not shorter.covers(event, 1e-3)


def test_the_accountant_takes_chains_and_gaussians_and_nothing_else():
    one = balls_in_bins_epsilon(((EVENT, 1),), 1e-5, "zero_out")
    assert one == balls_in_bins_epsilon(((EVENT, 1),), 1e-5, "add_or_remove_one")
    two = balls_in_bins_epsilon(((EVENT, 2),), 1e-5, "zero_out")
    mixed = balls_in_bins_epsilon(((EVENT, 1), (GaussianDpEvent(2.0), 1)), 1e-5, "zero_out")
    known = accountants.epsilon(without_amplification(EVENT), 1e-5, "zero_out").epsilon
    assert one < two and one < mixed and one < known
    assert balls_in_bins_epsilon(((EVENT, 1),), 1e-5, "replace_one") is None
    assert balls_in_bins_epsilon(((GaussianDpEvent(2.0), 1),), 1e-5, "zero_out") is None
    other = ((EVENT, 1), (PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), 1))
    assert balls_in_bins_epsilon(other, 1e-5, "zero_out") is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "epsilon, nu, low, high", [(1.0, 0.05, 7.75, 8.15), (4.0, 0.01, 4.85, 5.0), (8.0, 0.0037, 4.2, 4.28)]
)
def test_noise_of_the_seed_paper(epsilon, nu, low, high):
    """50,000 records, batches of 500, 2000 steps, delta 1e-5."""
    found = calibrate_balls_in_bins(NuDPFTRL(nu), 2000, 100, epsilon=epsilon, delta=1e-5)
    assert low < found.event.noise_multiplier < high and found.is_accepted


@pytest.mark.parametrize(
    "arguments, mend",
    [
        ({"num_bins": 0}, "num_bins"),
        ({"num_steps": 0}, "num_steps"),
        ({"strategy": BandedToeplitz((1, -0.5))}, "negative entries"),
        ({"strategy": BandedInverse((1, 0.5))}, "negative entries"),
        ({"strategy": TreeAggregation()}, "not square"),
    ],
)
def test_bad_input(arguments, mend):
    given = {"strategy": NuDPFTRL(0.1), "noise_multiplier": 1.0, "num_steps": 8, "num_bins": 2, **arguments}
    with pytest.raises(DPConfigError, match=mend):
        BallsInBinsDpEvent(**given)
