"""Correlated noise kept or drawn again: time and memory of a step, beside what the cost model says of it.

    python benchmarks/noise_memory.py --output docs/noise_memory.json

The noise of bands is made in three ways: "ring", the last outputs (bands of C); "window", the last draws (bands of B), kept;
"again", the same draws made again. A time is the median over steps once rings and windows are full. Memory is counted from the tensors that a stream keeps. Needs torch, numpy, scipy and cryptography.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.noise import BandedInverse, BandedToeplitz, NoiseStrategy
from hf_dpopt.noise.streams import StreamCost
from hf_dpopt.randomness.chacha import ChaCha20Gaussian


def ways(bands: int) -> dict[str, tuple[NoiseStrategy, str]]:
    """Strategy and backend of each way to make noise of that many bands."""
    of_c, of_b = BandedToeplitz(tuple(0.9**i for i in range(bands))), BandedInverse.of_nu(bands)
    return {
        "ring": (of_c, "auto"),
        "window": (of_b, "history"),
        "again": (of_b, "regenerate"),
    }


TIMED = {"cpu": 2**19, "cuda": 2**24}  # coordinates that are drawn to learn how fast a device is


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
    source, total = ChaCha20Gaussian(bytes(32)), torch.zeros(num, device=device)

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


def measure(coordinates: int, bands: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way, its steps interleaved with those of the others."""
    speed = measure_speed(torch.device(options.device))
    rows = []
    for way, (strategy, backend) in ways(bands).items():
        stream = strategy.stream(
            ChaCha20Gaussian(os.urandom(32)),
            scale=1.0,
            num_steps=options.steps,
            backend=backend,
        )
        cost = strategy.cost(options.steps, backend=backend)
        sums = {"all": torch.zeros(coordinates, device=options.device)}
        first = min(bands, options.steps - 1)
        if first:
            stream.continue_at(first)
            stream.add_(sums, first)  # draws what was kept until then; not timed
            first += 1
        times, kept = [], 0
        for step in range(first, min(first + options.repetitions, options.steps)):
            _wait(options.device)
            start = time.perf_counter()
            stream.add_(sums, step)
            _wait(options.device)
            times.append(time.perf_counter() - start)
            kept = max(kept, stream.bytes_kept())
        rows.append(
            {
                "coordinates": coordinates, "bands": bands, "way": way, "seconds": statistics.median(times),
                "predicted_seconds": speed.seconds(cost, coordinates), "kept_mib": kept / 2**20,
                "predicted_mib": 4 * cost.kept * coordinates / 2**20, "draws": cost.draws, **dataclasses.asdict(speed),
            }
        )  # fmt: skip
    return rows


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinates", nargs="+", type=int, default=[10**6, 10**7])
    parser.add_argument("--bands", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=256, help="of the run")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    about = {"torch": torch.__version__, "machine": platform.machine(), "device": options.device}
    print("| coordinates | bands | way | s per step | predicted | kept, MiB | predicted | normals per step |")
    print("|---|---|---|---|---|---|---|---|")
    for coordinates in options.coordinates:
        for bands in options.bands:
            for row in measure(coordinates, bands, options):
                rows.append(row)
                print(
                    f"| {coordinates / 1e6:g} million | {bands} | {row['way']} | {row['seconds']:.3f} "
                    f"| {row['predicted_seconds']:.3f} | {row['kept_mib']:.1f} | {row['predicted_mib']:.1f} "
                    f"| {row['draws']:.2f} |",
                    flush=True,
                )
            if options.output is not None:
                text = json.dumps({"about": about, "correlated": rows}, indent=1)
                options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
