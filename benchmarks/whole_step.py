"""The whole step, all in, beside the non-private one: clipping, sums, noise and optimizer against stock and compiled.

A step is one update from `records` records in physical batches. Stock accumulates the gradients of as many; both end with
the same AdamW (fused on a CUDA device, as the Trainer has it). What is not in it: sampling, collation and the ledger
(`training_time.py --where`). `gpu.py --parts steps` measures it; functions only.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cases import CLIPPING_NORM, SHAPES, Case, peak_mib, synchronize
from flops import flops_per_record, utilisation

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness.chacha import ChaCha20Gaussian

WHOLE_WAYS = ("stock", "stock_compiled", "private", "private_two_pass", "without_noise")
Step = Callable[[], None]


@dataclasses.dataclass
class StepRow:
    """One way to take a whole step; `mfu` is None where the peak of the device is not known."""

    shape: str
    tokens: int
    finetuning: str
    precision: str
    way: str
    batch: int
    records: int
    ms: float
    mib: float
    tflops: float
    mfu: float | None

    @property
    def records_per_s(self) -> float:
        return 1e3 * self.records / self.ms


class Steps:
    """Ways to take a step of `num_batches` physical batches of one case, on one model and one optimizer."""

    def __init__(self, case: Case, num_batches: int, compiler: str):
        self._case, self._num_batches, self._compiler = case, num_batches, compiler
        self._optimizer = torch.optim.AdamW(case.trained.values(), lr=1e-5, fused=case.device == "cuda")
        self._noise = independent_noise(1.0).stream(ChaCha20Gaussian(os.urandom(32)), CLIPPING_NORM)
        self._num_taken = 0

    def stock(self) -> Step:
        return self._accumulated(self._case.stock(1 / self._num_batches))

    def stock_compiled(self) -> Step:
        return self._accumulated(self._case.stock_compiled(1 / self._num_batches, self._compiler))

    def _accumulated(self, backward: Step) -> Step:
        def step() -> None:
            for _ in range(self._num_batches):
                backward()
            self._update()

        return step

    def private(self) -> Step:
        return self._private("book_keeping")

    def private_two_pass(self) -> Step:
        return self._private("two_pass")

    def without_noise(self) -> Step:
        """The private step but for the noise: its difference to `private` is what the noise costs."""
        return self._private("book_keeping", noise=False)

    def _private(self, name: str, *, noise: bool = True) -> Step:
        case = self._case
        engine = make_engine(case.model, FlatClipping(clipping_norm=CLIPPING_NORM), name)

        def step() -> None:
            self._num_taken += 1
            clipped = engine.empty_sum()
            for _ in range(self._num_batches):
                engine.add_clipped_sum(clipped, case.losses, case.shape.batch)
            sums = clipped.result()
            if noise:
                self._noise.add_(sums, self._num_taken)
            for name, p in engine.parameters.items():
                p.grad = sums[name].div_(self._num_batches * case.shape.batch).to(p.dtype)
            self._update()

        return step

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def measure_steps(
    name: str, tokens: int, finetuning: str, precision: str, options: Any, *, device_name: str
) -> list[StepRow]:
    """All ways to take a step, interleaved, at the largest of the given physical batches that fits; none if none does.

    Args:
        name: one of `SHAPES`.
        tokens: tokens of a record.
        finetuning: "full" or "lora".
        precision: "bf16" or "fp32".
        options: those of gpu.py.
        device_name: name of the device, which its peak is looked up by.
    """
    for batch in sorted({max(1, n // tokens) for n in options.batch_tokens}, reverse=True):
        try:
            return _measure(name, tokens, finetuning, precision, batch, options, device_name)
        except torch.OutOfMemoryError:
            continue
    return []


def _measure(
    name: str, tokens: int, finetuning: str, precision: str, batch: int, options: Any, device_name: str
) -> list[StepRow]:
    shape = dataclasses.replace(SHAPES[name], batch=batch, tokens=tokens)
    case = Case(
        shape, finetuning, device=options.device, bf16=precision == "bf16", checkpointing=options.checkpointing
    )
    num_batches = max(1, round(options.records / batch))
    made = Steps(case, num_batches, options.compiler)
    memory, times = {}, dict[str, list[float]]()
    steps: dict[str, Step] = {way: getattr(made, way)() for way in options.whole_ways}
    for way, step in steps.items():
        step()  # compiles, and allocates what the optimizer keeps
        memory[way], times[way] = peak_mib(case, step), []
    for _ in range(options.repetitions):
        for way, step in steps.items():
            synchronize(options.device)
            start = time.perf_counter()
            step()
            synchronize(options.device)
            times[way].append(time.perf_counter() - start)
    flops = flops_per_record(case.model, layers=shape.layers, width=shape.width, tokens=tokens) * num_batches * batch
    rows = []
    for way in steps:
        took = statistics.median(times[way])
        share = utilisation(flops, took, device_name, precision)
        rows.append(
            StepRow(
                name, tokens, finetuning, precision, way, batch, num_batches * batch, 1e3 * took, memory[way],
                flops / took / 1e12, share,
            )
        )  # fmt: skip
    return rows
