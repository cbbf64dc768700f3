r"""Amplification by balls in bins by samples: estimates of delta, verification, calibration.

Delta is the mean of shares of the privacy loss. If a mean over fresh samples lies so far below the target that a
mechanism beyond it would hardly have given it, the mechanism is accepted (`verify`). For Monte Carlo proofs of a run
that is planned: `calibrate_balls_in_bins` trains with what was accepted, or not at all.

References:
    Choquette-Choo et al. (2024), arXiv:2410.06266 (Monte Carlo); Chua et al. (2024), arXiv:2412.16802 (importance
    sampling); Wang et al. (2023), arXiv:2304.08927 (estimate, verify, release).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from dp_accounting import get_epsilon_gaussian as exact_gaussian_epsilon
from dp_accounting import get_sigma_gaussian
from scipy.optimize import brentq, minimize_scalar

from hf_dpopt.accounting.random_allocation import (
    BallsInBinsDpEvent,
    StrategyMatrices,
    bin_lags,
    computed_epsilon,
    without_amplification,
)
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError

AT_ONCE = 10_000  # samples that a thread holds in memory
NUM_SAMPLES = 4_000_000  # of a verification, in each direction
NUM_GUESSES = 100_000  # of an estimate that only guides a search
FAILURE = 1e-3  # probability that a search verifies something false; delta pays for it
FAR = 50.0  # the largest logarithm that a search looks at
ATTEMPTS = 10  # verifications that share it


# --- samples of the privacy loss -------------------------------------------------------------------------------------


class Shares:
    r"""Random variables in [0, ceiling] whose means are the two deltas; importance samples of the privacy loss.

    The loss is ``L(y) = log dP/dQ = log mean_j exp((2 <y, m_j> - |m_j|^2) / (2 s^2))``. With h = (1 - e^(eps - L))_+:

    - remove: ``delta = E_P h``. Drawn from ``R = mean_j N((1 + a) m_j, s^2 I)``, a >= 0, and weighted by dP/dR. As
      ``mean_j x_j^(1 + a) >= (mean_j x_j)^(1 + a)``, the weight is at most
      ``exp(-a L + a (1 + a) max|m_j|^2 / (2 s^2))``.
    - add: with -L for L, ``delta = E_Q h``. Drawn from ``N(-a m, s^2 I)``, m the mean of the m_j. By Jensen
      ``L >= <y, m> / s^2 - mean|m_j|^2 / (2 s^2)``: the weight is at most
      ``exp(-a (-L) + a mean|m_j|^2 / (2 s^2) + a^2 |m|^2 / (2 s^2))``.

    Both bounds fall with the loss, and ``max over L of exp(-a L) h`` is ``e^(-a eps) a^a / (1 + a)^(1 + a)``. The `a`
    with the lowest ceiling is taken.
    """

    def __init__(self, gram: np.ndarray, stddev: float, epsilon: float):
        self._gram, self._epsilon, self._num_bins = gram / stddev**2, epsilon, len(gram)
        values, vectors = np.linalg.eigh(self._gram)
        self._root = np.ascontiguousarray((vectors * np.sqrt(np.maximum(values, 0))).T)  # root^T root = gram
        self._half_norms = np.diag(self._gram) / 2
        self._to_mean = self._gram.mean(axis=0)
        squared_mean = float(self._to_mean.mean())
        half = float(self._half_norms.max())
        self._tilt, ceiling = _lowest_ceiling(epsilon, half, half)
        self._back, add_ceiling = _lowest_ceiling(epsilon, float(self._half_norms.mean()), squared_mean / 2)
        self._constant = self._back**2 * squared_mean / 2
        self.ceilings = np.array([ceiling, add_ceiling])

    def draw(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Independent shares of both directions, (2, size)."""
        bins = rng.integers(self._num_bins, size=size)
        products = rng.standard_normal((size, self._num_bins)) @ self._root + (1 + self._tilt) * self._gram[bins]
        loss = _log_mean_exp(products - self._half_norms)
        weight = loss - _log_mean_exp((1 + self._tilt) * products - (1 + self._tilt) ** 2 * self._half_norms)
        remove = np.exp(weight) * -np.expm1(np.minimum(0.0, self._epsilon - loss))

        products = rng.standard_normal((size, self._num_bins)) @ self._root - self._back * self._to_mean
        weight = self._back * products.mean(axis=1) + self._constant
        loss = -_log_mean_exp(products - self._half_norms)
        add = np.exp(np.minimum(weight, 700.0)) * -np.expm1(np.minimum(0.0, self._epsilon - loss))
        return np.stack([remove, add])

    def moments(self, num_samples: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard errors of both directions; `seed` None is fresh entropy of the operating system."""
        sizes = [min(AT_ONCE, num_samples - first) for first in range(0, num_samples, AT_ONCE)]
        seeds = np.random.SeedSequence(seed).spawn(len(sizes))

        def sums(size: int, seed: np.random.SeedSequence) -> tuple[np.ndarray, np.ndarray]:
            shares = self.draw(size, np.random.Generator(np.random.PCG64DXSM(seed)))
            assert (shares <= self.ceilings[:, None] * (1 + 1e-6)).all(), (shares.max(axis=1), self.ceilings)
            return shares.sum(axis=1), np.square(shares).sum(axis=1)

        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            parts = list(pool.map(sums, sizes, seeds))  # in order: the same seed gives the same sums on any machine
        means = np.sum([part[0] for part in parts], axis=0) / num_samples
        squares = np.sum([part[1] for part in parts], axis=0) / num_samples
        return means, np.sqrt(np.maximum(0.0, squares - means**2) / num_samples)


def _lowest_ceiling(epsilon: float, linear: float, quadratic: float) -> tuple[float, float]:
    """The `a` >= 0 with the least ``exp(a linear + a^2 quadratic - a eps) a^a / (1 + a)^(1 + a)``, and that value."""

    def log_ceiling(a: float) -> float:
        return a * (linear - epsilon) + a * a * quadratic + (a * math.log(a) if a else 0.0) - (1 + a) * math.log1p(a)

    most = 1.0 + (epsilon + 1) / quadratic if quadratic else 0.0
    found = float(minimize_scalar(log_ceiling, bounds=(0.0, most), method="bounded").x) if most else 0.0
    best = min((0.0, found), key=log_ceiling)
    return best, math.exp(log_ceiling(best))


def _log_mean_exp(exponents: np.ndarray) -> np.ndarray:
    """Logarithm of the mean of exponentials over the last axis; overwrites its argument."""
    top = exponents.max(axis=1)
    exponents -= top[:, None]
    np.exp(exponents, out=exponents)
    return top + np.log(exponents.mean(axis=1))


# --- estimate, verify, release ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Outcome of one verification: estimates of delta, and the largest ones that are accepted.

    Formal guarantee: that of `verify`, for a certificate that was made before the first step of the run it is for, and
    is kept with it. `failure` is part of `delta`.
    """

    event: BallsInBinsDpEvent
    epsilon: float
    delta: float
    remove: float
    add: float
    remove_threshold: float
    add_threshold: float
    num_samples: int
    failure: float
    attempts: int

    @property
    def is_accepted(self) -> bool:
        return self.remove <= self.remove_threshold and self.add <= self.add_threshold

    def covers(self, event: BallsInBinsDpEvent, delta: float) -> bool:
        """Whether the event is the verified one with more noise or, for an anytime strategy, fewer steps."""
        known = self.event
        shorter = event.num_steps <= known.num_steps
        steps_fit = shorter if known.strategy.anytime else event.num_steps == known.num_steps
        return (
            self.is_accepted
            and steps_fit
            and delta >= self.delta
            and event.noise_multiplier >= known.noise_multiplier
            and (event.strategy, event.num_bins) == (known.strategy, known.num_bins)
        )

    def parameters(self) -> dict[str, Any]:
        """Every number; JSON-able. The strategy by its parameters."""
        event = {**_shallow(self.event), "strategy": self.event.strategy.parameters()}
        return {**_shallow(self), "event": event, "accepted": self.is_accepted}

    @classmethod
    def read(cls, parameters: Mapping[str, Any], strategy: StrategyMatrices) -> Certificate:
        """Certificate that `parameters` gave, for the strategy it was made for.

        Raises:
            DPConfigError: for numbers that no certificate wrote, or those of another strategy.
        """
        try:
            values = {field.name: parameters[field.name] for field in dataclasses.fields(cls)}
            event = {**values.pop("event"), "strategy": strategy}
            if not all(type(value) in (int, float) for value in values.values()):
                raise TypeError("a value is not a number")
            if not all(math.isfinite(values[name]) for name in ("epsilon", "delta", "remove", "add")):
                raise ValueError("a value is not finite")
            _check_target(values["epsilon"], values["delta"])
            found = cls(event=BallsInBinsDpEvent(**event), **values)
            shares = Shares(found.event.gram, found.event.noise_multiplier, found.epsilon)
            limits = _thresholds(shares, found.delta, found.num_samples, FAILURE, ATTEMPTS)
            if not np.allclose(limits, [found.remove_threshold, found.add_threshold], rtol=1e-6) or (
                (found.failure, found.attempts) != (FAILURE, ATTEMPTS)
            ):
                raise ValueError("its thresholds are not those of these numbers")
            as_written = json.loads(json.dumps(found.parameters())) == json.loads(json.dumps(dict(parameters)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DPConfigError(f"The certificate was edited: {error}. Use the ledger as the run wrote it.") from error
        if not as_written or not found.is_accepted:
            raise DPConfigError("The certificate is not one of this run's noise. Use the ledger as the run wrote it.")
        return found


def _shallow(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def largest_accepted_mean(limit: float, ceiling: float, num_samples: int, false_accept: float) -> float:
    """The threshold that a mean of `num_samples` shares in [0, ceiling] passes too rarely if its expectation >= limit.

    Formal guarantee: a sample mean at or below the threshold c has probability at most ``exp(-N KL(c / ceiling ||
    mu / ceiling))`` if the expectation is mu > c (Chernoff and Hoeffding, any law on [0, ceiling]). That is
    `false_accept` at mu = limit, and mu times it falls beyond, so that ``mu * P[accepted] <= limit * false_accept``
    for every mu >= limit. Infinite if the ceiling itself is within the limit.

    Raises:
        DPConfigError: if not even a mean of 0 is rare enough.
    """
    if ceiling <= limit:
        return math.inf
    assert false_accept < 1 / math.e, false_accept
    q, needed = limit / ceiling, -math.log(false_accept) / num_samples

    def spare(p: float) -> float:
        lower = p * math.log(p / q) if p else 0.0
        return lower + (1 - p) * (math.log1p(-p) - math.log1p(-q)) - needed

    if spare(0.0) <= 0:
        enough = math.ceil(-math.log(false_accept) / -math.log1p(-q))
        raise DPConfigError(
            f"{num_samples} samples prove nothing at delta={limit:.3g}. Use num_samples > {enough}, better ten times "
            "that, or amplification_samples=0."
        )
    low, high = 0.0, q
    for _ in range(200):  # keeps spare(low) > 0
        middle = (low + high) / 2
        low, high = (middle, high) if spare(middle) > 0 else (low, middle)
    # log(mu P) has the slope 1/mu - N (mu - c) / (mu (ceiling - mu)) in mu, at most 0 from the limit on if this holds.
    # It does: needed <= (q - low)^2 / (q (1 - q)), hence N (q - low) / (1 - q) >= -log(false_accept).
    assert num_samples * (q - low) >= 1 - q, (num_samples, q, low)
    return low * ceiling * (1 - 1e-9)  # rounding of the samples


def verify(
    event: BallsInBinsDpEvent,
    epsilon: float,
    delta: float,
    *,
    num_samples: int = NUM_SAMPLES,
    failure: float = FAILURE,
    attempts: int = 1,
) -> Certificate:
    r"""Test on fresh samples whether an event is (epsilon, delta)-DP.

    Formal guarantee: let a procedure call this for at most `attempts` events, one after the other, each chosen without
    looking at the records or at the samples of its own verification, train with the first that is accepted and with
    none if none is. Then what it releases is (epsilon, delta)-differentially private, **whatever the samples were**.
    With ``limit = delta / (1 + failure)``, d_i the true delta of event i and w_i the probability that it is the one:
    the samples do not depend on the records, so the procedure is a mixture with the same weights on both datasets and
    its delta is at most ``sum_i w_i d_i``. Events with ``d_i <= limit`` add at most limit; each other one
    ``d_i P[accepted] <= limit * failure / attempts``, see `largest_accepted_mean`, on the samples of that direction in
    which it fails. The sum is at most ``limit (1 + failure) = delta``. Moreover, an event with ``d_i > limit`` is
    accepted with probability at most `failure` in the whole search.

    Asked about a run that has already taken place, only the latter remains: the answer is wrong with probability at
    most `failure`. Either holds for samples that are as good as random; their seed is the operating system's.

    Args:
        event: the mechanism.
        epsilon: >= 0.
        delta: delta of the guarantee, in (0, 1).
        num_samples: samples in each direction.
        failure: probability of a false acceptance over all attempts, in (0, 0.1].
        attempts: how many verifications share it.

    Raises:
        DPConfigError: if the samples are too few for any proof.

    References:
        Wang et al. (2023), arXiv:2304.08927; Choquette-Choo et al. (2024), arXiv:2410.06266 (abstention).
        Hoeffding (1963), doi:10.1080/01621459.1963.10500830, Thm. 1 (the inequality).
    """
    _check_target(epsilon, delta)
    check_count("num_samples", num_samples)
    check_count("attempts", attempts)
    shares = Shares(event.gram, event.noise_multiplier, epsilon)
    thresholds = _thresholds(shares, delta, num_samples, failure, attempts)
    means, _ = shares.moments(num_samples, seed=None)
    return Certificate(
        event=event, epsilon=epsilon, delta=delta, remove=float(means[0]), add=float(means[1]),
        remove_threshold=float(thresholds[0]), add_threshold=float(thresholds[1]), num_samples=num_samples,
        failure=failure, attempts=attempts,
    )  # fmt: skip


def _thresholds(shares: Shares, delta: float, num_samples: int, failure: float, attempts: int) -> np.ndarray:
    if not 0 < failure <= 0.1:
        raise DPConfigError(f"failure={failure} is outside (0, 0.1]. Use 1e-3.")
    limit = delta / (1 + failure)
    return np.array([largest_accepted_mean(limit, c, num_samples, failure / attempts) for c in shares.ceilings])


def _excess(event: BallsInBinsDpEvent, epsilon: float, delta: float, num_samples: int) -> float:
    """Log of how far the estimated deltas lie above where a verification accepts almost surely; guides searches."""
    shares = Shares(event.gram, event.noise_multiplier, epsilon)
    means, errors = shares.moments(NUM_GUESSES, seed=1)
    spread = errors * (math.sqrt(NUM_GUESSES / num_samples) + 1) * 3  # of the verification, and of this estimate
    try:
        thresholds = _thresholds(shares, delta, num_samples, FAILURE, ATTEMPTS)
    except DPConfigError:
        return FAR  # too few samples for so little noise
    return min(FAR, float(np.log(np.maximum((means + spread) / thresholds, math.exp(-FAR))).max()))


@functools.lru_cache(maxsize=64)
def verified_epsilon(event: BallsInBinsDpEvent, delta: float, *, num_samples: int = NUM_SAMPLES) -> Certificate:
    """Certificate of nearly the smallest epsilon that a verification accepts, for an event that has taken place.

    Formal guarantee: with probability at least 1 - FAILURE over its samples, the event is (epsilon, delta)-DP. It may
    be asked at any time and depends on no record; but, unlike `calibrate_balls_in_bins`, it does not make the run
    private by refusing it. Kept, so that the same question has one answer.
    """
    known = exact_gaussian_epsilon(without_amplification(event).noise_multiplier, delta)
    low, high = 0.0, known
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(event, middle, delta, num_samples) > 0 else (low, middle)
    for attempt in range(ATTEMPTS):
        found = verify(
            event, min(known, high * 1.02**attempt), delta, num_samples=num_samples, attempts=ATTEMPTS
        )  # fmt: skip
        if found.is_accepted:
            return found
    raise DPConfigError(f"No epsilon was verified for {event}. Use more samples than {num_samples}.")


# --- calibration -----------------------------------------------------------------------------------------------------


def calibrate_balls_in_bins(
    strategy: StrategyMatrices,
    num_steps: int,
    num_bins: int,
    *,
    epsilon: float,
    delta: float,
    num_samples: int = NUM_SAMPLES,
) -> Certificate | None:
    """Certify nearly the least noise with which a run is (epsilon, delta)-DP; None unless it is 1% less than computed.

    Formal guarantee: training with the event of the certificate, or not at all if this raises, is (epsilon, delta)-DP:
    by `verify` with at most ATTEMPTS attempts, each with 1% more noise than the one before. That is one search: of
    several, to take the least noise, adds up their chances of a false acceptance.

    Args:
        num_samples: samples of each verification, in each direction.

    Raises:
        DPConfigError: if every attempt fails, or if the samples are too few for any proof.
    """
    _check_target(epsilon, delta)
    if epsilon == 0:
        raise DPConfigError("epsilon=0 needs infinite noise. Use an epsilon > 0.")

    def at(log_stddev: float) -> BallsInBinsDpEvent:
        return BallsInBinsDpEvent(strategy, math.exp(log_stddev), num_steps, num_bins)

    known = math.sqrt(bin_lags(strategy, num_steps, num_bins)[0]) * get_sigma_gaussian(epsilon, delta)
    top = math.log(known) + 1e-6  # with the bin known, this is enough
    computed = _root(lambda x: computed_epsilon(((at(x), 1),), delta) - epsilon, top)
    guess = _root(lambda x: _excess(at(x), epsilon, delta, num_samples), top)
    if guess >= computed - 0.01:
        return None
    for attempt in range(ATTEMPTS):
        found = verify(at(guess + 0.01 * attempt), epsilon, delta, num_samples=num_samples, attempts=ATTEMPTS)
        if found.is_accepted:
            return found
    # what was refused has used up its share of delta: to fall back on a computation would exceed it
    raise DPConfigError(
        f"No noise was verified for epsilon={epsilon} in {ATTEMPTS} attempts. Use more samples than "
        f"{num_samples}, or none (amplification_samples=0) for the computed bound."
    )


def _root(function: Callable[[float], float], top: float) -> float:
    """Root of a decreasing function of log stddev, to 0.1%; at most `top`."""
    low, width = top, 0.1
    while function(low) <= 0 and width < 100:
        low, width = low - width, 2 * width
    return top if low == top else float(brentq(function, low, top, xtol=1e-3)) + 1e-3


def _check_target(epsilon: float, delta: float) -> None:
    if not 0 <= epsilon < math.inf or not 0 < delta < 1:
        raise DPConfigError(f"epsilon={epsilon} and delta={delta}: use an epsilon >= 0 and a delta in (0, 1).")
