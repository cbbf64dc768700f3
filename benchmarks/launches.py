"""Milliseconds that the host takes to launch one physical batch, beside those that the GPU is busy with it.

    python benchmarks/launches.py --shape roberta-large --finetuning full --output launches.json

Where launching takes longer, the GPU waits: use larger physical batches. Book-keeping, clipping, noise and AdamW.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from cases import SHAPES, Case, synchronize, versions
from whole_step import Step, Steps


def milliseconds(step: Step, device: str) -> dict[str, float]:
    """Of the host until all is launched, of both until all is done, and of the GPU's kernels alone."""
    for _ in range(2):
        step()
    synchronize(device)
    start = time.perf_counter()
    step()
    launched = time.perf_counter() - start
    synchronize(device)
    done = time.perf_counter() - start
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        step()
        synchronize(device)
    kernels = sum(event.self_device_time_total for event in profile.key_averages())
    return {"launched": 1e3 * launched, "done": 1e3 * done, "kernels": kernels / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta-large")
    parser.add_argument("--finetuning", choices=["full", "lora"], default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    shape = dataclasses.replace(SHAPES[options.shape], batch=options.batch, tokens=options.tokens)
    steps = Steps(Case(shape, options.finetuning, device=options.device, bf16=True), 1, "inductor")
    found = {way: milliseconds(getattr(steps, way)(), options.device) for way in ("stock", "private")}
    about = {**versions(), **vars(options) | {"output": str(options.output)}}
    options.output.write_text(json.dumps({**about, "milliseconds": found}, indent=1) + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
