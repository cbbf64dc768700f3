"""What the noise of a step costs, before any is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np

from hf_dpopt.noise.banded import BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.nu_dpftrl import IdentityStrategy
from hf_dpopt.noise.restarted import Restarted
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.tree import TreeAggregation


@dataclasses.dataclass(frozen=True)
class StreamCost:
    """Per trained coordinate, on average over the steps of a run.

    Attributes:
        draws: standard normals per step.
        passes: multiply-adds over a tensor per step.
        kept: float32 numbers kept between steps.
    """

    draws: float
    passes: float
    kept: float


def stream_cost(strategy: NoiseStrategy, num_steps: int, *, backend: str = "auto", block: int = 1) -> StreamCost:
    """Cost of what `make_stream` makes of the same arguments."""
    match strategy:
        case IdentityStrategy():
            return StreamCost(1, 1, 0)
        case Restarted():
            return stream_cost(strategy.base, min(strategy.every, num_steps), backend=backend, block=block)
        case TreeAggregation() if strategy.anytime:
            levels = min(strategy.restart_every or num_steps, num_steps).bit_length()
            return StreamCost(2, 2 + levels / 2, 1 + levels / 2)
        case BufferedLinearToeplitz() if backend == "auto":
            return StreamCost(1, 1 + 2 * len(strategy.poles), len(strategy.poles))
        case BandedToeplitz() | ColumnNormalized() if backend == "auto":
            bands = strategy.num_bands or 1
            return StreamCost(1, bands, bands - 1)
    if isinstance(strategy, ToeplitzStrategy):
        used = np.cumsum(strategy.noising_coefs(num_steps) != 0)  # draws that a step needs
    else:
        used = np.arange(1, num_steps + 1)
    average = float(used.mean())
    if backend == "history":
        return StreamCost(1, average, num_steps)
    # one pass over the earlier draws serves a block; every step draws its own
    draws = 1 + (average - 1) / block if block > 1 else average
    return StreamCost(draws, average, block if block > 1 else 0)
