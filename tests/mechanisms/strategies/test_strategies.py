"""Matrices, errors and parameters of the noise strategies."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    IdentityStrategy,
    NuDPFTRL,
    Participation,
    Restarted,
    ToeplitzStrategy,
    linear_cooldown,
    momentum_workload,
)
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.tree import TreeAggregation
from tests.mechanisms.strategies.cases import strategies

N = 32
ALL = strategies(N)
TOEPLITZ = [name for name, one in ALL.items() if isinstance(one, ToeplitzStrategy)]


@pytest.mark.parametrize("name", TOEPLITZ)
def test_the_noise_is_the_inverse_of_the_strategy(name):
    strategy, n = ALL[name], 2052
    product = np.convolve(strategy.strategy_coefs(n), strategy.noising_coefs(n))[:n]
    assert np.abs(product - np.eye(1, n)[0]).max() < 1e-12 * max(1.0, np.abs(strategy.strategy_coefs(n)).sum())


@pytest.mark.parametrize("name", ALL)
def test_matrices(name):
    strategy = ALL[name]
    matrix, noising = strategy.strategy_matrix(N), strategy.noising_matrix(N)
    np.testing.assert_allclose(noising @ matrix, np.eye(N), atol=1e-12)
    if matrix.shape == (N, N):
        assert not np.triu(matrix, 1).any() and not np.triu(noising, 1).any()
    if strategy.num_bands is not None:
        assert not np.tril(matrix, -strategy.num_bands).any()
    for t in (2, N - 1):
        assert strategy.row_norm(t, N) == pytest.approx(np.linalg.norm(noising[t]), rel=1e-12)
    if not strategy.anytime:
        with pytest.raises(DPConfigError, match="give num_steps"):
            strategy.row_norm(2)


@pytest.mark.parametrize("name", [name for name, strategy in ALL.items() if strategy.anytime])
def test_a_longer_run_begins_like_a_shorter_one(name):
    strategy = ALL[name]
    for short, long in ((7, 16), (10, 25)):
        of_short = strategy.noising_matrix(short)
        of_long = strategy.noising_matrix(long)
        np.testing.assert_allclose(of_short @ of_short.T, (of_long @ of_long.T)[:short, :short], atol=1e-12)
        participation = Participation(3, 4)
        assert strategy.sensitivity(short, participation) <= strategy.sensitivity(long, participation) * (1 + 1e-12)


@pytest.mark.parametrize(
    "workload", [None, momentum_workload(N, 0.9), momentum_workload(N, 0.9, linear_cooldown(N, 8))]
)
@pytest.mark.parametrize("name", ALL)
def test_errors(name, workload):
    strategy = ALL[name]
    queries = np.tril(np.ones((N, N))) if workload is None else workload.matrix()
    want = np.square(queries @ strategy.noising_matrix(N)).sum(axis=1)
    np.testing.assert_allclose(strategy.per_query_error(N, workload), want, rtol=1e-9)


def test_workloads_run_the_optimizer():
    n, momentum, sizes = 12, 0.7, np.linspace(1, 0.1, 12)
    gradients, buffer, iterate, iterates = np.random.default_rng(0).normal(size=n), 0.0, 0.0, []
    for gradient, size in zip(gradients, sizes, strict=True):
        buffer = momentum * buffer + gradient
        iterate += size * buffer
        iterates.append(iterate)
    np.testing.assert_allclose(momentum_workload(n, momentum, sizes).matrix() @ gradients, iterates)
    np.testing.assert_allclose(
        momentum_workload(n, momentum).matrix(), momentum_workload(n, momentum, np.ones(n)).matrix()
    )
    np.testing.assert_array_equal(momentum_workload(n, 0.0).matrix(), np.tri(n))


def test_relatives():
    np.testing.assert_allclose(NuDPFTRL(1.0).strategy_coefs(9), IdentityStrategy().strategy_coefs(9))
    root = NuDPFTRL(0.0).strategy_coefs(50)
    np.testing.assert_allclose(np.convolve(root, root)[:50], np.ones(50))  # the square root of the prefix sums
    blt = ALL["blt"]
    assert (blt.output_scale > 0).all() and (blt.noising_scale < 0).all()


def test_equal_parameters_are_an_equal_strategy():
    assert len({strategy.digest() for strategy in ALL.values()}) == len(ALL)
    assert len(set(ALL.values())) == len(ALL)
    assert (
        NuDPFTRL(0).digest() == NuDPFTRL(0.0).digest() and NuDPFTRL(np.float32(0.5)).digest() == NuDPFTRL(0.5).digest()
    )
    assert Restarted(NuDPFTRL(0.1), np.int64(2)).digest() == Restarted(NuDPFTRL(0.1), 2).digest()
    assert DenseStrategy(-0.0 * np.tri(3, k=-1) + np.eye(3)) == DenseStrategy(np.eye(3))
    assert NuDPFTRL(0.1).digest() == NuDPFTRL(0.1).digest() != NuDPFTRL(0.1 + 1e-16 * 10).digest()
    with pytest.raises(ValueError, match="read-only"):
        ALL["dense"].strategy_matrix(4)[0, 0] = 2.0


@pytest.mark.parametrize(
    "make, mend",
    [
        (lambda: NuDPFTRL(-0.1), r"\[0, 1\]"),
        (lambda: NuDPFTRL(float("nan")), r"\[0, 1\]"),
        (lambda: BandedToeplitz(()), "at least one"),
        (lambda: BandedToeplitz((0.0, 1.0)), "first not 0"),
        (lambda: BandedInverse((1.0, float("inf"))), "finite"),
        (lambda: BufferedLinearToeplitz((0.9,), (0.95,)), "interlaced"),
        (lambda: BufferedLinearToeplitz((0.9, 0.5), (0.7,)), "as many of each"),
        (lambda: BufferedLinearToeplitz((1.0,), (0.7,)), "interlaced"),
        (lambda: TreeAggregation("binary"), "honaker"),
        (lambda: TreeAggregation(restart_every=0), "restart_every=0"),
        (lambda: DenseStrategy(np.ones((3, 3))), "lower-triangular"),
        (lambda: DenseStrategy(np.zeros((3, 3))), "positive diagonal"),
        (lambda: ALL["dense"].strategy_matrix(33), "32 steps"),
        (lambda: Restarted(NuDPFTRL(0.1), 0), "every=0"),
        (lambda: Participation(0), "max_participations=0"),
        (lambda: Participation(2, 0), "min_sep=0"),
        (lambda: Participation(2, 3, "shuffled"), "fixed_epoch"),
        (lambda: Participation(4, 10).check(30), "max_participations <= 3"),
        (lambda: momentum_workload(4, 1.0), r"\[0, 1\)"),
        (lambda: momentum_workload(4, 0.9, [1, 2]), "4 finite numbers"),
        (lambda: momentum_workload(4, 0.9, [1, 1, 1, -0.5]), "4 finite numbers >= 0"),
    ],
)
def test_bad_parameters(make, mend):
    with pytest.raises(DPConfigError, match=mend):
        make()
