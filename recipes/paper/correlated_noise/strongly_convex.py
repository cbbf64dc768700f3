r"""Bound on the excess loss of noisy gradient descent on smooth and strongly convex losses, by a convex program.

``theta_{t+1} = theta_t - eta (grad F(theta_t) + w_t)`` with the noise ``w`` of a Toeplitz strategy. A gain psi(omega)
with ``E |theta|^2 <= (1 / 2 pi) int psi |B|^2`` holds for all mu-strongly convex, L-smooth F if some multiplier
``Lambda(omega) = sum_tau lambda_tau e^{i omega tau}`` makes a 2 x 2 matrix positive semidefinite at every frequency;
the least such psi is a second-order cone program. Needs cvxpy: ``pip install 'hf-dpopt[convex]'``.

The bound is one on a whole class of losses, and not tight: see `strongly_convex_bound`.

K = frequencies of the program, M = tau_max, N = frequencies of the whole circle on which bounds are evaluated.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.extras import import_extra
from hf_dpopt.noise.banded_inverse import BandedInverse
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL
from hf_dpopt.noise.strategy import ToeplitzStrategy

NUM_FREQUENCIES = 120  # of the program, logarithmic; evenly spaced ones are added that resolve the multipliers
NUM_ALTERNATIONS = 6  # at most
NUM_COEFS = 1024  # of B that are kept; a few times 1 / (eta mu) lose nothing that shows
CONVERGED = 1e-4  # relative change of the bound that ends the alternation
UNRESOLVED = 1e-3  # relative change of the squared sensitivity on half the frequencies: it grows with the steps
SLOWEST = 1e-5  # eta * mu, below which the circle would need more than 2^22 frequencies


@dataclasses.dataclass(frozen=True, eq=False)
class StronglyConvexBound:
    """A bound on the stationary excess loss, with its certificate.

    Attributes:
        value: bound on ``E F(theta) - min F`` in units of ``d G^2 / (2 rho)`` (d coordinates, clip G, rho-zCDP).
        frequencies: frequencies of the program, in (0, pi]; (K,).
        gains: values of psi at these frequencies; (K,).
        multipliers: the multipliers ``lambda_{-M} .. lambda_M``; (2 M + 1,).
    """

    value: float
    frequencies: np.ndarray
    gains: np.ndarray
    multipliers: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizedNoise:
    """The result of `optimize_strongly_convex`.

    Attributes:
        strategy: the noise, cut to finitely many coefficients.
        bound: bound for the noise before it was cut, in units of ``d G^2 / (2 rho)``.
        history: bounds of ``nu = eta mu`` and after every alternation.
        frequencies: frequencies of the spectrum, in (0, pi]; (K,).
        spectrum: values of ``|B|^2`` at these frequencies, with ``beta_0 = 1``; (K,).
    """

    strategy: BandedInverse
    bound: float
    history: tuple[float, ...]
    frequencies: np.ndarray
    spectrum: np.ndarray


def strongly_convex_bound(
    noise: ToeplitzStrategy, *, mu: float, L: float, eta: float, symmetric: bool = False, tau_max: int = 15
) -> StronglyConvexBound:
    r"""Bound on the stationary excess loss of gradient descent with correlated noise.

    ``(L / 2) gamma^2 (1 / 2 pi) int |B|^2 psi`` with ``gamma^2 = (1 / 2 pi) int |B|^-2``, the squared sensitivity of
    one participation in a run without end. The program chooses the multipliers on K frequencies; psi and both
    integrals are then computed from the multipliers on the whole circle, so a coarse grid costs tightness and not
    truth.

    Formal guarantee: for F differentiable, mu-strongly convex and L-smooth with its minimum at 0, and stationary
    noise of spectrum ``|B|^2`` alone (no noise of sampled batches), ``(L / 2) E |theta|^2``, and so the excess loss,
    is at most `value`. With ``mu = L`` it tends to the exact one. For independent noise it is not tight: contraction
    gives ``eta L / (2 mu (2 - eta mu))`` for ``eta <= 2 / (mu + L)``, which a quadratic attains.

    Args:
        noise: the strategy.
        mu: strong convexity, > 0.
        L: smoothness, >= mu; the same unit.
        eta: learning rate, in (0, 2 / L).
        symmetric: whether ``F(theta) = F(-theta)`` is known. Then ``lambda_tau >= 0`` with ``sum_tau lambda_tau <= 2
            lambda_0`` is enough, and the bound lower; otherwise ``lambda_tau <= 0`` off the middle and ``sum_tau
            lambda_tau >= 0`` are needed.
        tau_max: lags of the multipliers, each way; >= 1.

    Raises:
        DPConfigError: for values outside these ranges, or noise whose sensitivity grows with the steps.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 3; Zames and Falb (1968) (multipliers: which signs
        hold for odd gradients only).
    """
    program = _Program(mu=mu, L=L, eta=eta, symmetric=symmetric, tau_max=tau_max)
    return program.bound(_spectrum(noise, program.num_circle))


def optimize_strongly_convex(
    *, mu: float, L: float, eta: float, symmetric: bool = False, tau_max: int = 15
) -> OptimizedNoise:
    """Noise with a low bound for the class of losses: alternates between the gains and the spectrum.

    For given gains the best spectrum is ``|B|^2 = psi^(-1/2)`` (Cauchy-Schwarz). Starts at nu-DP-FTRL with
    ``nu = eta mu``; every bound is at most the one before, up to the accuracy of the solver. The coefficients are
    those of the spectrum's minimum-phase factor, whose inverse is causal and stable.

    Args:
        mu, L, eta, symmetric, tau_max: arguments of `strongly_convex_bound`.

    Raises:
        DPConfigError: as in `strongly_convex_bound`.

    References:
        Choquette-Choo et al. (2023), arXiv:2310.06771, Section 3; Oppenheim and Schafer (1989), Chapter 12 (cepstrum).
    """
    program = _Program(mu=mu, L=L, eta=eta, symmetric=symmetric, tau_max=tau_max)
    best_spectrum = _spectrum(NuDPFTRL(min(1.0, eta * mu)), program.num_circle)
    best = program.bound(best_spectrum)
    history = [best.value]
    for _ in range(NUM_ALTERNATIONS):
        spectrum = program.gains(best.multipliers, program.circle) ** -0.5
        found = program.bound(spectrum)
        if found.value >= best.value:
            break
        best, best_spectrum = found, spectrum
        history.append(found.value)
        if history[-2] - history[-1] <= CONVERGED * history[-1]:
            break
    coefs = minimum_phase_coefs(best_spectrum, NUM_COEFS)
    return OptimizedNoise(
        strategy=BandedInverse(tuple(coefs / coefs[0])),
        bound=best.value,
        history=tuple(history),
        frequencies=program.frequencies,
        spectrum=np.interp(program.frequencies, program.circle, best_spectrum) / coefs[0] ** 2,
    )


def minimum_phase_coefs(spectrum: np.ndarray, num_coefs: int) -> np.ndarray:
    """The causal sequence with the given ``|B|^2`` whose inverse is causal and stable too, by its cepstrum.

    Args:
        spectrum: ``|B|^2`` at frequencies evenly spaced from 0 to pi, both included; positive; (N / 2 + 1,).
        num_coefs: number of coefficients, at most N / 2, as many as the spectrum resolves.

    Returns:
        The coefficients, (num_coefs,).
    """
    half = len(spectrum) - 1
    if num_coefs > half:
        raise DPConfigError(f"num_coefs={num_coefs} is more than the {half} that this spectrum resolves. Use fewer.")
    cepstrum = np.fft.irfft(0.5 * np.log(spectrum))
    cepstrum[1:half] *= 2  # what comes before step 0 is folded onto what comes after
    cepstrum[half + 1 :] = 0
    return np.fft.irfft(np.exp(np.fft.rfft(cepstrum)))[:num_coefs]


# --- the program -----------------------------------------------------------------------------------------------------


class _Program:
    """The cone program for one class of losses; its data, apart from the objective, are the same for every noise."""

    def __init__(self, *, mu: float, L: float, eta: float, symmetric: bool, tau_max: int):
        check_count("tau_max", tau_max)
        if not 0 < mu <= L < np.inf:
            raise DPConfigError(f"mu={mu}, L={L}: a strongly convex and smooth loss has 0 < mu <= L, both finite.")
        if not 0 < eta < 2 / L:
            raise DPConfigError(
                f"eta={eta} is outside (0, 2 / L) = (0, {2 / L:.4g}): gradient descent diverges there."
            )
        if eta * mu < SLOWEST:
            raise DPConfigError(
                f"The product eta * mu = {eta * mu:.3g} is below {SLOWEST}, too slow to resolve. Use a larger eta."
            )
        self._mu, self._L, self._eta, self._tau_max = mu, L, eta, tau_max
        self._sign = 1.0 if symmetric else -1.0
        even = np.linspace(0, np.pi, 8 * tau_max + 1)[1:]  # eight to a period of the fastest term of Lambda
        self.frequencies = np.union1d(np.geomspace(0.01 * eta * mu, np.pi, NUM_FREQUENCIES), even)
        self.num_circle = int(
            2 ** np.clip(np.ceil(np.log2(40 / (eta * mu))), 14, 22)
        )  # e^-20 at the end of a transient
        self.circle = np.linspace(0, np.pi, self.num_circle // 2 + 1)

    def _matrix(self, re: Any, im: Any, omega: np.ndarray, vary: Any = np.multiply) -> tuple[Any, Any, Any]:
        """p11, and p12 (real, imaginary), of P - diag(0, psi) for Lambda = re + i im; arrays or cvxpy expressions."""
        mu, L = self._mu, self._L
        slope = (1 - np.exp(1j * omega)) / self._eta  # gradient = slope * theta - noise
        m_re, m_im = (mu + L) * re, (L - mu) * im
        crossed = vary(slope.real, m_re) - vary(slope.imag, m_im)
        p11 = -1 + vary(2 * mu * L + 2 * np.abs(slope) ** 2, re) - 2 * crossed
        return p11, m_re - vary(2 * slope.real, re), m_im + vary(2 * slope.imag, re)

    def gains(self, multipliers: np.ndarray, omega: np.ndarray) -> np.ndarray:
        """The least psi that the multipliers certify; infinite where they certify none."""
        re, im, middle = np.full(len(omega), multipliers[self._tau_max]), np.zeros(len(omega)), self._tau_max
        for tau in range(1, self._tau_max + 1):
            before, after = multipliers[middle - tau], multipliers[middle + tau]
            re += (after + before) * np.cos(tau * omega)
            im += (after - before) * np.sin(tau * omega)
        p11, p12_re, p12_im = self._matrix(re, im, omega)
        psi = (p12_re**2 + p12_im**2) / np.where(p11 > 0, p11, 1.0) - 2 * re
        return np.where(p11 > 0, np.maximum(psi, 0), np.inf)

    def bound(self, spectrum: np.ndarray) -> StronglyConvexBound:
        """Bound for ``|B|^2`` at frequencies evenly spaced from 0 to pi."""
        circle = np.linspace(0, np.pi, len(spectrum))
        multipliers = self._solve(np.interp(self.frequencies, circle, spectrum))
        error = _mean(spectrum * self.gains(multipliers, circle))
        if not np.isfinite(error):
            raise DPConfigError("The multipliers certify nothing between the frequencies. Use a larger eta.")
        value = 0.5 * self._L * _mean(1 / spectrum) * error
        gains = self.gains(multipliers, self.frequencies)
        return StronglyConvexBound(value, self.frequencies, gains, multipliers)

    def _solve(self, spectrum: np.ndarray) -> np.ndarray:
        """The multipliers with the least ``int psi |B|^2`` on the grid, (2 M + 1,)."""
        cp = import_extra("cvxpy", "The bound for smooth, strongly convex losses")
        omega, lags = self.frequencies, np.delete(np.arange(-self._tau_max, self._tau_max + 1), self._tau_max)
        middle, others = cp.Variable(nonneg=True), cp.Variable(len(lags), nonneg=True)
        unit = 1 / (self._mu * self._L)  # so that the numbers the solver sees are near 1; likewise `scale`
        re = unit * (middle + self._sign * (np.cos(np.outer(omega, lags)) @ others))
        im = unit * self._sign * (np.sin(np.outer(omega, lags)) @ others)
        p11, p12_re, p12_im = self._matrix(re, im, omega, vary=cp.multiply)
        scale = np.abs(1 - np.exp(1j * omega)) / self._eta + self._mu
        gains = cp.Variable(len(omega), nonneg=True)  # psi * scale^2
        p22 = gains + cp.multiply(2 * scale**2, re)
        off = cp.multiply(2 * scale, p12_re), cp.multiply(2 * scale, p12_im)
        semidefinite = cp.SOC(p11 + p22, cp.vstack([*off, p11 - p22]), axis=0)
        weights = _trapezoid(omega) * spectrum / scale**2
        objective = cp.Minimize((weights / weights.sum()) @ gains)
        problem = cp.Problem(objective, [cp.sum(others) <= middle, semidefinite])
        with warnings.catch_warnings():  # the bound is computed from the multipliers: inaccurate ones only loosen it
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            problem.solve(solver=cp.CLARABEL)
        if problem.status not in ("optimal", "optimal_inaccurate"):
            raise DPConfigError(f"The program was not solved ({problem.status}). Use other frequencies or lags.")
        # what rounding left outside the set of multipliers is taken back, so that the bound holds
        found = np.insert(self._sign * np.maximum(others.value, 0), self._tau_max, 0.0)
        found[self._tau_max] = max(float(middle.value), np.abs(found).sum())
        return unit * found


def _spectrum(noise: ToeplitzStrategy, num: int) -> np.ndarray:
    """``|B|^2`` at frequencies evenly spaced from 0 to pi, checked; (num / 2 + 1,)."""
    if noise.num_bands is not None:
        spectrum = 1 / np.abs(np.fft.rfft(noise.strategy_coefs(num))) ** 2
    else:
        spectrum = np.abs(np.fft.rfft(noise.noising_coefs(num // 2), num)) ** 2
    grows = not (np.isfinite(spectrum) & (spectrum > 0)).all()
    if not grows and len(spectrum) % 2:  # noise taken back entirely at some frequency: a pole of the sensitivity
        square = _mean(1 / spectrum)
        grows = abs(square - _mean(1 / spectrum[::2])) > UNRESOLVED * square
    if not grows:  # Jensen: the two differ where the inverse of B does not decay
        grows = abs(_mean(np.log(spectrum)) - np.log(float(noise.noising_coefs(1)[0]) ** 2)) > UNRESOLVED
    if grows:
        raise DPConfigError(
            f"The sensitivity of {noise.name} grows with the steps, so there is no bound for a run without end. Use a "
            "damped strategy (nu > 0)."
        )
    return spectrum


def _mean(values: np.ndarray) -> float:
    """Mean over the circle of values evenly spaced from 0 to pi."""
    return float((values[0] + values[-1] + 2 * values[1:-1].sum()) / (2 * (len(values) - 1)))


def _trapezoid(omega: np.ndarray) -> np.ndarray:
    """Weights of an integral from 0 to pi, the value at the first frequency held down to 0; (K,)."""
    steps = np.diff(omega, prepend=0.0, append=omega[-1])
    weights = 0.5 * (steps[:-1] + steps[1:])
    weights[0] += 0.5 * omega[0]
    return weights
