"""Cost of the noise of a step, known before any is drawn, and the cheapest way to make it on a device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np
import torch

from hf_dpopt.randomness.cipher import make_noise_source

TIMED = {"cpu": 2**19, "cuda": 2**24}  # coordinates that are drawn to learn how fast a device is
BYTES = 4  # of a float32


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


@dataclasses.dataclass(frozen=True)
class Speed:
    """Speed of a device at noise, for one float32 coordinate.

    Attributes:
        draw_s: seconds to draw a normal.
        pass_s: seconds of a multiply-add.
    """

    draw_s: float
    pass_s: float

    def seconds(self, cost: StreamCost, coordinates: int) -> float:
        """Seconds of the noise of a step, on average over a run, for so many trained coordinates."""
        return (cost.draws * self.draw_s + cost.passes * self.pass_s) * coordinates


def measure_speed(device: torch.device) -> Speed:
    """Speed of a device: the fastest of three short trials, after one that builds what is to be built."""
    num = TIMED.get(device.type, TIMED["cpu"])
    source, total = make_noise_source("secure", bytes(32)), torch.zeros(num, device=device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    trials = []
    for trial in range(4):
        start = now()
        normal = source.normal((num,), step=trial, tensor=0, device=device)
        middle = now()
        total.add_(normal, alpha=0.5)
        trials.append((middle - start, now() - middle))
    draws, passes = zip(*trials[1:], strict=True)
    return Speed(min(draws) / num, min(passes) / num)


def cheapest(costs: Mapping[str, StreamCost], *, coordinates: int, room: float, speed: Speed) -> str:
    """Name of the way to make noise that takes the least time among those that fit.

    Args:
        costs: name -> cost; of two that are as fast, the first is taken. One of them keeps nothing.
        coordinates: trained coordinates on the device, >= 1.
        room: bytes that noise may keep there.
        speed: that of the device.
    """
    fitting = {name: cost for name, cost in costs.items() if BYTES * cost.kept * coordinates <= room}
    return min(fitting or costs, key=lambda name: speed.seconds(costs[name], coordinates))


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
