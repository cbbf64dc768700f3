"""What the journal of releases adds to a step: the same run, with and without it in turn.

    python benchmarks/journal.py --output docs/journal.json --folder /path/on/the/disk

Steps of one `DPTrainer` run write to the journal in every other step; medians of both kinds, the time inside of the
writes, and the rate of the disk as the entries saw it. LoRA has 1M coordinates, full finetuning 10M.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_dpopt import DPTrainer, DPTrainingArguments
from hf_dpopt.report.facts import collect_versions
from hf_dpopt.run.journal import Journal

TOKENS = 64


def _roberta(vocabulary: int, width: int, layers: int) -> nn.Module:
    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
            intermediate_size=4 * width, max_position_embeddings=TOKENS + 2, type_vocab_size=1,
        )
    )  # fmt: skip


def lora() -> nn.Module:
    """RoBERTa of 6 layers and width 768 with adapters on all linear layers: about 1M coordinates."""
    linear = ["query", "key", "value", "dense"]
    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=linear, exclude_modules=["classifier.*"])
    return peft.get_peft_model(_roberta(5000, 768, 6), config)


def full() -> nn.Module:
    """RoBERTa of 6 layers and width 320: about 10M coordinates."""
    return _roberta(8000, 320, 6)


class Alternating(TrainerCallback):
    """Switches the journal on and off in turn, and times the steps of both kinds."""

    def __init__(self) -> None:
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.writes: list[float] = []
        self.is_on, self.last = True, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_on, self.last = state.global_step % 2 == 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 2:  # the first of each kind makes buffers
            self.steps[self.is_on].append(time.perf_counter() - self.last)

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Let only every other step write."""
        write = Journal.write

        def timed(journal: Journal, *args: Any) -> None:
            if self.is_on:
                begun = time.perf_counter()
                write(journal, *args)
                self.writes.append(time.perf_counter() - begun)

        with mock.patch.object(Journal, "write", timed):
            yield


def measure(model: nn.Module, batch: int, steps: int, folder: str) -> dict[str, Any]:
    """One row: seconds of a step with and without the journal, and what an entry takes."""
    ids = torch.randint(5, 4999, (16 * batch, TOKENS)).tolist()
    records = [{"input_ids": row, "attention_mask": [1] * TOKENS, "labels": i % 2} for i, row in enumerate(ids)]
    with tempfile.TemporaryDirectory(dir=folder) as output:
        args = DPTrainingArguments(
            output_dir=os.path.join(output, "out"), private_state_dir=os.path.join(output, "keys"), target_epsilon=8.0,
            max_steps=steps, use_cpu=not torch.cuda.is_available(), expected_batch_size=batch, report_to="none",
            per_device_train_batch_size=16, save_strategy="no", disable_tqdm=True, skip_self_check=True,
            logging_strategy="no", advisor="none", journal_limit=100.0,
        )  # fmt: skip
        clock = Alternating()
        with clock.switching():
            DPTrainer(model, args, train_dataset=records, callbacks=[clock]).train()
    coordinates = sum(p.numel() for p in model.parameters() if p.requires_grad)
    on, off, write = (statistics.median(times) for times in (clock.steps[True], clock.steps[False], clock.writes[1:]))
    return {
        "coordinates": coordinates,
        "expected_batch_size": batch,
        "steps_of_each_kind": len(clock.steps[True]),
        "seconds_with": on,
        "seconds_without": off,
        "ratio": on / off,
        "seconds_of_a_write": write,
        "megabytes_per_second": 4e-6 * coordinates / write,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="expected records of a step")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = {}
    for name, make in (("LoRA", lora), ("full", full)):
        torch.manual_seed(0)
        rows[name] = measure(make(), options.batch, options.steps, options.folder)
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
    if options.output is not None:
        machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "versions": collect_versions()}
        command = "python benchmarks/journal.py " + " ".join(sys.argv[1:])
        content = {"command": command, "date": time.strftime("%Y-%m-%d"), **machine, "rows": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
