"""Monte Carlo deltas of balls in bins, within 4 standard errors of known values (a false alarm in 16,000 each)."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hf_dpopt.accounting.balls_in_bins import balls_in_bins_delta, bin_grams
from hf_dpopt.accounting.correlated import CorrelatedMechanism
from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms.strategies import BandedInverse, BandedToeplitz, IdentityStrategy, NuDPFTRL, Participation


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
    spread = 2e-4 if stddev == 2.0 else 0  # the known values' own
    assert found.remove == pytest.approx(remove, abs=4 * (found.remove_error + spread) + 5e-7)
    assert found.add == pytest.approx(add, abs=4 * (found.add_error + spread) + 5e-7)
    fixed = CorrelatedMechanism(
        strategy=strategy, participation=Participation(4, 16), num_steps=64, draw_stddev=stddev
    )  # fmt: skip
    assert fixed.epsilon(found.delta) > 1.0


def test_grams_by_definition():
    strategy, n, bins = NuDPFTRL(0.2), 11, 4
    met = [strategy.strategy_matrix(n) @ (np.arange(n) % bins == j) for j in range(bins)]
    np.testing.assert_allclose(bin_grams(strategy, n, bins), [[a @ b for a in met] for b in met])


@pytest.mark.parametrize(
    "arguments, mend",
    [
        ({"num_bins": 0}, "outside"),
        ({"num_bins": 9}, r"outside \[1, 8\]"),
        ({"draw_stddev": 0.0}, "draw_stddev > 0"),
        ({"epsilon": -1.0}, "epsilon >= 0"),
        ({"strategy": BandedToeplitz((1, -0.5))}, "negative entries"),
        ({"strategy": BandedInverse((1, 0.5))}, "negative entries"),
    ],
)
def test_bad_input(arguments, mend):
    given = {"strategy": NuDPFTRL(0.1), "draw_stddev": 1.0, "epsilon": 1.0, "num_steps": 8, "num_bins": 2, **arguments}
    with pytest.raises(DPConfigError, match=mend):
        balls_in_bins_delta(**given, num_samples=10)
