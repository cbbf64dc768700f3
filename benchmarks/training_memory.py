"""Peak memory of whole trainings on a CPU, beside the stock Trainer with the same physical batch.

    python benchmarks/training_memory.py --output docs/training_memory.json

Each number is the growth of the largest resident size of a fresh process from before `train()` to its end: sums, noise, what
correlated noise keeps, optimizer and self-check are in it; model and records are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from cases import SHAPES, Case, versions
from transformers import Trainer, TrainingArguments

from hf_dpopt import DPTrainer, DPTrainingArguments

STOCK = "stock"
WAYS: dict[str, dict[str, Any]] = {
    STOCK: {},
    "gaussian": {},
    "nu_dpftrl": {"noise_mechanism": "nu_dpftrl"},
    "blt": {"noise_mechanism": "blt"},
    "banded": {"noise_mechanism": "banded"},
    "dp2_rmsprop": {"preconditioner": "dp2_rmsprop"},
}
STEPS, BATCHES = 3, 2  # steps; physical batches of each
TOKENS_AT_ONCE = 1024  # of a physical batch, which has one record at least


def grown(way: str, finetuning: str, tokens: int, checkpointing: bool) -> float:
    """Train in this process; return by how many MiB its largest resident size grew."""
    shape = dataclasses.replace(SHAPES["roberta-768x6"], tokens=tokens)
    model, physical = Case(shape, finetuning).model, max(1, TOKENS_AT_ONCE // tokens)
    ids = torch.randint(5, shape.vocabulary, (4 * STEPS * BATCHES * physical, tokens)).tolist()
    records = [{"input_ids": row, "attention_mask": [1] * tokens, "labels": i % 2} for i, row in enumerate(ids)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DPOPT_PRIVATE_DIR"] = os.path.join(folder, "keys")
        plain: dict[str, Any] = {
            "output_dir": os.path.join(folder, "out"), "max_steps": STEPS, "per_device_train_batch_size": physical,
            "gradient_accumulation_steps": BATCHES, "use_cpu": True, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "gradient_checkpointing": checkpointing,
        }  # fmt: skip
        if way == STOCK:
            trainer = Trainer(model, TrainingArguments(**plain), train_dataset=records)
        else:
            args = DPTrainingArguments(**plain, target_epsilon=8.0, target_delta=1e-5, **WAYS[way])
            trainer = DPTrainer(model, args, train_dataset=records)
        before = psutil.Process().memory_info().rss
        trainer.train()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--finetuning", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="layers computed again in the backward")
    parser.add_argument("--alone", action="store_true", help="one training in this process; print its MiB")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.alone:
        print(grown(options.ways[0], options.finetuning[0], options.tokens[0], options.checkpointing))
        return
    rows = []
    print("| finetuning | tokens | noise | MiB [least, largest] | of stock |\n|---|---:|---|---:|---:|")
    for finetuning in options.finetuning:
        for tokens in options.tokens:
            found: dict[str, list[float]] = {way: [] for way in options.ways}
            for _ in range(options.repetitions):
                for way in options.ways:
                    given = ["--ways", way, "--finetuning", finetuning, "--tokens", str(tokens)]
                    given += ["--checkpointing"] * options.checkpointing
                    child = subprocess.run(
                        [sys.executable, __file__, "--alone", *given], capture_output=True, text=True, check=True
                    )
                    found[way].append(float(child.stdout.split()[-1]))
            for way, mib in found.items():
                middle = statistics.median(mib)
                share = f"x{middle / statistics.median(found[STOCK]):.2f}" if STOCK in found else ""
                rows.append({"finetuning": finetuning, "tokens": tokens, "way": way, "mib": mib})
                spread = f"{middle:.0f} [{min(mib):.0f}, {max(mib):.0f}]"
                print(f"| {finetuning} | {tokens} | {way} | {spread} | {share} |", flush=True)
    if options.output is not None:
        about = {"versions": versions(), "machine": platform.machine(), "threads": torch.get_num_threads()}
        about |= {
            "checkpointing": options.checkpointing,
            "steps": STEPS,
            "physical_batches": BATCHES,
            "tokens_of_a_physical_batch": TOKENS_AT_ONCE,
        }
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
