"""The adaptive filter of DOPPLER, section 5.3, from its formula: all gradients at once, float64, a loop per step."""

from __future__ import annotations

import numpy as np


def adaptive_fir(
    recorded: np.ndarray, covariance: np.ndarray, taps: int, refresh_every: int
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and weights of every step.

    Args:
        recorded: released gradients, (T, d).
        covariance: of the noise of a coordinate over the steps, (T, T).

    Returns:
        Outputs, (T, d), and the weights they were made with, (T, taps).
    """
    num_steps, d = recorded.shape
    b = np.eye(taps)[0]
    since = 0  # first step after the last estimate
    outputs, weights = [], []
    for t in range(num_steps):
        if (t + 1) % refresh_every == 0 and t >= taps - 1:
            c = np.array([estimate(recorded, covariance, since, t, lag) for lag in range(taps)])
            if c.sum() > 0 and is_usable(c / c.sum()):
                b = c / c.sum()
            since = t + 1
        num = min(t + 1, taps)
        output = sum(b[lag] * recorded[t - lag] for lag in range(num)) / sum(b[lag] for lag in range(num))
        outputs.append(output)
        weights.append(b)
    return np.array(outputs), np.array(weights)


def estimate(recorded: np.ndarray, covariance: np.ndarray, first: int, last: int, lag: int) -> float:
    """The numerator of c_lag: a mean over the steps first ... last that have one `lag` steps before them."""
    d, terms = recorded.shape[1], []
    for t in range(max(first, lag), last + 1):
        old = recorded[t - lag]
        signal = max(old @ old - d * covariance[t - lag, t - lag], 0.0)
        noise = d * covariance[t, t - lag]
        terms.append(recorded[t] @ old - noise - 0.5 * signal)
    return float(np.mean(terms))


def adaptive_fir_as_printed(
    recorded: np.ndarray, variance: float, taps: int, refresh_every: int
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and weights of every step by the paper's formula alone: denominator and all, and nothing is checked.

    Args:
        recorded: released gradients, (T, d).
        variance: of the noise of a coordinate of a release.

    Returns:
        Outputs, (T, d), and the weights they were made with, (T, taps).
    """
    num_steps, d = recorded.shape
    b, since, outputs, weights = np.eye(taps)[0], 0, [], []
    for t in range(num_steps):
        if (t + 1) % refresh_every == 0 and t >= taps - 1:
            c = []
            for lag in range(taps):
                products, powers = [], []
                for s in range(max(since, lag), t + 1):
                    new, old = recorded[s], recorded[s - lag]
                    products.append(new @ old - 0.5 * max(old @ old - d * variance, 0.0))
                for s in range(since, t + 1):
                    powers.append(max(recorded[s] @ recorded[s] - d * variance, 1e-3))
                c.append(np.mean(products) / np.mean(powers))
            b, since = np.array(c) / np.sum(c), t + 1
        outputs.append(sum(b[lag] * recorded[t - lag] for lag in range(min(t + 1, taps))))
        weights.append(b)
    return np.array(outputs), np.array(weights)


def is_usable(b: np.ndarray) -> bool:
    """No sum of the first weights is <= 0, and none of the first outputs has louder noise than the gradient."""
    sums = [b[: t + 1].sum() for t in range(len(b))]
    return all(s > 0 for s in sums) and all(
        np.sqrt((b[: t + 1] ** 2).sum()) <= s * (1 + 1e-9) for t, s in enumerate(sums)
    )
