"""Numbers of noise strategies that papers tabulate and no run asks for."""

from __future__ import annotations

import numpy as np

from hf_dpopt.noise import Participation, Workload
from hf_dpopt.noise.strategy import NoiseStrategy


def max_loss(strategy: NoiseStrategy, n: int, participation: Participation, workload: Workload | None = None) -> float:
    """Root of the largest mean square error of an iterate at noise multiplier 1 and clip 1."""
    return strategy.sensitivity(n, participation) * float(np.sqrt(strategy.per_query_error(n, workload).max()))


def fourier_error(n: int) -> float:
    """Root mean square error of every prefix sum by the Fourier factorisation of n steps, for one participation.

    ``K[0, 0] = 1/2 + (1 / 2n) sum_{j < n} 1 / sin(pi (2j + 1) / 2n)``, that is ``ln(n) / pi + 0.981`` for long runs.
    """
    return 0.5 + float((1 / np.sin(np.pi * (2 * np.arange(n) + 1) / (2 * n))).sum()) / (2 * n)
