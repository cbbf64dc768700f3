r"""How much one private step can lower the loss of a logistic regression, for every place where D may stand.

An update ``w - eta (s + z)``, signal s and noise of variance V per coordinate, changes the loss, to second order and
in expectation, by ``-eta <grad, s> + eta^2 / 2 (s^T H s + <diag H, V>)``; with the best eta it falls by
``<grad, s>^2 / (2 (s^T H s + <diag H, V>))``. Computed on all training records, so sampling adds no noise here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, hstack

from recipes.paper.dp2.data import Task


def decreases(
    task: Task, weights_W: np.ndarray, scale_W: np.ndarray, *, clip: float, clip_divided: float, stddev: float
) -> dict[str, Any]:
    """Largest expected decrease of the training loss in one step, and what the clip sees.

    Args:
        task: two classes; the bias, if there is one, is the last coordinate.
        weights_W: where the step begins.
        scale_W: D.
        clip, clip_divided: bounds on the norm of g and of g / D.
        stddev: of the noise in the mean gradient / clip norm: noise multiplier / batch size.
    """
    x_NW = task.train.sparse_NW
    if task.bias:
        x_NW = csr_matrix(hstack([x_NW, np.ones((x_NW.shape[0], 1))]))
    squared_NW = x_NW.multiply(x_NW).tocsr()
    p_N = 1 / (1 + np.exp(-(x_NW @ weights_W)))
    errors_N, curvatures_N = p_N - task.train.labels_N.numpy(), p_N * (1 - p_N)
    n = len(errors_N)
    gradient_W, diagonal_W = x_NW.T @ errors_N / n, squared_NW.T @ curvatures_N / n

    def clipped_mean(inverse_W: np.ndarray, bound: float) -> tuple[np.ndarray, np.ndarray]:
        norms_N = np.abs(errors_N) * np.sqrt(squared_NW @ inverse_W**2)
        factors_N = np.minimum(1, bound / np.maximum(norms_N, 1e-30))
        return inverse_W * (x_NW.T @ (factors_N * errors_N)) / n, factors_N

    def best(signal_W: np.ndarray, variance_W: np.ndarray | float) -> float:
        curvature = curvatures_N @ (x_NW @ signal_W) ** 2 / n + np.sum(diagonal_W * variance_W)
        return float((gradient_W @ signal_W) ** 2 / (2 * curvature))

    one_W, inverse_W = np.ones_like(scale_W), 1 / scale_W
    plain_W, plain_factors_N = clipped_mean(one_W, clip)
    divided_W, divided_factors_N = clipped_mean(inverse_W, clip_divided)
    return {
        "plain": best(plain_W, (stddev * clip) ** 2),
        "divided": best(divided_W, (stddev * clip_divided) ** 2),
        "divided, two queries": best(divided_W, 2 * (stddev * clip_divided) ** 2),
        "noise first": best(plain_W * inverse_W, (stddev * clip * inverse_W) ** 2),
        "without noise": best(gradient_W, 0.0),
        "clipped, plain": float((plain_factors_N < 1).mean()),
        "clipped, divided": float((divided_factors_N < 1).mean()),
        "bias, plain": _share_of_last(squared_NW, one_W) if task.bias else 0.0,
        "bias, divided": _share_of_last(squared_NW, inverse_W) if task.bias else 0.0,
    }


def _share_of_last(squared_NW: csr_matrix, inverse_W: np.ndarray) -> float:
    """Mean share of the last coordinate in the squared norm of a record's gradient."""
    return float((inverse_W[-1] ** 2 / (squared_NW @ inverse_W**2)).mean())
