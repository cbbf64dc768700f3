r"""Exact stationary errors of noisy gradient descent, from the spectrum of its noise.

``theta_{t+1} = theta_t - eta (x x^T theta_t + gamma w_t)`` with ``x ~ N(0, diag(eigenvalues))``, ``w`` the correlated
noise of a strategy and ``gamma`` its sensitivity for one participation in a run without end. Errors are in units of
``G^2 / (2 rho)`` (clip G, rho-zCDP).

The part ``(x x^T - H) theta`` is a martingale difference, uncorrelated with all noise, so the second moments close:
with V_j what the noise alone does to coordinate j, ``S = E sum_j lambda_j theta_j^2`` solves a linear equation.

D = coordinates, K = nodes of the quadrature.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ellipk


def quadrature(slowest: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, pi] and weights of a mean over the circle, for even functions that are flat below `slowest`."""
    edges = np.linspace(np.log(1e-4 * slowest), np.log(np.pi), 65)
    nodes, weights = np.polynomial.legendre.leggauss(10)
    half = np.diff(edges)[:, None] / 2
    omega = np.exp(edges[:-1, None] + half * (nodes + 1)).ravel()
    weights = (half * weights).ravel() * omega
    weights[0] += 1e-4 * slowest
    return omega, weights / np.pi


# --- Figure 1: mean estimation ---------------------------------------------------------------------------------------


def mean_estimation_sgd(eta: float) -> float:
    """Stationary ``E theta^2`` of DP-SGD, by its closed form."""
    return eta / (2 - eta)


def mean_estimation_ftrl(eta: float) -> float:
    """The least that any correlation of the noise leaves: ``nu = eta``; by its closed form."""
    return eta**2 * gamma_squared_nu(eta) ** 2


def mean_estimation_lower_bound(eta: float) -> float:
    """Below every correlation of the noise: `regression_lower_bound` of one coordinate, without its 1/2."""
    return (eta / (2 - eta)) ** 2


# --- sensitivities: Table 2 ------------------------------------------------------------------------------------------


def gamma_squared_nu(nu: float) -> float:
    """Squared sensitivity of nu-DP-FTRL, ``(2 / pi) K`` with modulus ``1 - nu``."""
    return float(2 / np.pi * ellipk((1 - nu) ** 2))


def gamma_squared_damped(nu: float) -> float:
    """Squared sensitivity of damped anti-PGD."""
    return 1 / (nu * (2 - nu))


# --- Figure 2: linear regression -------------------------------------------------------------------------------------


def noise_gains_nu(eigenvalues: np.ndarray, eta: float, nu: float) -> np.ndarray:
    """V_j of nu-DP-FTRL, times ``gamma^2``; (D,)."""
    omega, weights = quadrature(min(eta * eigenvalues.min(), nu))
    spectrum = np.abs(1 - (1 - nu) * np.exp(1j * omega))
    responses = np.abs(1 - eta * eigenvalues[:, None] - np.exp(1j * omega)) ** -2  # (D, K)
    return gamma_squared_nu(nu) * eta**2 * (responses @ (weights * spectrum))


def noise_gains_damped(eigenvalues: np.ndarray, eta: float, nu: float) -> np.ndarray:
    """V_j of damped anti-PGD, times ``gamma^2``: a sum of squares in closed form; (D,)."""
    kept = 1 - eta * eigenvalues
    return gamma_squared_damped(nu) * eta**2 * (1 + (kept - (1 - nu)) ** 2 / (1 - kept**2))


def noise_gains_sgd(eigenvalues: np.ndarray, eta: float) -> np.ndarray:
    """V_j of DP-SGD; (D,)."""
    return eta**2 / (1 - (1 - eta * eigenvalues) ** 2)


def noise_gains_labels(eigenvalues: np.ndarray, eta: float) -> np.ndarray:
    """V_j of labels with a noise of variance 1, whose gradients are ``xi x``: the term sigma_sgd^2 of Eq. 10; (D,).

    It is not private noise, so it is in no units of ``G^2 / (2 rho)`` and adds to the V_j of every mechanism.
    """
    return eta / (2 - eta * eigenvalues)


def excess_loss(gains: np.ndarray, eigenvalues: np.ndarray, eta: float, *, linearised: bool = False) -> float:
    """Stationary ``E F(theta) - min F = S / 2`` of linear regression, from V_j.

    Args:
        gains: V_j, (D,).
        eigenvalues: of the covariance of x, (D,).
        eta: learning rate.
        linearised: leaves out the noise of sampled x, ``(x x^T - H) theta``.
    """
    if linearised:
        return 0.5 * float(eigenvalues @ gains)
    rest = 2 - 2 * eta * eigenvalues
    fed_back = float(np.sum(eta * eigenvalues / rest))
    assert fed_back < 1, "diverges: the sampled directions feed back more than the steps contract"
    return 0.5 * float(np.sum(eigenvalues * gains * (2 - eta * eigenvalues) / rest)) / (1 - fed_back)


def regression_sgd(eigenvalues: np.ndarray, eta: float, **options: bool) -> float:
    return excess_loss(noise_gains_sgd(eigenvalues, eta), eigenvalues, eta, **options)


def regression_nu(eigenvalues: np.ndarray, eta: float, **options: bool) -> float:
    """nu-DP-FTRL with the paper's ``nu = eta lambda_min``."""
    gains = noise_gains_nu(eigenvalues, eta, eta * float(eigenvalues.min()))
    return excess_loss(gains, eigenvalues, eta, **options)


def regression_best(eigenvalues: np.ndarray, eta: float, **options: bool) -> float:
    """The least that any correlation of the noise leaves, the optimum of Theorem C.18.

    The error is ``gamma^2`` times a mean of |B|^2 over the spectrum with weights W, and ``gamma^2`` is the mean of
    1 / |B|^2: by Cauchy-Schwarz at least the squared mean of sqrt(W), which |B|^2 = 1 / sqrt(W) attains.
    """
    omega, weights = quadrature(eta * eigenvalues.min())
    responses = np.abs(1 - eta * eigenvalues[:, None] - np.exp(1j * omega)) ** -2  # (D, K)
    weight_of_gain = [excess_loss(unit, eigenvalues, eta, **options) for unit in np.eye(len(eigenvalues))]
    return float(weights @ np.sqrt(np.array(weight_of_gain) @ responses)) ** 2 * eta**2


def regression_lower_bound(eigenvalues: np.ndarray, eta: float, **options: bool) -> float:
    """Below every correlation of the noise, with the rate ``eta^2 d_eff`` of Theorem 2.2 and a constant of ours.

    ``1 / |1 - eta lambda_j - e^iw|^2`` is at least ``1 / (2 - eta lambda_j)^2``, its value at the highest frequency,
    and the means of |B|^2 and 1 / |B|^2 have a product of 1 or more.
    """
    return excess_loss((eta / (2 - eta * eigenvalues)) ** 2, eigenvalues, eta, **options)


def best_damped(eigenvalues: np.ndarray, eta: float, **options: bool) -> tuple[float, float]:
    """Damped anti-PGD with the damping of least error: (error, nu)."""

    def error(log_nu: float) -> float:
        gains = noise_gains_damped(eigenvalues, eta, float(np.exp(log_nu)))
        return excess_loss(gains, eigenvalues, eta, **options)

    found = minimize_scalar(error, bounds=(np.log(1e-8), 0.0), method="bounded", options={"xatol": 1e-6})
    return float(found.fun), float(np.exp(found.x))


def power_law(d: int, exponent: float = 1.0) -> np.ndarray:
    """Eigenvalues ``k^-exponent``, k = 1 .. d."""
    return np.arange(1, d + 1) ** -float(exponent)
