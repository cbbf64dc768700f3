"""What correlated noise adds to a private step, beside independent noise, measured in one run.

    python benchmarks/noise.py --output docs/noise.json

Every repetition takes one private step (forward, backward, clipping, independent noise, AdamW) and one noise step of
every mechanism over the same tensors; costs are medians of ratios within a repetition. Memory is counted from the
tensors that a stream keeps. Needs torch, transformers, peft and hf_dpopt only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from step_cost import MODELS, Case, seconds

from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    NoiseStrategy,
    independent_noise,
)
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.randomness.chacha import ChaCha20Gaussian

STRATEGIES: dict[str, NoiseStrategy] = {
    "BLT, 2 buffers": BufferedLinearToeplitz((0.97, 0.7), (0.9, 0.4)),
    "BLT, 3 buffers": BufferedLinearToeplitz((0.99, 0.9, 0.6), (0.95, 0.8, 0.3)),
    "BLT, 6 buffers": BufferedLinearToeplitz((0.99, 0.96, 0.9, 0.8, 0.6, 0.3), (0.98, 0.93, 0.85, 0.7, 0.45, 0.1)),
    "banded, 4": BandedToeplitz((1.0, 0.5, 0.3, 0.2)),
    "banded, 16": BandedToeplitz(tuple(0.9**i for i in range(16))),
    "damped anti-PGD, drawn again": BandedInverse((1.0, -0.9)),
    "inverse bands, 8, drawn again": BandedInverse.of_nu(8),
    "tree, Honaker": TreeAggregation("honaker"),
}


def measure(name: str, finetuning: str, repetitions: int, warm_up: int) -> list[dict[str, object]]:
    """One row per mechanism; `warm_up` noise steps fill rings and stacks first."""
    case = Case(name, finetuning, "cpu", bf16=False)
    sums = {n: torch.zeros(p.shape) for n, p in case.engine.parameters.items()}
    num = sum(t.numel() for t in sums.values())
    streams = {
        label: strategy.stream(ChaCha20Gaussian(os.urandom(32)), scale=1.0, num_steps=10**4)
        for label, strategy in STRATEGIES.items()
    }
    independent = independent_noise(1.0).stream(ChaCha20Gaussian(os.urandom(32)), 1.0)
    for stream in (independent, *streams.values()):
        for step in range(warm_up):
            stream.add_(sums, step)
    for _ in range(2):
        case.private()
    extra: dict[str, list[float]] = {label: [] for label in streams}
    steps = []
    for repetition in range(repetitions):
        whole = seconds(case, case.private)
        steps.append(whole)
        least = seconds(case, functools.partial(independent.add_, sums, warm_up + repetition))
        took = {
            label: seconds(case, functools.partial(stream.add_, sums, warm_up + repetition))
            for label, stream in streams.items()
        }
        for label in streams:
            extra[label].append((took[label] - least) / whole)
    return [
        {
            "model": name, "finetuning": finetuning, "coordinates": num, "step_ms": 1e3 * statistics.median(steps),
            "mechanism": label, "extra": statistics.median(extra[label]),
            "copies_kept": streams[label].bytes_kept() / (4 * num),
        }
        for label in streams
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["roberta-768x6"])
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["lora", "full"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--warm_up", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for finetuning in options.finetuning:
            for row in measure(name, finetuning, options.repetitions, options.warm_up):
                rows.append(row)
                print(
                    f"| {name} | {finetuning} | {row['step_ms']:.0f} ms | {row['mechanism']} | {row['extra']:+.1%} | "
                    f"{row['copies_kept']:.2f} |",
                    flush=True,
                )
    if options.output is not None:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
