"""Correlated noise kept or drawn again: time and memory of a step, beside what the cost model says of it.

    python benchmarks/noise_memory.py --output docs/noise_memory.json

The noise of bands is made in three ways: "ring", the last outputs (bands of C); "window", the last draws (bands of B), kept;
"again", the same draws made again. A time is the median over steps once rings and windows are full. Memory is counted from the tensors that a stream keeps. Needs torch, numpy, scipy and cryptography.

    python benchmarks/noise_memory.py --mechanisms --coordinates 1000000 100000000 --output docs/noise_memory.json

instead tells what a step's noise of every mechanism costs a run (`RUN`), in seconds of processors: measured where that takes
no more than `AFFORDABLE` draws, else, and for `PLANNED` coordinates, computed from the rates of a draw and of a pass at the
largest measured number of coordinates. It also names the mechanism that `auto` takes.
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

from hf_dpopt import PrivacyConfig, PrivacyPlan, make_plan
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


# --- every mechanism, as a run plans it ---

RUN = {"num_examples": 512_000, "num_steps": 500}
PLANNED = 7 * 10**9
AFFORDABLE, LARGEST_KEPT = 2 * 10**9, 2**33  # normals drawn for a row, some 20 s of one core; bytes kept
FULL = 16  # steps after which what is kept is all there: the bands, and a tree of 32 steps but one level
WAYS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "banded: outputs kept": {"num_bands": 16},
    "banded: drawn again": {"num_bands": 16, "backend": "regenerate"},
    "banded_inverse: draws kept": {"num_bands": 16, "backend": "history"},
    "banded_inverse: drawn again": {"num_bands": 16},
    "nu_dpftrl": {},
    "blt": {},
    "honaker": {},
    "tree": {},
    "dense": {},
    "fft": {},
}


def planned(name: str, **kwargs: Any) -> PrivacyPlan:
    config = PrivacyConfig(
        target_epsilon=8.0, target_delta=1e-6, expected_batch_size=1024, sampling="auto", noise_mechanism=name,
        noise_kwargs=kwargs,
    )  # fmt: skip
    return make_plan(config, **RUN)


def of_mechanism(way: str, plan: PrivacyPlan, coordinates: int, repetitions: int) -> dict[str, Any]:
    """Seconds of processors of steps once what is kept is all there, or none where that would take too much.

    Where nothing is kept, of steps in the middle of the run, whose number of draws is the mean.
    """
    cost = plan.cost
    first = FULL if cost.kept else RUN["num_steps"] // 2
    row = {"way": way, "coordinates": coordinates, **dataclasses.asdict(cost), "seconds": [], "kept_bytes": None}
    to_draw = (repetitions + 1 + (first if cost.kept else 0)) * cost.draws
    if to_draw * coordinates > AFFORDABLE or 4 * cost.kept * coordinates > LARGEST_KEPT:
        return row
    stream = plan.mechanism.stream(ChaCha20Gaussian(bytes(32)), 1.0, first_step=1, num_steps=RUN["num_steps"])
    sums = {"all": torch.zeros(coordinates)}
    stream.continue_at(first)
    stream.add_(sums, first + 1)  # brings back what is kept; not timed
    for step in range(first + 2, first + 2 + repetitions):
        start = time.process_time()
        stream.add_(sums, step)
        row["seconds"].append(time.process_time() - start)
    return row | {"kept_bytes": stream.bytes_kept()}


def rates(coordinates: int, repetitions: int = 5) -> Speed:
    """Seconds of processors of a draw and of a pass, at that many coordinates; medians."""
    source, total, found = ChaCha20Gaussian(bytes(32)), torch.zeros(coordinates), []
    for trial in range(repetitions):
        start = time.process_time()
        normal = source.normal((coordinates,), step=trial, tensor=0, device=total.device)
        middle = time.process_time()
        total.add_(normal, alpha=0.5)
        found.append((middle - start, time.process_time() - middle))
    draws, passes = zip(*found, strict=True)
    return Speed(statistics.median(draws) / coordinates, statistics.median(passes) / coordinates)


def measure_mechanisms(options: argparse.Namespace) -> dict[str, Any]:
    speed = rates(max(options.coordinates))
    rows = []
    sizes = [*options.coordinates, PLANNED]
    print(f"| noise | draws, passes, copies kept | {' | '.join(f'{n:.0e}' for n in sizes)} |")
    print("|---|---|" + "---|" * len(sizes))
    for way, kwargs in WAYS.items():
        plan, cells = planned(way.split(":")[0], **kwargs), []
        for coordinates in sizes:
            row = of_mechanism(way, plan, coordinates, options.repetitions)
            row["planned_seconds"] = speed.seconds(plan.cost, coordinates)
            rows.append(row)
            seconds = statistics.median(row["seconds"]) if row["seconds"] else row["planned_seconds"]
            how, kept = "" if row["seconds"] else " (planned)", row["kept_bytes"] or 4 * plan.cost.kept * coordinates
            cells.append(f"{seconds:.3g} s{how}, {kept / 2**30:.3g} GiB")
        cost = plan.cost
        print(f"| `{way}` | {cost.draws:.1f}, {cost.passes:.1f}, {cost.kept:.1f} | {' | '.join(cells)} |", flush=True)
    chosen = planned("auto").strategy.name
    print(f"\n`auto` takes {chosen}.")
    return {"run": RUN, **dataclasses.asdict(speed), "auto": chosen, "rows": rows}


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
    parser.add_argument("--mechanisms", action="store_true", help="every mechanism, as a run plans it; on a CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    about = {"torch": torch.__version__, "machine": platform.machine(), "device": options.device}
    if options.mechanisms:
        content = {"about": about, "mechanisms": measure_mechanisms(options)}
        if options.output is not None:
            before = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
            options.output.write_text(json.dumps(before | content, indent=1) + "\n", encoding="utf-8")
        return
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
