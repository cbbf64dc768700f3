"""Normals a second of each stream on the CPU, and what the noise costs a private step, before and after.

    python benchmarks/noise_rate.py --output docs/noise_rate.json

Rates are those of the fastest of many interleaved trials of drawing and adding 2^17 normals, on one core and on all of them:
other work on the machine makes trials slower and none faster. A step is that of `step_cost.py` (forward, backward,
clipping, noise, AdamW) on 8 x 128 tokens at 768 x 6; within each repetition it is taken without noise, and with
ChaCha20 on all cores. Its time is the fastest repetition's, once by the clock and once in seconds of processors, which other work changes little; the
clock is right on an idle machine alone. On a GPU: gpu.py --parts noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step_cost import Case, seconds

from hf_dpopt.noise import NoiseStream, independent_noise
from hf_dpopt.randomness import chacha
from hf_dpopt.randomness.chacha import ChaCha20Gaussian, usable_cores

NUM = 2**17  # of a trial: a millisecond, which other work seldom interrupts
TRIALS = 300  # of a rate, in each repetition
KEY = bytes(range(32))


@contextlib.contextmanager
def cores(num: int) -> Iterator[None]:
    """Draw on that many cores."""
    module: Any = chacha
    try:
        module.usable_cores = lambda: num
        yield
    finally:
        module.usable_cores = usable_cores


def rates(repetitions: int) -> list[dict[str, Any]]:
    """Normals a second of the fastest trial for each number of cores, and ratios to one core."""
    total, source, kinds = {0: torch.zeros(NUM)}, ChaCha20Gaussian(KEY), sorted({1, usable_cores()})
    found = dict.fromkeys(kinds, 0.0)
    for repetition in range(repetitions * TRIALS):
        for num in kinds:
            with cores(num):
                start = time.perf_counter()
                source.add_to(total, stddev=0.5, step=repetition)
                found[num] = max(found[num], NUM / (time.perf_counter() - start))
    return [
        {"stream": source.stream, "cores": num, "normals_per_s": rate, "to_one_core": rate / found[1]}
        for num, rate in found.items()
    ]


def step_costs(model: str, finetuning: str, torch_threads: int, repetitions: int) -> dict[str, Any]:
    """What the noise adds to a step without any, and as it is drawn."""
    torch.set_num_threads(torch_threads)
    case = Case(model, finetuning, "cpu", bf16=False)
    of_now = independent_noise(1.0).stream(ChaCha20Gaussian(KEY), 0.1)

    def step(stream: NoiseStream | None, num_cores: int) -> tuple[float, float]:
        if stream is not None:
            case.stream = stream
        with cores(num_cores):
            began = time.process_time()
            took = seconds(case, lambda: case.private(noise=stream is not None))
            return took, time.process_time() - began

    everything = usable_cores()
    kinds = {
        "none": lambda: step(None, everything),
        "chacha20, all cores": lambda: step(of_now, everything),
    }
    for take in kinds.values():
        take()
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(repetitions):
        for kind, take in kinds.items():
            times[kind].append(take())
    num = sum(p.numel() for p in case.engine.parameters.values())
    row = {"model": model, "finetuning": finetuning, "coordinates": num, "torch_threads": torch_threads}
    clock, cpu = ({kind: min(t[i] for t in of_kind) for kind, of_kind in times.items()} for i in (0, 1))
    return {
        **row, "step_ms": 1e3 * clock["none"], "step_cpu_ms": 1e3 * cpu["none"],
        "extra": {kind: clock[kind] / clock["none"] - 1 for kind in kinds},
        "extra_cpu": {kind: cpu[kind] / cpu["none"] - 1 for kind in kinds},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["rates", "steps"], default=["rates", "steps"])
    parser.add_argument("--model", default="roberta-768x6")
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rates": rates(options.repetitions) if "rates" in options.parts else [], "steps": []}
    print("| stream | cores | normals/s | to ChaCha20 on one core |\n|---|---|---|---|")
    for row in found["rates"]:
        ratio = f"x{row['to_one_core']:.2f}"
        print(f"| {row['stream']} | {row['cores']} | {row['normals_per_s'] / 1e6:.0f} million | {ratio} |", flush=True)
    print(
        "\n| model | finetuning | torch's threads | step without noise | noise adds, by the clock; in processor time |"
    )
    print("|---|---|---|---|---|")
    for finetuning in options.finetuning if "steps" in options.parts else ():
        for threads in sorted({1, usable_cores()}):
            row = step_costs(options.model, finetuning, threads, options.repetitions)
            found["steps"].append(row)
            adds = ", ".join(f"{k} {row['extra'][k]:+.1%}; {row['extra_cpu'][k]:+.1%}" for k in list(row["extra"])[1:])
            took = f"{row['step_ms']:.0f} ms ({row['step_cpu_ms']:.0f} of processors)"
            print(f"| {options.model} | {finetuning} | {threads} | {took} | {adds} |", flush=True)
    about = {"torch": torch.__version__, "cores": usable_cores(), "machine": platform.machine()}
    about |= {"load_average": os.getloadavg()[0], "vector_units": torch.backends.cpu.get_cpu_capability()}
    if options.output is not None:
        if options.output.exists():  # what was not measured now stays
            before = json.loads(options.output.read_text(encoding="utf-8"))
            found |= {part: before[part] for part in ("rates", "steps") if part not in options.parts}
        options.output.write_text(json.dumps({"about": about, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
