"""The convex program for smooth and strongly convex losses: exact where an exact value exists, a bound elsewhere."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy.signal import lfilter

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    IdentityStrategy,
    NuDPFTRL,
)
from recipes.paper.correlated_noise.strongly_convex import (
    minimum_phase_coefs,
    optimize_strongly_convex,
    strongly_convex_bound,
)

ETA = 0.3
STRATEGIES = {
    "identity": IdentityStrategy(),
    "nu": NuDPFTRL(0.03),
    "damped": BandedInverse((1.0, -0.8)),
    "bands": BandedToeplitz((1, 0.6, 0.3, 0.1)),
    "inverse-bands": BandedInverse.of_nu(8, 0.02),
    "blt": BufferedLinearToeplitz((0.9, 0.5), (0.8, 0.1)),
}


@pytest.fixture(autouse=True)
def _needs_cvxpy():
    pytest.importorskip("cvxpy", reason="the program is in the extra `convex`")


def quadratic(strategy, curvature: float, L: float, eta: float = ETA, n: int = 2000) -> float:
    """Exact ``(L / 2) E theta^2`` on a quadratic, by what one draw does to all later steps; all have decayed by n."""
    impulse = lfilter([eta], [1.0, eta * curvature - 1], strategy.noising_coefs(n))
    return L / 2 * np.sum(strategy.strategy_coefs(n) ** 2) * np.sum(impulse**2)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_quadratic_has_its_exact_gain(name, symmetric):
    """mu = L leaves one loss; the multipliers tend to infinity there, and the bound comes near from above."""
    exact = quadratic(STRATEGIES[name], 0.2, 0.2)
    found = strongly_convex_bound(STRATEGIES[name], mu=0.2, L=0.2, eta=ETA, symmetric=symmetric).value
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 2e-3)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_no_quadratic_of_the_class_is_worse(name, symmetric):
    found = strongly_convex_bound(STRATEGIES[name], mu=0.1, L=1.0, eta=ETA, symmetric=symmetric).value
    assert found >= max(quadratic(STRATEGIES[name], curvature, 1.0) for curvature in np.linspace(0.1, 1.0, 10))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_coefficients_have_the_bound_of_their_spectrum(symmetric):
    options = {"mu": 0.05, "L": 1.0, "eta": ETA, "symmetric": symmetric}
    found = optimize_strongly_convex(**options)
    assert strongly_convex_bound(found.strategy, **options).value == pytest.approx(found.bound, rel=1e-3)
    powers = np.exp(1j * np.outer(found.frequencies, np.arange(1024)))
    spectrum = np.abs(powers @ found.strategy.noising_coefs(1024)) ** 2
    np.testing.assert_allclose(spectrum, found.spectrum, rtol=1e-2)


def test_the_gains_are_certified_and_the_least_that_are():
    """The matrix of the program, written out: positive semidefinite for psi, and not for 1 % less."""
    mu, L = 0.1, 1.0
    for symmetric in (False, True):
        bound = strongly_convex_bound(NuDPFTRL(0.05), mu=mu, L=L, eta=ETA, symmetric=symmetric)
        lags = np.arange(-15, 16)
        for omega, psi in zip(bound.frequencies[::10], bound.gains[::10], strict=True):
            multiplier = np.sum(bound.multipliers * np.exp(1j * omega * lags))
            cross = mu * np.conj(multiplier) + L * multiplier
            sector = np.array([[-2 * mu * L * multiplier.real, cross], [np.conj(cross), -2 * multiplier.real]])
            gradient = np.array([[1, 0], [(1 - np.exp(1j * omega)) / ETA, -1]])  # of theta and the noise
            part = gradient.conj().T @ sector @ gradient
            assert np.linalg.eigvalsh(np.diag([-1, psi]) - part).min() > -1e-9 * np.abs(part).max()
            assert np.linalg.eigvalsh(np.diag([-1, 0.99 * psi]) - part).min() < 0


def _energy(multipliers: np.ndarray, theta: np.ndarray, gradient: np.ndarray, mu: float, L: float) -> float:
    """``sum <L theta - g, Lambda * (g - mu theta)>`` of one period, which the program takes to be >= 0."""
    lags = range(-(len(multipliers) // 2), len(multipliers) // 2 + 1)
    above, below = L * theta - gradient, gradient - mu * theta
    return float(sum(weight * above @ np.roll(below, -lag) for weight, lag in zip(multipliers, lags, strict=True)))


def test_the_multipliers_hold_for_the_losses_they_are_for():
    """And those for symmetric losses do not hold for others: the choice of signs matters."""
    mu, L, rng = 0.1, 1.0, np.random.default_rng(0)
    noise = IdentityStrategy()
    general = strongly_convex_bound(noise, mu=mu, L=L, eta=ETA).multipliers
    for_odd = strongly_convex_bound(noise, mu=mu, L=L, eta=ETA, symmetric=True).multipliers
    assert np.abs(np.delete(general, 15)).sum() > 0.1 * general[15], "one sector condition would pass everywhere"

    def one_sided(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, L, mu) * x

    def odd(x: np.ndarray) -> np.ndarray:
        return mu * x + (L - mu) * np.clip(x, -0.5, 0.5)

    trajectories = [np.cumsum(rng.normal(size=64)) - rng.normal() for _ in range(200)] + [
        rng.normal(size=64) for _ in range(200)
    ]
    trajectories += [np.tile(pair, 32) for pair in rng.normal(size=(200, 2))]
    for theta in trajectories:
        for gradient in (one_sided, odd):
            assert _energy(general, theta, gradient(theta), mu, L) > -1e-9
        assert _energy(for_odd, theta, odd(theta), mu, L) > -1e-9
    assert min(_energy(for_odd, theta, one_sided(theta), mu, L) for theta in trajectories) < -0.01


@pytest.mark.parametrize("nu", [0.5, 0.01])
def test_the_minimum_phase_factor_of_nu_is_nu(nu):
    spectrum = np.abs(1 - (1 - nu) * np.exp(1j * np.linspace(0, np.pi, 2**14 + 1)))
    np.testing.assert_allclose(minimum_phase_coefs(spectrum, 500), NuDPFTRL(nu).noising_coefs(500), atol=1e-9)
    with pytest.raises(DPConfigError, match="Use fewer"):
        minimum_phase_coefs(spectrum, 2**14 + 1)


@pytest.mark.parametrize(
    "wrong, mend",
    [
        ({"mu": 2.0}, "0 < mu <= L"),
        ({"mu": 0.0}, "0 < mu <= L"),
        ({"L": float("inf")}, "0 < mu <= L"),
        ({"eta": 2.0}, r"outside \(0, 2 / L\)"),
        ({"eta": 0.0}, r"outside \(0, 2 / L\)"),
        ({"mu": 1e-5}, "Use a larger eta"),
        ({"tau_max": 0}, "tau_max"),
    ],
)
def test_values_outside_their_ranges_are_refused(wrong, mend):
    options = {"mu": 0.1, "L": 1.0, "eta": ETA, **wrong}
    with pytest.raises(DPConfigError, match=mend):
        strongly_convex_bound(IdentityStrategy(), **options)
    with pytest.raises(DPConfigError, match=mend):
        optimize_strongly_convex(**options)


@pytest.mark.parametrize(
    "noise", [NuDPFTRL(0.0), BandedInverse((1, -1)), BandedInverse((1, -2)), BandedToeplitz((1, 2))]
)
def test_noise_whose_sensitivity_grows_is_refused(noise):
    with pytest.raises(DPConfigError, match="nu > 0"):
        strongly_convex_bound(noise, mu=0.1, L=1.0, eta=ETA)


def test_the_missing_solver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(DPConfigError, match=r"pip install 'hf-dpopt\[convex\]'"):
        strongly_convex_bound(IdentityStrategy(), mu=0.1, L=1.0, eta=ETA)
