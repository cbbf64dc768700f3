"""Sampling-free deltas: exact where they can be, never below the truth elsewhere.

Monte Carlo values are estimates; a bound is compared with them at 4 standard errors (a false alarm in 30,000 each).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from hf_dpopt.accounting import random_allocation
from hf_dpopt.accounting.random_allocation import (
    Law,
    Ring,
    Tree,
    add,
    best_tree,
    bin_grams,
    bin_lags,
    grid_step,
    lognormal,
    mean,
    product,
    trim,
)
from hf_dpopt.noise import BandedToeplitz, IdentityStrategy, NuDPFTRL
from tests.reference.balls_in_bins import balls_in_bins_delta
from tests.reference.gaussian_mixtures import gaussian_delta

pytestmark = pytest.mark.slow


def deltas(ring, epsilon, tree):
    """Bounds of one tree, record removed and added."""
    assert tree.fits(ring.num_bins)
    law = random_allocation.ratio_law(ring, tree, 1e-15, grid_step(ring.variance * ring.chains))
    return law.deltas(epsilon)


def brute_force(gram, epsilon, width=0.03, reach=8):
    """Both deltas summed over a grid in the space of the ``m_j``; they are the rows of the root."""
    met, num_bins = np.linalg.cholesky(gram), len(gram)
    axis = np.arange(-reach, reach + met.max(), width)
    points = np.stack(np.meshgrid(*[axis] * num_bins, indexing="ij"), axis=-1).reshape(-1, num_bins)
    without = np.exp(-(points**2).sum(axis=1) / 2) * (width / math.sqrt(2 * math.pi)) ** num_bins
    ratio = np.exp(points @ met.T - np.diag(gram) / 2).mean(axis=1)
    factor = math.exp(epsilon)
    return (without * np.maximum(0, ratio - factor)).sum(), (without * np.maximum(0, 1 - factor * ratio)).sum()


def lags_of(gram):
    return np.array([gram.diagonal(k).max() for k in range(len(gram))])


# --- exact cases ---


@pytest.mark.parametrize("stddev, epsilon", [(0.5, 2.0), (1.0, 1.0), (3.0, 0.5)])
def test_one_bin_is_the_gaussian_mechanism(stddev, epsilon):
    want = gaussian_delta(1 / stddev, epsilon)
    for found in deltas(Ring.of(np.ones(1), stddev), epsilon, Tree((1,), (1,))):
        assert want <= found <= want * 1.002


@pytest.mark.parametrize("num_bins, variance, epsilon", [(2, 1.5, 0.5), (2, 4.0, 2.0), (3, 1.0, 0.3)])
def test_independent_noise_is_exact(num_bins, variance, epsilon):
    wide = 0.12 if num_bins == 3 else 0.03
    want = brute_force(variance * np.eye(num_bins), epsilon, wide, reach=6)
    found = deltas(Ring.of(variance * np.eye(num_bins)[0], 1.0), epsilon, Tree((num_bins,), (1,)))
    np.testing.assert_allclose(found, want, rtol=4e-3)
    assert all(f >= w * (1 - 1e-3) for f, w in zip(found, want, strict=True))


def test_equally_correlated_bins_are_exact():
    """Every pair with the same covariance is a tree itself."""
    gram = np.full((2, 2), 0.7) + 0.9 * np.eye(2)
    found = deltas(Ring.of(gram[0], 1.0), 0.8, Tree((2,), (1,)))
    np.testing.assert_allclose(found, brute_force(gram, 0.8, reach=6), rtol=4e-3)


def test_a_hundred_bins_of_independent_noise():
    """20 epochs of 100 steps; the known noise at epsilon 1 and delta 1e-5 is 3.9."""
    gram = 20 * np.eye(100)
    found = deltas(Ring.of(gram[0], 3.89), 1.0, Tree((100,), (1,)))
    truth = balls_in_bins_delta(IdentityStrategy(), 3.89, 1.0, num_steps=2000, num_bins=100, num_samples=40_000)
    assert found[0] == pytest.approx(truth.remove, abs=4 * truth.remove_error + 5e-3 * truth.remove)
    assert found[1] == pytest.approx(truth.add, abs=4 * truth.add_error + 0.05 * truth.add)
    assert random_allocation.epsilon([Ring.of(gram[0], 3.905)], 1e-5) == pytest.approx(1.0, abs=3e-3)


# --- never below the truth ---


@pytest.mark.parametrize("nu", [1.0, 0.3, 0.05, 0.005])
@pytest.mark.parametrize("num_steps, num_bins", [(64, 16), (30, 30), (50, 7), (10, 16)])
def test_never_below_monte_carlo(nu, num_steps, num_bins):
    strategy = NuDPFTRL(nu)
    lags = bin_lags(strategy, num_steps, num_bins)
    for share, epsilon in [(0.6, 0.5), (1.2, 2.0)]:  # of the loss variance
        stddev = math.sqrt(lags[0] / share)
        truth = balls_in_bins_delta(
            strategy, stddev, epsilon, num_steps=num_steps, num_bins=num_bins, num_samples=40_000
        )  # fmt: skip
        ring = Ring.of(lags, stddev)
        for tree in {best_tree(ring, 1e-4), Tree((num_bins,), (1,)), Tree((2, 2), (num_bins // 2, 1))}:
            remove, added = deltas(ring, epsilon, tree)
            assert remove >= truth.remove - 4 * truth.remove_error and added >= truth.add - 4 * truth.add_error
            known = gaussian_delta(math.sqrt(share), epsilon)
            assert max(remove, added) <= known * 1.01


def test_independent_bins_and_noise_that_protects_nothing_need_no_search():
    for gram, stddev in ((20 * np.eye(16)[0], 5.0), (np.full(16, 1e6), 1.0)):
        assert best_tree(Ring.of(gram, stddev), 1e-4) == Tree((16,), (1,))


@pytest.mark.parametrize(
    "tree", [Tree((3, 2), (4, 1)), Tree((2, 2, 2), (6, 3, 1)), Tree((12,), (1,)), Tree((5,), (2,))]
)
@pytest.mark.parametrize("strategy", [NuDPFTRL(0.1), BandedToeplitz((1.0, 0.6, 0.3))])
def test_a_tree_is_above_every_rotation(tree, strategy):
    """The matrix of the tree, built by hand, is above the Gram matrix of its bins wherever the ring is turned."""
    gram = bin_grams(strategy, 40, 12)
    variances = tree.variances(Ring.of(lags_of(gram), 1.0))
    leaves = list(itertools.product(*(range(n) for n in tree.arities)))
    assert (variances >= 0).all()
    bins = [sum(a * t for a, t in zip(leaf, tree.strides, strict=True)) for leaf in leaves]
    assert sorted(bins) == sorted(tree.bins()) and tree.fits(12)
    for i, j in itertools.product(range(len(leaves)), repeat=2):
        common = next((k for k, (a, b) in enumerate(zip(leaves[i], leaves[j], strict=True)) if a != b), None)
        raised = variances.sum() if common is None else variances[: common + 1].sum()
        for turn in range(12):
            assert raised >= gram[(bins[i] + turn) % 12, (bins[j] + turn) % 12] - 1e-12
    assert not Tree((4, 2), (3, 3)).fits(12)


# --- laws ---


def atoms(law):
    return [(0.0, law.zero), *zip(law.values(), law.mass, strict=True)]


@pytest.mark.parametrize("operation, combine", [(add, lambda x, y: x + y), (product, lambda x, y: x * y)])
def test_operations_keep_means_and_raise_convex_functions(operation, combine):
    rng = np.random.default_rng(0)
    first = Law(0.3, -1.2, rng.dirichlet(np.ones(6)) * 0.9, zero=0.1)
    second = Law(0.3, -0.6, rng.dirichlet(np.ones(9)) * 0.8, zero=0.2)
    for a, b in [(first, second), (second, first), (first, first)]:
        found = operation(a, b)
        exact = [(combine(x, y), p * q) for (x, p), (y, q) in itertools.product(atoms(a), atoms(b))]
        for function in [lambda x: 1 + 0 * x, lambda x: x]:
            want = sum(function(x) * p for x, p in exact)
            assert sum(function(x) * p for x, p in atoms(found)) == pytest.approx(want, abs=1e-12)
        for cut in np.linspace(0.1, 4, 23):
            assert sum(max(0, x - cut) * p for x, p in atoms(found)) >= (
                sum(max(0, x - cut) * p for x, p in exact) - 1e-12
            )


def test_lognormals_and_cuts_raise_convex_functions():
    for variance in (0.01, 0.5, 6.0):
        law = lognormal(variance, 0.05, 1e-3)  # a tail that can be seen
        for variant in (law, trim(law, 1e-2)):
            assert variant.mass.sum() + variant.zero == pytest.approx(1, abs=1e-9)
            for epsilon in (-1.0, 0.0, 0.3, 2.0):
                remove, added = variant.deltas(epsilon)
                mu = math.sqrt(variance)
                want = gaussian_delta(mu, epsilon)
                assert remove >= want - 1e-15 and added >= want - 1e-15


def test_mean_of_any_count():
    law = lognormal(0.4, 0.02, 1e-12)
    for count in (1, 2, 3, 7, 12):
        found = mean(law, count, 1e-13)
        values = found.values()
        assert float(found.mass @ values) == pytest.approx(1, abs=1e-9)
        assert float(found.mass @ values**2) == pytest.approx(1 + math.expm1(0.4) / count, rel=1e-3)


# --- epsilon ---


def test_chains_compose():
    one = Ring.of(np.ones(1), 2.0)
    pair = Ring(one.covariances, 1, chains=2)
    mixed = random_allocation.epsilon([one, Ring.of(np.ones(1), 4.0)], 1e-5, gaussian=1 / 9)
    assert mixed == pytest.approx(_known(1 / 4 + 1 / 16 + 1 / 9), rel=2e-3)
    assert random_allocation.epsilon([pair], 1e-5) == pytest.approx(_known(1 / 2), rel=2e-3)
    spread = Ring.of(bin_lags(NuDPFTRL(0.1), 64, 16), 6.0)
    doubled = random_allocation.epsilon([Ring(spread.covariances, 16, chains=2)], 1e-5)
    assert doubled == pytest.approx(random_allocation.epsilon([spread, spread], 1e-5), rel=5e-3)
    assert random_allocation.epsilon([spread], 1e-5) < doubled


def _known(precision):
    return get_epsilon_gaussian(precision**-0.5, 1e-5)


def test_extremes():
    nothing, everything = Ring.of(np.ones(4), 0.01), Ring.of(np.ones(4), 1e6)
    assert random_allocation.epsilon([nothing], 1e-5) == math.inf
    assert random_allocation.epsilon([everything], 1e-5) == 0
    assert random_allocation.epsilon([Ring((0.0, 0.0, 0.0), 4)], 1e-5) == 0


def test_known_bound():
    """50,000 records, batches of 500, 2000 steps, delta 1e-5: 5 to 10% above the noise that Monte Carlo finds."""
    for nu, stddev, want in [(0.01, 5.43, 4.0), (0.005, 4.015, 8.0)]:
        ring = Ring.of(bin_lags(NuDPFTRL(nu), 2000, 100), stddev)
        assert random_allocation.epsilon([ring], 1e-5) == pytest.approx(want, rel=1e-2)


@pytest.mark.parametrize("delta", [1e-41, 1e-70, 1e-200, 1e-300])
def test_a_delta_beyond_floating_point_numbers_gives_no_epsilon(delta):
    """Products of likelihood ratios overflow there, and a comparison with NaN must not read as a proof."""
    ring = Ring.of(bin_lags(IdentityStrategy(), 8, 4), 0.0711)
    assert random_allocation.epsilon([Ring(ring.covariances, ring.num_bins, 2)], delta) == math.inf
    law = random_allocation.lognormal(1.0, 0.1, 1e-10)
    broken = type(law)(law.step, law.origin, law.mass * math.nan, law.zero, law.excess)
    assert random_allocation._epsilon(broken, 1e-5) == math.inf
