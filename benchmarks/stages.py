"""What stands before the clip and after the noise, beside plain DP-AdamW: time and memory, measured in one run.

    python benchmarks/stages.py --output docs/stages.json

A step is that of the library: clipping of `--physical_batches` batches, noise from ChaCha20, preconditioner, chain,
optimizer. Every repetition times one whole step of DP-AdamW, and of each stage what it changes: the clipped sums for
what stands before the clip, chain and optimizer for what comes after the noise; costs are medians of ratios within a
repetition. Memory: bytes of the tensors kept between steps, counted; and the peak of a whole step over the model, in a
process of its own. Needs torch, transformers, peft and hf_dpopt only.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from step_cost import MODELS, Case, seconds

from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import DelayedPreconditioner, PublicPreconditioner, queries

NOISE = IndependentNoise(0.1 / 8)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What replaces a part of plain DP-AdamW."""

    preclip: Any = None
    optimizer: str = "adamw"
    filter: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


FULL, FACTORED = DelayedPreconditioner(delay=1), DelayedPreconditioner(delay=1, factored=True)
STAGES: dict[str, Stage] = {
    "DP-AdamW": Stage(),
    "DP^2, full, adaptive phase": Stage(FULL),
    "DP^2, factored, adaptive phase": Stage(FACTORED),
    "DP^2, two queries": Stage(DelayedPreconditioner(delay=1, variant="extra_query")),
    "AdaDPS, full": Stage(PublicPreconditioner(refresh_every=10**6)),
    "dp_adamw": Stage(optimizer="dp_adamw"),
    "dp_adam_bc": Stage(optimizer="dp_adam_bc"),
    "dp_rmsprop, unbiased": Stage(optimizer="dp_rmsprop", options={"unbiased": True}),
    "dp_adagrad, unbiased": Stage(optimizer="dp_adagrad", options={"unbiased": True}),
    "dp_galore, rank 16": Stage(optimizer="dp_galore", options={"rank": 16, "refresh_every": 10**6}),
    "SGD": Stage(optimizer="sgd"),
    "SGD, first-order filter": Stage(optimizer="sgd", filter="first_order_v1"),
    "SGD, second-order filter": Stage(optimizer="sgd", filter="second_order"),
    "SGD, adaptive FIR of 8": Stage(optimizer="sgd", filter="adaptive:8"),
    "dp_adamw, second-order filter": Stage(optimizer="dp_adamw", filter="second_order"),
    "dp_adam_bc, Butterworth of order 4": Stage(optimizer="dp_adam_bc", filter="butterworth:4:0.2"),
    "dp_galore, second-order filter": Stage(
        optimizer="dp_galore", filter="second_order", options={"rank": 16, "refresh_every": 10**6}
    ),
}


class PublicNoise:
    """Stands for gradients of public records, which are not timed here."""

    def __init__(self, parameters: dict[str, torch.Tensor]):
        self._parameters = parameters

    def mean(self) -> dict[str, torch.Tensor]:
        return {name: torch.randn(p.shape) for name, p in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Running:
    """A stage at work on the tensors of a case."""

    def __init__(self, case: Case, stage: Stage):
        self.case = case
        parameters = list(case.engine.parameters.values())
        inner = LowPassFilter.parse(stage.filter, noise=NOISE) if stage.filter else None
        self.chain = [inner] if inner is not None and stage.optimizer == "sgd" else []
        match stage.optimizer:
            case "adamw":
                self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-5, foreach=True)
            case "sgd":
                self.optimizer = torch.optim.SGD(parameters, lr=1e-5, foreach=True)
            case name:
                cls: Any = OPTIMIZERS[name]
                self.optimizer = cls(parameters, 1e-5, noise=NOISE, filter=inner, **stage.options)
        public = PublicNoise(case.engine.parameters)
        options = {"clipping_norm": 0.1, "noise": NOISE, "public": public}
        self.preclip = None if stage.preclip is None else stage.preclip.start(case.engine.parameters, **options)
        if self.preclip is not None:  # into the phase that divides
            self.preclip.scales()
            draws = [{n: torch.randn(p.shape) for n, p in case.engine.parameters.items()} for _ in range(2)]
            self.preclip.receive(queries.join(draws[: stage.preclip.num_queries]))

    def scales(self) -> tuple[Scale | None, ...]:
        return (None,) if self.preclip is None else self.preclip.scales()

    def clip(self, num_batches: int) -> list[dict[str, torch.Tensor]]:
        """The clipped sums of a step."""
        case, sums = self.case, [self.case.engine.empty_sum(scale) for scale in self.scales()]
        for _ in range(num_batches):
            for clipped in sums:
                case.engine.add_clipped_sum(clipped, lambda: case.losses(case.batch), case.batch["labels"].size(0))
        return [clipped.result() for clipped in sums]

    def finish(self, gradients: dict[str, torch.Tensor]) -> None:
        """From the released mean to the weights."""
        for postprocess in self.chain:
            gradients = postprocess(gradients)
        for name, p in self.case.engine.parameters.items():
            p.grad = gradients[name]
        self.optimizer.step()

    def kept_bytes(self) -> int:
        """Of all that a step leaves for the next: states, and the 1 / D in use."""
        kept: list[Any] = [] if self.preclip is None else [self.preclip.state_dict()]
        for scale in self.scales():
            kept += [] if scale is None else [vars(part) for part in scale.parts.values()]
        kept += [postprocess.state_dict() for postprocess in self.chain]
        return sum(x.numel() * x.element_size() for x in _tensors([*kept, self.optimizer.state_dict()]))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def whole_step(running: Running, num_batches: int) -> None:
    sums = running.clip(num_batches)
    for query in sums:
        running.case.step += 1
        running.case.stream.add_(query, running.case.step)
    running.finish({name: total.div_(8 * num_batches) for name, total in sums[-1].items()})


def timed(case: Case, function: Callable[[], Any]) -> float:
    gc.collect()
    return seconds(case, function)


def measure(name: str, finetuning: str, chosen: list[str], repetitions: int, num_batches: int) -> list[dict[str, Any]]:
    case = Case(name, finetuning, "cpu", bf16=False)
    base = Running(case, STAGES["DP-AdamW"])
    num = sum(p.numel() for p in case.engine.parameters.values())
    gradients = {n: torch.randn(p.shape) * 1e-4 for n, p in case.engine.parameters.items()}
    whole_step(base, num_batches)
    rows = []
    for label in chosen:
        stage = STAGES[label]
        running = Running(case, stage)
        is_before = stage.preclip is not None
        parts: list[tuple[float, float, float]] = []
        for _ in range(1 if is_before else 8):  # allocates moments, buffers and taps
            running.finish(dict(gradients))
        for repetition in range(repetitions + 1):
            if is_before:
                whole = timed(case, lambda: whole_step(base, num_batches))
                took = timed(case, lambda running=running: running.clip(num_batches))
                least = timed(case, lambda: base.clip(num_batches))
            else:
                took = timed(case, lambda running=running: running.finish(dict(gradients)))
                least = timed(case, lambda: base.finish(dict(gradients)))
                whole = timed(case, lambda: whole_step(base, num_batches)) if repetition < 2 else whole
            parts.append((took, least, whole))
        parts = parts[1:]  # the first one allocates
        rows.append(
            {
                "model": name, "finetuning": finetuning, "coordinates": num, "stage": label,
                "step_ms": 1e3 * statistics.median(w for _, _, w in parts),
                "part_ms": 1e3 * statistics.median(t for t, _, _ in parts),
                "of_adamw_ms": 1e3 * statistics.median(t for _, t, _ in parts),
                "extra": statistics.median((t - b) / w for t, b, w in parts),
                "copies_kept": running.kept_bytes() / (4 * num),
            }
        )  # fmt: skip
        del running
        gc.collect()
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    peak = f" {row['peak_mib']:.0f} MiB |" if "peak_mib" in row else ""
    print(
        f"| {row['model']} | {row['finetuning']} | {row['stage']} | {row['step_ms']:.0f} ms | {row['extra']:+.1%} | "
        f"{row['copies_kept']:.2f} |{peak}",
        flush=True,
    )


def peak_of(name: str, finetuning: str, label: str) -> float:
    """MiB at the peak of a whole step, over the model alone."""
    case = Case(name, finetuning, "cpu", bf16=False)
    for p in case.engine.parameters.values():
        p.grad = None
    gc.collect()
    before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    running = Running(case, STAGES[label])
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for _ in range(2):
        whole_step(running, 1)
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return (peak - before) / 2**20


def peak_in_fresh_process(name: str, finetuning: str, label: str) -> float:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--peak_of", name, finetuning, label]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="roberta-768x6")
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--physical_batches", type=int, default=4)
    parser.add_argument("--no_memory", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak_of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print(peak_of(*options.peak_of))
        return
    rows = []
    for finetuning in options.finetuning:
        measured = measure(
            options.model, finetuning, options.stages, options.repetitions, options.physical_batches
        )  # fmt: skip
        for row in measured:
            if not options.no_memory:
                row["peak_mib"] = peak_in_fresh_process(options.model, finetuning, row["stage"])
                show(row)
        rows += measured
    if options.output is not None:
        about = {
            "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
            "batch": MODELS[options.model][1], "tokens": MODELS[options.model][2],
            "physical_batches": options.physical_batches, "repetitions": options.repetitions,
        }  # fmt: skip
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
