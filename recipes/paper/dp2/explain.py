r"""How much the words of one private step can lower the loss of a logistic regression, wherever D stands.

An update ``w - eta (s + z)``, signal s and noise of variance V per coordinate, changes the loss, to second order and
in expectation, by ``-eta <grad, s> + eta^2 / 2 (s^T H s + <diag H, V>)``; with the best eta it falls by
``<grad, s>^2 / (2 (s^T H s + <diag H, V>))``. Computed on all training records, so sampling adds no noise here. The
bias counts in the norms that are clipped; otherwise it is kept at its best, for one number is found by any method.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

from recipes.paper.dp2.data import Task


def best_bias(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """The bias of least loss, between those at which all records are sure of one class."""
    sure = 50 + float(np.abs(scores_N).max())
    return float(brentq(lambda bias: (labels_N - _sigmoid(scores_N + bias)).sum(), -sure, sure, xtol=1e-14))


def decreases(
    task: Task, weights_W: np.ndarray, scale_W: np.ndarray, *, clips: dict[str, float], stddev: float
) -> dict[str, Any]:
    """Largest expected decrease of the training loss by the words of one step, and what the clip sees.

    Args:
        task: two classes.
        weights_W: of the words, where the step begins.
        scale_W: D; that of the bias is last.
        clips: bounds on the norm of g ("plain"), of g / D ("divided") and of g without the bias ("no bias").
        stddev: of the noise in the mean gradient / clip norm: noise multiplier / batch size.
    """
    x_NW, labels_N = task.train.sparse_NW, task.train.labels_N.numpy()
    squared_NW = x_NW.multiply(x_NW).tocsr()
    scores_N = x_NW @ weights_W
    p_N = _sigmoid(scores_N + best_bias(scores_N, labels_N))
    errors_N, curvatures_N, n = p_N - labels_N, p_N * (1 - p_N), len(labels_N)
    gradient_W, diagonal_W = x_NW.T @ errors_N / n, squared_NW.T @ curvatures_N / n

    def clipped_mean(squares_N: np.ndarray, bound: float) -> tuple[np.ndarray, float]:
        """Mean gradient of the words with records clipped by those squared lengths; share of clipped records."""
        factors_N = np.minimum(1, bound / np.maximum(np.abs(errors_N) * np.sqrt(squares_N), 1e-30))
        return x_NW.T @ (factors_N * errors_N) / n, float((factors_N < 1).mean())

    def best(signal_W: np.ndarray, variance_W: np.ndarray | float) -> float:
        curvature = curvatures_N @ (x_NW @ signal_W) ** 2 / n + np.sum(diagonal_W * variance_W)
        return float((gradient_W @ signal_W) ** 2 / (2 * curvature))

    inverse_W = 1 / scale_W[:-1]
    words_N = np.asarray(squared_NW.sum(axis=1)).ravel()
    divided_N = squared_NW @ inverse_W**2
    plain_W, plain_clipped = clipped_mean(words_N + 1, clips["plain"])
    divided_W, divided_clipped = clipped_mean(divided_N + scale_W[-1] ** -2, clips["divided"])
    no_bias_W, _ = clipped_mean(words_N, clips["no bias"])
    variance = {name: (stddev * clip) ** 2 for name, clip in clips.items()}
    return {
        "plain": best(plain_W, variance["plain"]),
        "divided": best(inverse_W * divided_W, variance["divided"]),
        "divided, two queries": best(inverse_W * divided_W, 2 * variance["divided"]),
        "noise first": best(inverse_W * plain_W, variance["plain"] * inverse_W**2),
        "no bias": best(no_bias_W, variance["no bias"]),
        "without noise": best(gradient_W, 0.0),
        "clipped, plain": plain_clipped,
        "clipped, divided": divided_clipped,
        "bias, plain": float((1 / (words_N + 1)).mean()),
        "bias, divided": float((1 / (1 + divided_N * scale_W[-1] ** 2)).mean()),
    }


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    return expit(scores)
