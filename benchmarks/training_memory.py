"""Peak memory of whole trainings on a CPU, beside the stock Trainer with the same physical batch.

    OMP_NUM_THREADS=1 python benchmarks/training_memory.py --output docs/training_memory.json
    OMP_NUM_THREADS=1 python benchmarks/training_memory.py --tokens 4096 --ways stock gaussian --append --output ..

Each training runs in a process of its own. Its peak is the growth of the largest resident size from before `train()` to
its end, without pages of files: sums, noise, what correlated noise keeps, optimizer and self-check are in it; model and
records are not. `start` is the peak before the first step, `mib` the larger one of start and steps, and `kept` what the
mechanism itself says that it keeps between steps: the noise by its plan, a preconditioner by its tensors. Freed memory
is given back at once, so that peaks are those of allocations.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import SHAPES, Case, versions
from transformers import Trainer, TrainerCallback, TrainingArguments

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
STEPS, BATCHES = 2, 2  # steps; physical batches of each
TOKENS_AT_ONCE = 1024  # of a physical batch, which has one record at least
SHAPE = dataclasses.replace(SHAPES["roberta-256x4"], vocabulary=50265)  # 16 million weights, 61 MiB
Job = tuple[str, str, int, bool]  # way, finetuning, tokens, checkpointing


class Memory(TrainerCallback):
    """Growth of a process' memory, in MiB, and the state that a private training keeps between steps."""

    def __init__(self) -> None:
        self._begin_again()
        self._before, self.start, self.kept = self._status(), 0.0, 0.0
        self.trainer: Any = None

    @staticmethod
    def _begin_again() -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident size is the present one again

    @staticmethod
    def _status() -> dict[str, float]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {line[0]: int(line[1]) / 2**10 for line in lines if line[0] in ("VmHWM:", "VmRSS:", "RssFile:")}

    def peak(self) -> float:
        now = self._status()
        return now["VmHWM:"] - self._before["VmRSS:"] - (now["RssFile:"] - self._before["RssFile:"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not state.global_step:
            self.start = self.peak()
            self._begin_again()
        if isinstance(self.trainer, DPTrainer):
            preclip, plan = self.trainer._session.stages.preclip, self.trainer.plan
            parts = [vars(part) for scale in preclip.scales() if scale is not None for part in scale.parts.values()]
            sizes = [x.numel() for x in tensors([preclip.state_dict(), parts])]
            trained = sum(p.numel() for p in self.trainer.model.parameters() if p.requires_grad)
            self.kept = max(self.kept, 4 * (plan.cost.kept * trained + sum(sizes)) / 2**20)


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [x for value in values for x in tensors(value)]


def grown(job: Job) -> dict[str, float]:
    """Train in this process; return its peak, the peak of its start, and the kept state, in MiB."""
    way, finetuning, tokens, checkpointing = job
    shape = dataclasses.replace(SHAPE, tokens=tokens)
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
        memory = Memory()
        memory.trainer = trainer
        trainer.add_callback(memory)
        trainer.train()
        steps = memory.peak()
    return {"mib": max(memory.start, steps), "start": memory.start, "steps": steps, "kept": memory.kept}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as they stand in docs/results.md; the last column is what is neither in a stock run nor kept."""
    middle = {_key(row) + (row["way"],): statistics.median(row["mib"]) for row in rows}
    lines = ["| finetuning, tokens | noise | peak, MiB | of the start | of the steps | kept | beyond stock and kept |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        peak, kept = middle[_key(row) + (row["way"],)], row["kept"][0]
        spread = f" [{min(row['mib']):.0f}, {max(row['mib']):.0f}]" if len(row["mib"]) > 1 else ""
        over = f"{peak - middle[_key(row) + (STOCK,)] - kept:+.0f}" if row["way"] != STOCK else ""
        name = f"{row['finetuning']}, {row['tokens']:,}{', checkpointing' if row['checkpointing'] else ''}"
        start, steps = (statistics.median(row[part]) for part in ("start", "steps"))
        lines.append(
            f"| {name} | {row['way']} | {peak:.0f}{spread} | {start:.0f} | {steps:.0f} | {kept:.0f} | {over} |"
        )
    return "\n".join(lines)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["finetuning"], row["tokens"], row["checkpointing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--finetuning", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true", help="layers computed again in the backward")
    parser.add_argument("--append", action="store_true", help="to the runs in the output")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    rows = json.loads(options.output.read_text())["rows"] if options.append else []
    about = {
        "versions": versions(), "machine": platform.machine(), "threads": torch.get_num_threads(),
        "shape": dataclasses.asdict(SHAPE), "steps": STEPS, "physical_batches": BATCHES,
        "tokens_of_a_physical_batch": TOKENS_AT_ONCE,
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")  # imports once; each child is a fork of what has only imported
    with context.Pool(1, maxtasksperchild=1) as pool:
        for way in options.ways * options.repetitions:
            for finetuning, tokens in itertools.product(options.finetuning, options.tokens):
                job = {"finetuning": finetuning, "tokens": tokens, "checkpointing": options.checkpointing, "way": way}
                row = next((row for row in rows if job.items() <= row.items()), None)
                if row is None:
                    rows.append(row := {**job, "mib": [], "start": [], "steps": [], "kept": []})
                for name, mib in pool.apply(grown, ((way, finetuning, tokens, options.checkpointing),)).items():
                    row[name].append(round(mib, 1))
                print(row, flush=True)
                rows.sort(key=lambda row: (*_key(row), list(WAYS).index(row["way"])))
                text = json.dumps({"about": about, "rows": rows}, indent=1)
                options.output.write_text(text + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
