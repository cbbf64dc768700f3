"""The private step on a GPU against the non-private one: clipping alone, the noise, and the whole step, all in.

    python benchmarks/gpu.py --output gpu.json
    python benchmarks/gpu.py --parts steps --shapes roberta-large --tokens 128 --output steps.json

* `clipping`: forward, backward and clipping. For every model, length, finetuning and precision the ways are interleaved in
  one process at a few physical batches, given as tokens; a throughput is that of the median step at the best of them.
* `noise`: the noise of one logical step over all trainable parameters; its share of a step needs the part before.
* `steps`: a step of `--records` records with clipping, sums, noise and AdamW, beside a stock step and one through
  `torch.compile` with the same AdamW, with model FLOP utilisation (`flops.py` has the formula, `whole_step.py` the step).

Needs torch, transformers, peft and hf_dpopt; no network (models come from configs, with random weights). `--device cpu
--shapes roberta-256x4 --tokens 128 --batch_tokens 512` tries the script without a GPU. `make gpu` runs it in pieces.

Published, for book-keeping (Bu et al. 2023, arXiv:2210.00038): 0.80 of the non-private throughput on GPT-2, 0.70 to 0.76
on RoBERTa-large, memory within 1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_summary
import torch
import whole_step
from cases import SHAPES, Case, peak_mib, seconds, synchronize, versions

from hf_dpopt.randomness.chacha import ChaCha20Gaussian

DEFAULT = ("roberta-large", "gpt2", "gpt2-medium", "gpt2-large")
RECORDS = 1024  # of the logical step that the noise is compared with
WAYS = ("stock", "book_keeping", "two_pass")
PARTS = ("clipping", "noise", "steps")


@dataclasses.dataclass
class Row:
    """One way at one physical batch; the ratios of `to_stock` are of one run."""

    shape: str
    tokens: int
    finetuning: str
    precision: str
    way: str
    batch: int
    ms: float
    mib: float

    @property
    def records_per_s(self) -> float:
        return 1e3 * self.batch / self.ms


def measure(name: str, tokens: int, finetuning: str, precision: str, batch: int, options: Any) -> list[Row]:
    """All ways at one physical batch, interleaved; none if one of them does not fit."""
    memory, times = {}, dict[str, list[float]]()
    try:
        case = Case(
            dataclasses.replace(SHAPES[name], batch=batch, tokens=tokens), finetuning, device=options.device,
            bf16=precision == "bf16", checkpointing=options.checkpointing,
        )  # fmt: skip
        steps: dict[str, Callable[[], None]] = {way: getattr(case, way)() for way in options.ways}
        for way, step in steps.items():
            seconds(case, step)
            case.release()
            memory[way], times[way] = peak_mib(case, step), []
        for _ in range(options.repetitions):
            for way, step in steps.items():
                times[way].append(1e3 * seconds(case, step))
    except torch.OutOfMemoryError:
        return []
    return [
        Row(name, tokens, finetuning, precision, way, batch, statistics.median(times[way]), memory[way])
        for way in times
    ]  # fmt: skip


def free(device: str) -> None:
    torch.compiler.reset()  # too many compiled models in one process, and the next would run eagerly
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def noise_ms(name: str, finetuning: str, options: Any) -> float:
    """Median milliseconds to draw the noise of one step for every trainable parameter and add it."""
    case = Case(dataclasses.replace(SHAPES[name], batch=1, tokens=8), finetuning, device=options.device)
    sums = {i: torch.zeros_like(p, dtype=torch.float32) for i, p in enumerate(case.trained.values())}
    normals = ChaCha20Gaussian(bytes(range(32)))
    times = []
    normals.add_to(sums, stddev=0.5, step=0)  # builds the kernel
    for step in range(1, options.repetitions + 1):
        synchronize(options.device)
        start = time.perf_counter()
        normals.add_to(sums, stddev=0.5, step=step)
        synchronize(options.device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure_noise(rows: list[Row], options: Any) -> list[dict[str, Any]]:
    """Print and return normals per second, and the share of noise in a step of `RECORDS` records."""
    found = list[dict[str, Any]]()
    print("\n| model | finetuning | parameters | ms | normals/s | share of a step |\n|---|---|---|---|---|---|")
    for name in options.shapes:
        for finetuning in options.finetuning:
            trained = Case(dataclasses.replace(SHAPES[name], batch=1, tokens=8), finetuning).trained
            size = sum(p.numel() for p in trained.values())
            mine = [r for r in rows if (r.shape, r.finetuning, r.way) == (name, finetuning, "book_keeping")]
            fastest = max((row.records_per_s for row in mine), default=None)
            ms = noise_ms(name, finetuning, options)
            share = None if fastest is None else ms / (ms + 1e3 * RECORDS / fastest)
            row = {"shape": name, "finetuning": finetuning, "parameters": size, "ms": ms}
            found.append({**row, "normals_per_s": 1e3 * size / ms, "share": share})
            percent = "-" if share is None else f"{share:.1%} of {RECORDS} records"
            print(
                f"| {name} | {finetuning} | {size / 1e6:.1f} million | {ms:.2f} | "
                f"{1e3 * size / ms:.3g} | {percent} |", flush=True,
            )  # fmt: skip
    return found


def print_best(rows: list[Row]) -> None:
    """A table line per way: its best throughput, and memory at the largest batch that all fit."""
    if not rows:
        print("| (no batch fits) |")
        return
    stock = [row for row in rows if row.way == "stock"]
    for way in dict.fromkeys(row.way for row in rows):
        mine = [row for row in rows if row.way == way]
        best, reference = (max(rs, key=lambda r: r.records_per_s) for rs in (mine, stock))
        last, stock_last = (max(rs, key=lambda r: r.batch) for rs in (mine, stock))
        print(
            f"| {best.shape} | {best.tokens} | {best.finetuning} | {best.precision} | {way} | {best.batch} "
            f"| {best.ms:.1f} | {best.records_per_s:.0f} | {best.records_per_s / reference.records_per_s:.2f} "
            f"| {last.mib:.0f} at {last.batch} | x{last.mib / max(stock_last.mib, 1e-9):.2f} |", flush=True,
        )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(DEFAULT))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="`stock` is always one of them")
    parser.add_argument(
        "--whole_ways", nargs="+", choices=whole_step.WHOLE_WAYS, help="ways of `steps`; all but two-pass by default",
        default=[way for way in whole_step.WHOLE_WAYS if way != "private_two_pass"],
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--records", type=int, default=RECORDS, help="of a whole step")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile; aot_eager where none builds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--batch_tokens", nargs="+", type=int, default=[4096, 16384], help="physical batches, in tokens"
    )
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", help="rows as json, written after every model")
    return parser


def main() -> None:
    options = parser().parse_args()
    options.ways = list(dict.fromkeys(["stock", *options.ways]))
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured (--device cpu tries the script)")
        return
    rows, noise, steps = list[Row](), list[dict[str, Any]](), list[dict[str, Any]]()

    def save() -> None:
        if options.output:
            about = {"device": device_name(options.device), **versions()}
            found = {"rows": [dataclasses.asdict(r) for r in rows], "noise": noise, "steps": steps}
            Path(options.output).write_text(json.dumps({**about, **found}, indent=1), encoding="utf-8")

    print(f"{device_name(options.device)}, {versions()}, medians of {options.repetitions} interleaved repetitions\n")
    if "clipping" in options.parts:
        print("| model | tokens | finetuning | precision | way | best batch | ms | records/s | to non-private | MiB | to non-private |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for name, tokens, finetuning, precision in cases(options):
            found = list[Row]()
            sizes = options.batch_tokens if precision == "bf16" else options.batch_tokens[:1]
            for batch in [max(1, n // tokens) for n in sizes]:
                found += measure(name, tokens, finetuning, precision, batch, options)
                free(options.device)
            rows += found
            print_best(found)
            save()
    if "noise" in options.parts:
        noise += measure_noise(rows, options)
        save()
    if "steps" in options.parts:
        print(f"\n{gpu_summary.STEPS}")
        for name, tokens, finetuning, precision in cases(options):
            of_one = whole_step.measure_steps(
                name, tokens, finetuning, precision, options, device_name=device_name(options.device)
            )
            steps += [dataclasses.asdict(row) for row in of_one]
            free(options.device)
            print(
                "\n".join(
                    gpu_summary.step_lines([dataclasses.asdict(row) for row in of_one]) or ["| (no batch fits) |"]
                )
            )
            save()


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Model, tokens, finetuning and precision of each case that was asked for."""
    return itertools.product(options.shapes, options.tokens, options.finetuning, options.precisions)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
