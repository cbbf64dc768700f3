"""Clipping on a GPU: throughput and memory of RoBERTa-large and GPT-2 against the non-private step, at the best batch.

    python benchmarks/gpu.py --output docs/gpu.json

For every model, length, precision and way the physical batch is doubled until memory is full; the throughput reported is
the best of any batch that fits. Needs torch, transformers and hf_dpopt, no network (models come from configs, with random
weights). `--device cpu --shapes roberta-256x4 --max_batch 4` tries the script without a GPU.

Published, for book-keeping (Bu et al. 2023, arXiv:2210.00038): 0.80 of the non-private throughput on GPT-2, 0.70 to 0.76
on RoBERTa-large, memory within 1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from typing import Any

import torch
from cases import SHAPES, Case, peak_mib, synchronize, versions

DEFAULT = ("roberta-large", "gpt2", "gpt2-medium", "gpt2-large")
WAYS = ("stock", "book_keeping", "two_pass")


def step_ms(case: Case, step: Any, repetitions: int) -> float:
    """Median milliseconds by device events (by the clock on a CPU)."""
    times = []
    for _ in range(2):
        case.release()
        step()
    for _ in range(repetitions):
        case.release()
        if case.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measure(shape: Any, finetuning: str, way: str, options: argparse.Namespace, bf16: bool) -> dict[str, Any] | None:
    """One batch size; None if it does not fit."""
    case = step = None
    try:
        case = Case(shape, finetuning, device=options.device, bf16=bf16, checkpointing=options.checkpointing)
        step = getattr(case, way)()
        ms = step_ms(case, step, options.repetitions)
        case.release()
        mib = peak_mib(case, step)
    except torch.OutOfMemoryError:
        return None
    finally:
        del case, step
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return {"batch": shape.batch, "ms": ms, "records_per_s": 1e3 * shape.batch / ms, "mib": mib}


def sweep(name: str, tokens: int, finetuning: str, way: str, options: argparse.Namespace, bf16: bool) -> list[dict]:
    """All batches that fit, doubled from `--min_batch`."""
    found, batch = [], options.min_batch
    while batch <= options.max_batch:
        shape = dataclasses.replace(SHAPES[name], batch=batch, tokens=tokens)
        row = measure(shape, finetuning, way, options, bf16)
        if row is None:
            break
        found.append(row)
        batch *= 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(DEFAULT))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--min_batch", type=int, default=4)
    parser.add_argument("--max_batch", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output")
    options = parser.parse_args()
    rows = []
    print("| model | tokens | finetuning | precision | way | largest batch | records/s (best) | to stock | MiB at the common batch | to stock |")  # fmt: skip
    for name in options.shapes:
        for tokens in options.tokens:
            for finetuning in options.finetuning:
                for precision in options.precisions:
                    stock: list[dict] = []
                    for way in options.ways:
                        found = sweep(name, tokens, finetuning, way, options, precision == "bf16")
                        stock = found if way == "stock" else stock
                        rows.append({"shape": name, "tokens": tokens, "finetuning": finetuning, "precision": precision, "way": way, "batches": found})  # fmt: skip
                        if not found or not stock:
                            print(f"| {name} | {tokens} | {finetuning} | {precision} | {way} | none fits | | | | |")
                            continue
                        best, reference = (max(r["records_per_s"] for r in rs) for rs in (found, stock))
                        common = min(len(found), len(stock)) - 1
                        memory = found[common]["mib"] / max(stock[common]["mib"], 1e-9)
                        print(
                            f"| {name} | {tokens} | {finetuning} | {precision} | {way} | {found[-1]['batch']} | {best:.1f} "
                            f"| {best / reference:.2f} | {found[common]['mib']:.0f} | {memory:.2f} |", flush=True,
                        )  # fmt: skip
                        if options.output:
                            with open(options.output, "w", encoding="utf-8") as file:
                                json.dump({"rows": rows, "device": device_name(options.device), **versions()}, file, indent=1)  # fmt: skip
    synchronize(options.device)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
