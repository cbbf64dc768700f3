"""Noise streams: a strategy run step by step, under one key."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.banded import BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.restarted import Restarted
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.streams.banded import RecurrentStream
from hf_dpopt.noise.streams.base import CorrelatedStream
from hf_dpopt.noise.streams.blt import BufferedStream
from hf_dpopt.noise.streams.restarted import RestartedStream
from hf_dpopt.noise.streams.rows import HistoryStream, RegeneratedStream, rows_of
from hf_dpopt.noise.streams.tree import TreeStream
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.randomness.cipher import NoiseSource

BACKENDS = ("auto", "history", "regenerate")
LOUDEST = 1e3  # stddev of the noise of a step relative to that of its draw


def make_stream(
    strategy: NoiseStrategy,
    source: NoiseSource,
    *,
    scale: float,
    num_steps: int,
    first_step: int = 0,
    backend: str = "auto",
    block: int = 1,
    offload: bool = False,
) -> CorrelatedStream:
    """The noise of one run.

    Args:
        strategy: what correlates it.
        source: standard normals under a key that no other stream uses.
        scale: stddev of a coordinate of ``scale * Z``, absolute, in gradient units.
        num_steps: steps at most.
        first_step: step under which the trainer asks for the first.
        backend: "auto": buffers, a ring or a stack where the strategy has them, else "regenerate"; "history" keeps all
            draws, "regenerate" none. The noise is the same, rounding aside.
        block: with "regenerate", steps that one pass over the earlier draws serves.
        offload: keep and compute the noise in the host's memory, and copy what is added to the device once a step. The
            noise is the same, rounding aside.
    """
    if backend not in BACKENDS:
        raise DPConfigError(f"backend={backend!r} is unknown. Use one of {', '.join(BACKENDS)}.")
    check_count("num_steps", num_steps)
    check_count("block", block)
    bound_to = {"strategy": strategy.digest(), "block": block}
    options: dict[str, Any] = {"scale": scale, "num_steps": num_steps, "first_step": first_step, "bound_to": bound_to}
    options["offload"] = bool(offload)
    if isinstance(strategy, TreeAggregation) and strategy.anytime:
        if backend != "auto":
            raise DPConfigError("A tree draws its nodes as they are completed: leave backend='auto'.")
        return TreeStream(strategy, source, **options)
    if isinstance(strategy, Restarted):
        steps = min(strategy.every, num_steps)

        def copy(later: NoiseSource) -> CorrelatedStream:
            return make_stream(strategy.base, later, scale=scale, num_steps=steps, backend=backend, block=block)

        copy(source)  # refuses what it cannot make
        return RestartedStream(strategy.every, copy, source, **options)
    _check_loudness(strategy, num_steps)
    if backend == "auto" and isinstance(strategy, BufferedLinearToeplitz):
        return BufferedStream(strategy, source, **options)
    if backend == "auto" and isinstance(strategy, (BandedToeplitz, ColumnNormalized)):
        return RecurrentStream(strategy, source, **options)
    rows = rows_of(strategy, num_steps)
    if backend == "history":
        return HistoryStream(rows, source, **options)
    return RegeneratedStream(rows, source, block=block, **options)


def _check_loudness(strategy: NoiseStrategy, num_steps: int) -> None:
    if isinstance(strategy, ToeplitzStrategy):
        loudest = strategy.row_norm(num_steps - 1)  # every row holds the one before
    else:
        loudest = float(np.linalg.norm(strategy.noising_matrix(num_steps), axis=1).max())
    if not loudest <= LOUDEST:
        raise DPConfigError(
            f"The noise of {strategy.name} grows to {loudest:.3g} times its draws within {num_steps} steps: float32 "
            "would round the new draw away. Use coefficients whose inverse does not grow."
        )


__all__ = ["BACKENDS", "CorrelatedStream", "make_stream"]
