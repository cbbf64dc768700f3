"""What tunings minimise, against matrices and finite differences, and what they find, against other strategies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.optimize import approx_fprime

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    BufferedLinearToeplitz,
    NuDPFTRL,
    Participation,
    Workload,
    choose_num_bands,
    linear_cooldown,
    momentum_workload,
    optimize_banded,
    optimize_blt,
    optimize_nu,
)
from hf_dpopt.noise.sensitivity import squared_sensitivity, toeplitz_sensitivity
from hf_dpopt.noise.workloads import squared_error

N = 40
WORKLOADS = {
    "prefix sums": None,
    "momentum": momentum_workload(N, 0.9),
    "cool-down": momentum_workload(N, 0.9, linear_cooldown(N, 20)),
    "any": Workload(tuple(np.random.default_rng(0).normal(size=N)), tuple(np.random.default_rng(1).uniform(size=N))),
}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_squared_error(workload):
    """Against the matrices, at coefficients that no strategy has, and its gradient against differences."""
    noising = NuDPFTRL(0.05).noising_coefs(N) + 0.02 * np.random.default_rng(2).normal(size=N)
    queries = np.tril(np.ones((N, N))) if workload is None else workload.matrix()
    errors = np.square(queries @ np.tril(toeplitz(noising))).sum(axis=1)
    objective = squared_error(N, workload)
    value, slope = objective(noising)
    assert value == pytest.approx(errors.mean(), rel=1e-12)
    # a square form: differences over a wide interval have no error but rounding
    ahead, behind = (np.array([objective(noising + h)[0] for h in s * 0.01 * np.eye(N)]) for s in (1, -1))
    np.testing.assert_allclose(slope, (ahead - behind) / 0.02, rtol=1e-7, atol=1e-7 * np.abs(slope).max())


@pytest.mark.parametrize("participation", [Participation(), Participation(3, 7), Participation(40, 1)], ids=str)
def test_squared_sensitivity(participation):
    coefs = NuDPFTRL(0.05).strategy_coefs(N)
    value, slope = squared_sensitivity(coefs, participation)
    assert value == pytest.approx(toeplitz_sensitivity(coefs, participation) ** 2, rel=1e-12)
    want = approx_fprime(coefs, lambda c: squared_sensitivity(c, participation)[0], 1e-7)
    np.testing.assert_allclose(slope, want, rtol=1e-4)


@pytest.mark.parametrize("workload", [WORKLOADS["momentum"], WORKLOADS["cool-down"]], ids=["momentum", "cool-down"])
def test_tuned_for_a_workload(workload):
    """Better for it than what is tuned for prefix sums, and than its neighbours."""
    participation = Participation(4, 10)

    def loss(strategy):
        return strategy.mean_loss(N, participation, workload)

    best, other = optimize_nu(N, participation, workload), optimize_nu(N, participation)
    assert loss(best) < loss(other)
    assert all(loss(best) <= loss(NuDPFTRL(best.nu * factor)) for factor in (0.9, 1.1))
    blt = optimize_blt(N, participation, 2, workload=workload)
    assert loss(blt) < min(loss(optimize_nu(N, participation, workload)), loss(optimize_blt(N, participation, 2)))
    one = optimize_blt(N, participation, 1, workload=workload)
    for factor in (0.99, 1.01):  # momentum pushes the zero to its end, 0; the pole is inside
        assert loss(one) < loss(BufferedLinearToeplitz((one.poles[0] ** factor,), one.zeros))
    bands = optimize_banded(N, 10, participation, workload)
    assert loss(bands) < min(loss(blt), loss(optimize_banded(N, 10)))


@pytest.mark.parametrize(
    "n, num_bands, participation",
    [
        (64, 32, Participation(6, 10)),
        (64, 64, Participation(4, 16)),
        (50, 14, Participation(4, 14)),  # the end of the run cuts the last columns short
        (50, 20, Participation(50, 1)),
        (512, 200, Participation(6, 85, "fixed_epoch")),
    ],
    ids=str,
)
def test_bands_for_a_participation(n, num_bands, participation):
    best = optimize_banded(n, num_bands, participation)
    loss = best.mean_loss(n, participation)
    assert len(best.coefs) <= num_bands
    assert loss < optimize_banded(n, num_bands).mean_loss(n, participation)
    fewer = optimize_banded(n, min(num_bands, participation.min_sep)).mean_loss(n, participation)
    assert loss <= fewer * (1 + 1e-9)
    assert loss <= optimize_nu(n, participation).mean_loss(n, participation) * (1 + 1e-9)


def test_one_participation_is_what_orthogonal_columns_are_tuned_for():
    assert optimize_banded(64, 16, Participation(4, 16)) == optimize_banded(64, 16)
    assert optimize_banded(64, 40, Participation()) == optimize_banded(64, 40)


@pytest.mark.parametrize("make", [optimize_nu, optimize_blt])
def test_tuned_for_a_run_that_does_not_exist(make):
    with pytest.raises(DPConfigError, match="max_participations <= 3"):
        make(30, Participation(4, 10))
    with pytest.raises(DPConfigError, match="Make one for 30 steps"):
        make(30, Participation(), workload=WORKLOADS["momentum"])
    with pytest.raises(DPConfigError, match="Use at most 30"):
        optimize_banded(30, 31)


@pytest.mark.parametrize(
    "noise_multiplier_of, most, want",
    [
        (lambda num_bands: 1.0, 13, 13),  # bands cost nothing
        (lambda num_bands: float(num_bands), 13, 1),
        (lambda num_bands: 1.0 if num_bands <= 4 else 9.0, 13, 4),
        (lambda num_bands: 1.0, 1, 1),
    ],
)
def test_the_number_of_bands(noise_multiplier_of, most, want):
    assert choose_num_bands(N, most, noise_multiplier_of) == want
