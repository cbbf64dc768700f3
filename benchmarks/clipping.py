"""Clipping beside the non-private step and Opacus: time and peak memory, as ratios measured in one run.

    python benchmarks/clipping.py --output docs/clipping.json --plot docs/clipping.png

Time: medians of paired ratios over interleaved repetitions, a process per case (forward, backward and clipping; no noise,
no optimizer). Memory: growth over the model, a fresh process for each number. Opacus (`pip install '.[bench]'`) is told
positions explicitly, and gets an untied model where it refuses the tied one (marked ^).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
from cases import SHAPES, WAYS, Case, peak_mib, seconds, versions

DEFAULT = ("roberta-256x4", "gpt2-256x4", "roberta-768x6", "gpt2-768x6")
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}  # page faults of fresh blocks are noise
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # the peak is the question


def _case(spec: dict[str, Any], way: str) -> tuple[Case, Any]:
    """A case and its step; for Opacus ghost with an untied head, which it wants."""
    shape = SHAPES[spec["shape"]]
    if way == "opacus_ghost" and shape.family == "gpt2" and spec["finetuning"] == "full":
        shape = dataclasses.replace(shape, tied=False)
    case = Case(
        shape, spec["finetuning"], device=spec["device"], bf16=spec["bf16"], checkpointing=spec["checkpointing"]
    )
    return case, getattr(case, way)()


def time_case(spec: dict[str, Any]) -> dict[str, Any]:
    """Step times of every way; each Opacus way has a model of its own, for it leaves hooks behind."""
    stock = _case(spec, "stock")
    steps = {"stock": stock}
    for way in spec["ways"]:
        if way.startswith("opacus"):
            steps[way] = _case(spec, way)
        else:
            steps[way] = (stock[0], getattr(stock[0], way)())
    for case, step in steps.values():
        seconds(case, step)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(spec["repetitions"]):
        for way, (case, step) in steps.items():
            times[way].append(seconds(case, step))
            case.release()
    return {
        "stock_ms": 1e3 * statistics.median(times["stock"]),
        **{way: statistics.median(a / b for a, b in zip(times[way], times["stock"], strict=True)) for way in steps},
    }


def memory_of(spec: dict[str, Any]) -> dict[str, Any]:
    case, step = _case(spec, spec["way"])
    return {"mib": peak_mib(case, step)}


def in_fresh_process(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | (KEEP_MEMORY if kind == "time" else GIVE_BACK)
    command = [sys.executable, __file__, "--run", kind, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(rows) + 1.5), sharey=True)
    labels = [f"{row['shape']} {row['finetuning']}" for row in rows]
    ways = [way for way in WAYS if way != "stock" and any(way in row["time"] for row in rows)]
    height = 0.8 / len(ways)
    for axis, key, title in ((axes[0], "time", "step time"), (axes[1], "memory", "peak memory")):
        for i, way in enumerate(ways):
            values = [row[key].get(way) or 0 for row in rows]
            places = [y + i * height for y in range(len(rows))]
            axis.barh(places, values, height=height, label=way.replace("_", " "))
        axis.axvline(1, color="black", linewidth=1)
        axis.set_title(f"{title}, ratio to non-private")
        axis.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], labels)
    axes[0].invert_yaxis()  # shared: the order of the table
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(ways))
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(DEFAULT))
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS[1:]), default=list(WAYS[1:]))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--append", action="store_true", help="keep the rows that the JSON file has, and plot all")
    parser.add_argument("--plot", help="PNG file")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, spec = options.run
        print(json.dumps({"time": time_case, "memory": memory_of}[kind](json.loads(spec))))
        return
    rows = []
    if options.append and os.path.exists(options.output or ""):
        with open(options.output, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
    print(f"| model | finetuning | non-private | {' | '.join(options.ways)} | (memory) non-private | {' | '.join(options.ways)} |")  # fmt: skip
    for name in options.shapes:
        for finetuning in options.finetuning:
            spec = {
                "shape": name, "finetuning": finetuning, "device": options.device, "bf16": options.bf16,
                "checkpointing": options.checkpointing, "repetitions": options.repetitions, "ways": options.ways,
            }  # fmt: skip
            times = in_fresh_process("time", spec)
            mib = {way: in_fresh_process("memory", spec | {"way": way}).get("mib") for way in ("stock", *options.ways)}
            memory = {way: value / mib["stock"] for way, value in mib.items() if value and mib["stock"]}
            rows.append({**spec, "time": times, "memory": memory, "stock_mib": mib["stock"]})
            cells = [f"{times[w]:.2f}" if w in times else "-" for w in options.ways]
            more = [f"{memory[w]:.2f}" if w in memory else "-" for w in options.ways]
            print(
                f"| {name} | {finetuning} | {times.get('stock_ms', float('nan')):.0f} ms | {' | '.join(cells)} | "
                f"{mib['stock'] or 0:.0f} MiB | {' | '.join(more)} | {times.get('error', '')}", flush=True,
            )  # fmt: skip
    result = {"rows": rows, "threads": torch.get_num_threads(), **versions()}
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
