"""Exact privacy of one step by enumeration: the law of a noisy sum is a mixture of Gaussians on a line.

Every record contributes a number in [-1, 1] (its clipped gradient); every possible batch is one component. Slow, and
independent of all accounting code.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import optimize, stats

Mixture = dict[float, float]  # mean -> weight


def poisson_sum(values: list[float], rate: float, cap: int) -> Mixture:
    """Law of the un-noised sum of a Poisson batch that is cut to a uniformly random subset of ``cap`` records."""
    law: Mixture = {}
    for size in range(len(values) + 1):
        weight = rate**size * (1 - rate) ** (len(values) - size)
        for batch in itertools.combinations(values, size):
            kept = list(itertools.combinations(batch, min(cap, size)))
            for subset in kept:
                law[sum(subset)] = law.get(sum(subset), 0.0) + weight / len(kept)
    return law


def delta_at(epsilon: float, p: Mixture, q: Mixture, stddev: float) -> float:
    """Hockey-stick divergence of the two noisy mixtures, the larger of both directions."""
    x = np.linspace(-12 * stddev - 8, 12 * stddev + 8, 60_001)

    def density(mixture: Mixture) -> np.ndarray:
        return sum(w * stats.norm.pdf(x, loc=mean, scale=stddev) for mean, w in mixture.items())

    p_x, q_x = density(p), density(q)
    step = x[1] - x[0]
    forth = np.maximum(p_x - math.exp(epsilon) * q_x, 0).sum() * step
    back = np.maximum(q_x - math.exp(epsilon) * p_x, 0).sum() * step
    return max(forth, back)


def epsilon_at(delta: float, p: Mixture, q: Mixture, stddev: float) -> float:
    """Smallest epsilon >= 0 at which the two noisy mixtures are (epsilon, delta)-close."""
    if delta_at(0.0, p, q, stddev) <= delta:
        return 0.0
    return optimize.brentq(lambda e: delta_at(e, p, q, stddev) - delta, 0.0, 200.0, xtol=1e-7)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of a Gaussian mechanism whose sensitivity is mu standard deviations (Balle & Wang 2018, Theorem 8)."""
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu))
