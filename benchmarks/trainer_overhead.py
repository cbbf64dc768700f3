"""What a whole `DPTrainer` step costs beside the clipping inside it: sampling, collation, noise, ledger, optimizer.

    python benchmarks/trainer_overhead.py --shape roberta-768x6 --finetuning lora

Both times come from the same steps of one run: the wall clock from one step's end to the next, and the part of it that
was spent in the clipping engine (forward, backward, clipped sums).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from cases import SHAPES, Case, versions
from transformers import TrainerCallback

from hf_dpopt import DPTrainer, DPTrainingArguments
from hf_dpopt.clipping import BookKeepingEngine


class Clock(TrainerCallback):
    """Wall time of each step, and of the engine's share of it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.engine: list[float] = []
        self.inside, self.last = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.inside, self.last = 0.0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.engine.append(self.inside)
        self.inside, self.last = 0.0, now


def time_engine(clock: Clock) -> None:
    """Adds up in `clock` what the engine takes from now on."""
    clipped_sum = BookKeepingEngine.add_clipped_sum

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = clipped_sum(*args)
        clock.inside += time.perf_counter() - start
        return result

    BookKeepingEngine.add_clipped_sum = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta-768x6")
    parser.add_argument("--finetuning", choices=["full", "lora"], default="lora")
    parser.add_argument("--batch", type=int, default=64, help="expected records of a step")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    case = Case(shape, options.finetuning)
    ids = torch.randint(5, shape.vocabulary, (16 * options.batch, shape.tokens))
    records = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": row if shape.family == "gpt2" else i % 2}
        for i, row in enumerate(ids.tolist())
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DPOPT_PRIVATE_DIR"] = os.path.join(folder, "keys")
        args = DPTrainingArguments(
            output_dir=os.path.join(folder, "out"), target_epsilon=8.0, max_steps=options.steps, use_cpu=True,
            expected_batch_size=options.batch, per_device_train_batch_size=shape.batch, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        clock = Clock()
        time_engine(clock)
        DPTrainer(case.model, args, train_dataset=records, callbacks=[clock]).train()
    ratios = [step / engine for step, engine in zip(clock.steps[1:], clock.engine[1:], strict=True)]  # first: warm-up
    print(
        f"{options.shape} {options.finetuning}, {options.batch} records a step: x{statistics.median(ratios):.3f} of the "
        f"engine alone (steps of {statistics.median(clock.steps[1:]):.2f} s; {versions()}, "
        f"{torch.get_num_threads()} threads)"
    )


if __name__ == "__main__":
    main()
