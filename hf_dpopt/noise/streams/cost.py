"""Cost of the noise of a step, known before any is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class StreamCost:
    """Cost of noise per trained coordinate, on average over the steps of a run.

    Attributes:
        draws: standard normals per step.
        passes: multiply-adds over a tensor per step.
        kept: float32 numbers kept between steps.
    """

    draws: float
    passes: float
    kept: float


def cost_of_rows(draws_used: np.ndarray, backend: str, block: int, *, window: int | None = None) -> StreamCost:
    """Cost of noise that is made by the rows of B as they stand.

    Args:
        draws_used: draws that the noise of each step is made of, (num_steps,).
        backend: "history" or "regenerate".
        block: steps that one pass over the earlier draws serves, with "regenerate".
        window: last draws, that of the step included, beyond which no step uses any; None for all.
    """
    average = float(draws_used.mean())
    if backend == "history":
        return StreamCost(1, average, len(draws_used) if window is None else min(window - 1, len(draws_used)))
    # one pass over the earlier draws serves a block; every step draws its own
    draws = 1 + (average - 1) / block if block > 1 else average
    return StreamCost(draws, average, block if block > 1 else 0)
