"""Excess loss of linear regression after finitely many steps: the reference against second moments of the state."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    BandedToeplitz,
    BufferedLinearToeplitz,
    FourierStrategy,
    IdentityStrategy,
    NuDPFTRL,
    Restarted,
)
from hf_dpopt.noise.tree import TreeAggregation
from tests.reference.linear_regression import LinearRegression

STRATEGIES = {
    "identity": IdentityStrategy(),
    "nu": NuDPFTRL(0.1),
    "blt": BufferedLinearToeplitz((0.9, 0.3), (0.7, 0.1)),
    "bands": BandedToeplitz((1.0, 0.5, 0.2)),
    "honaker": TreeAggregation("honaker"),
    "fft": FourierStrategy("fourier"),
    "restarted": Restarted(NuDPFTRL(0.0), 9),
}
EIGENVALUES, START = np.array([1.0, 0.4, 0.1]), np.array([0.5, -1.0, 2.0])


def regression(**changes) -> LinearRegression:
    options = {"learning_rate": 0.1, "batch_size": 3, "label_variance": 0.7, **changes}
    return LinearRegression(eigenvalues=EIGENVALUES, start=START, **options)


def slow_excess(problem: LinearRegression, noising: np.ndarray, stddev: float) -> list[float]:
    """Second moments of weights and draws together, propagated step by step without any decomposition.

    Sampled x bring fourth moments: ``E x x^T M x x^T = 2 H M H + tr(H M) H`` (Isserlis).
    """
    n, num_draws = noising.shape
    h, eta, m = np.diag(problem.eigenvalues), problem.learning_rate, problem.batch_size
    contract = np.eye(len(h)) - eta * h
    moment = np.outer(problem.start, problem.start)
    with_draws = np.zeros((num_draws, len(h), len(h)))  # E d_t z_r^T
    found = [0.5 * np.trace(h @ moment)]
    for t in range(n):
        fourth = (1 - 1 / m) * h @ moment @ h + (2 * h @ moment @ h + np.trace(h @ moment) * h) / m
        with_noise = stddev * np.tensordot(noising[t], with_draws, axes=1)  # E d_t w_t^T
        moment = (
            moment - eta * (h @ moment + moment @ h) + eta**2 * fourth
            + eta**2 * problem.label_variance / m * h
            - eta * (contract @ with_noise + with_noise.T @ contract)
            + (eta * stddev) ** 2 * np.sum(noising[t] ** 2) * np.eye(len(h))
        )  # fmt: skip
        with_draws = np.einsum("ij,rjk->rik", contract, with_draws)
        with_draws -= eta * stddev * noising[t][:, None, None] * np.eye(len(h))
        found.append(0.5 * np.trace(h @ moment))
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_excess_is_that_of_the_second_moments_of_the_state(name, batch_size):
    strategy, n, problem = STRATEGIES[name], 30, regression(batch_size=batch_size)
    slow = slow_excess(problem, strategy.noising_matrix(n), 0.8)
    np.testing.assert_allclose(problem.excess(strategy, n, 0.8), slow, rtol=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("learning_rate, batch_size", [(0.01, 1), (0.1, 1), (0.3, 4), (0.99, 40)])
def test_the_bound_holds_at_every_step_and_is_of_the_right_size(name, learning_rate, batch_size):
    strategy, n = STRATEGIES[name], 200
    problem = regression(learning_rate=learning_rate, batch_size=batch_size)
    exact, bound = problem.excess(strategy, n, 0.8), problem.excess_bound(strategy, n, 0.8)
    assert (exact <= bound * (1 + 1e-12)).all()
    if strategy.toeplitz_coefs(n) is not None:  # the noise of others may be larger on the way than at the end
        assert bound[-1] < 3 * exact[-1]


def test_without_sampling_the_bound_of_the_noise_is_exact():
    problem = regression(batch_size=np.inf)
    at_minimum = LinearRegression(
        eigenvalues=EIGENVALUES, start=np.zeros(3), learning_rate=0.1, batch_size=np.inf, label_variance=0.7
    )
    strategy, n = NuDPFTRL(0.1), 50
    np.testing.assert_allclose(at_minimum.excess(strategy, n, 0.8), at_minimum.excess_bound(strategy, n, 0.8))
    curvatures = 0.1 * EIGENVALUES
    start = 0.5 * (EIGENVALUES * (1 - curvatures) ** (2 * n)) @ START**2
    assert problem.excess(strategy, n, 0.8)[-1] == pytest.approx(
        start + at_minimum.excess(strategy, n, 0.8)[-1], rel=1e-9
    )


def test_a_bound_at_too_large_a_rate_is_refused():
    with pytest.raises(DPConfigError, match="larger batches"):
        regression(learning_rate=0.9, batch_size=1).excess_bound(NuDPFTRL(0.1), 10, 1.0)
    with pytest.raises(DPConfigError, match="curvature is not > 0"):
        LinearRegression(eigenvalues=np.zeros(2), start=np.zeros(2), learning_rate=0.1)
    with pytest.raises(DPConfigError, match="learning_rate=-1"):
        regression(learning_rate=-1)
