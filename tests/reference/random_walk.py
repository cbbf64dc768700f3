"""The worst case of the last iterate, on a line: a walk on an interval, with and without a drift.

Every record has gradient 0, but for one whose gradient is -L, whatever the weights. The laws of the last iterates are
computed on a grid, step by step, and compared.
"""

from __future__ import annotations

import numpy as np
from scipy import optimize, stats


def laws(
    *, diameter: float, step_size: float, noise: float, drift: float, sample_rate: float, num_steps: int, cells: int
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the cells of the interval after `num_steps`, without the record and with it, (cells,) each.

    Args:
        noise: stddev of the noise in a step, before the step size.
        drift: of a step with the record, before the step size.
    """
    width = diameter / cells
    middles = (np.arange(cells) + 0.5) * width
    edges = np.arange(1, cells) * width

    def transition(shift: float) -> np.ndarray:
        """(cells, cells): from row to column; what leaves the interval stays in the cell at its end."""
        below = stats.norm.cdf((edges[None] - middles[:, None] - shift) / (step_size * noise))
        return np.diff(below, axis=1, prepend=0.0, append=1.0)

    without = transition(0.0)
    with_it = (1 - sample_rate) * without + sample_rate * transition(step_size * drift)
    start = np.zeros(cells)
    start[cells // 2] = 1.0
    first, second = start, start
    for _ in range(num_steps):
        first, second = first @ without, second @ with_it
    return first, second


def epsilon(first: np.ndarray, second: np.ndarray, delta: float) -> float:
    """The least epsilon at which two laws are (epsilon, delta)-close, both ways."""

    def exceeds(x: float) -> float:
        one = np.maximum(first - np.exp(x) * second, 0).sum()
        other = np.maximum(second - np.exp(x) * first, 0).sum()
        return max(one, other) - delta

    return 0.0 if exceeds(0.0) <= 0 else float(optimize.brentq(exceeds, 0.0, 100.0))
