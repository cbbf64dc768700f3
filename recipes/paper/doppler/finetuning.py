"""Finetuning with and without a low-pass filter: SST-2, LoRA on a pretrained encoder, by `DPTrainer`.

Each run is `recipes/glue.py` with the settings ``filter`` and ``optim``. Keys are fresh in every run; what a seed
fixes is the first weights of the head, so runs of one seed are not pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.correlated_noise.output import panels, save
from recipes.paper.doppler import output
from recipes.paper.doppler.training import PLAIN, TUNING_SEED

CELLS = (
    ("dp_adamw", PLAIN),
    ("dp_adamw", "first_order_v1"),
    ("dp_adam_bc", PLAIN),
    ("dp_adam_bc", "first_order_v1"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a result depends on, but the model, the data and the noise."""

    optimizer: str
    filter: str
    rate: float
    seed: int
    epsilon: float
    num_steps: int
    batch: int
    clipping_norm: float
    max_seq_length: int = 32
    lora_r: int = 8

    def settings(self) -> dict[str, Any]:
        """For `recipes/glue.py`, as it reads them from a file."""
        settings = {
            "task_name": "sst2",
            "optim": self.optimizer,
            "learning_rate": self.rate,
            "lr_scheduler_type": "constant",
            "seed": self.seed,
            "target_epsilon": self.epsilon,
            "target_delta": 1e-5,
            "clipping_norm": self.clipping_norm,
            "max_steps": self.num_steps,
            "expected_batch_size": self.batch,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 218,
            "max_seq_length": self.max_seq_length,
            "lora_r": self.lora_r,
            "save_strategy": "no",
            "logging_steps": self.num_steps,
            "eval_data_privacy": "public",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return settings if self.filter == PLAIN else {**settings, "filter": self.filter}


def finetune(job: Job, data: Path, model: str) -> dict[str, Any]:
    """One run of `recipes/glue.py` in a process of its own."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = {"train_file": str(data / "train.tsv"), "validation_file": str(data / "dev.tsv")}
        settings = {**job.settings(), **files, "model_name_or_path": model, "output_dir": f"{folder}/run"}
        Path(folder, "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "recipes.glue", f"{folder}/settings.json"]
        environment = {**os.environ, "HF_DPOPT_PRIVATE_DIR": f"{folder}/private"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"recipes.glue ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
        results = json.loads(Path(folder, "run", "all_results.json").read_text(encoding="utf-8"))
    return {"results": results, "seconds": round(time.perf_counter() - began, 1)}


class Jobs:
    """Each done once: those in the file are read, others are run and appended."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments, self._path = arguments, arguments.output_dir / "doppler_finetuning.jsonl"
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self._known = {json.dumps(line["job"], sort_keys=True): line for line in map(json.loads, lines)}

    def result(self, optimizer: str, low_pass: str, rate: float, seed: int) -> dict[str, Any]:
        given = self._arguments
        job = Job(
            optimizer=optimizer, filter=low_pass, rate=rate, seed=seed, epsilon=given.epsilon,
            num_steps=given.num_steps, batch=given.batch, clipping_norm=given.clipping_norm,
        )  # fmt: skip
        key = json.dumps(dataclasses.asdict(job), sort_keys=True)
        if key not in self._known:
            line = {"job": dataclasses.asdict(job), **finetune(job, given.data, given.model)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._known[key] = line
            accuracy = line["results"]["eval_accuracy"]
            print(f"{job}: {100 * accuracy:.1f} % in {line['seconds']:.0f} s", flush=True)
        return self._known[key]


def compute(arguments: argparse.Namespace) -> dict[str, Any]:
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    jobs, cells = Jobs(arguments), []
    for optimizer, low_pass in CELLS:
        tried = {
            rate: jobs.result(optimizer, low_pass, rate, TUNING_SEED)["results"]["eval_accuracy"]
            for rate in arguments.rates
        }
        best = max(tried, key=lambda rate: tried[rate])
        lines = [jobs.result(optimizer, low_pass, best, seed) for seed in range(arguments.num_seeds)]
        cells.append(
            {
                "optimizer": optimizer, "filter": low_pass, "rate": best,
                "tried": {f"{rate:g}": accuracy for rate, accuracy in tried.items()},
                "accuracies": [line["results"]["eval_accuracy"] for line in lines],
                "losses": [line["results"]["eval_loss"] for line in lines],
                "epsilon": lines[0]["results"].get("epsilon"),
                "seconds_per_run": float(np.mean([line["seconds"] for line in lines])),
            }
        )  # fmt: skip
    return {"cells": cells}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy by optimizer and filter: mean, standard deviation, and a dot per seed."""
    cells = numbers["cells"]
    figure, (axis,) = panels(1, width=6.4, height=3.4)
    for position, cell in enumerate(cells[::-1]):
        accuracies = 100 * np.array(cell["accuracies"])
        axis.errorbar(
            accuracies.mean(), position, xerr=accuracies.std(ddof=1), fmt="o", capsize=4,
            color=output.COLORS[cell["optimizer"]],
        )  # fmt: skip
        axis.plot(accuracies, np.full(len(accuracies), position), "k.", markersize=4)
    labels = [f"{output.NAMES[c['optimizer']]}, {c['filter']} (rate {c['rate']:g})" for c in cells[::-1]]
    axis.set_yticks(np.arange(len(cells)), labels)
    axis.set(xlabel="accuracy, %", title="SST-2, LoRA, epsilon 8", ylim=(-0.6, len(cells) - 0.4))
    save(figure, path)


def main() -> None:
    parser = output.parser("finetuning", __doc__)
    parser.add_argument("--model", required=True, help="folder of the pretrained encoder")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--num_steps", type=int, default=48)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--clipping_norm", type=float, default=0.1)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3])
    parser.add_argument("--num_seeds", type=int, default=3)
    arguments = parser.parse_args()
    numbers = output.write("finetuning", arguments, lambda: compute(arguments))
    for cell in numbers["cells"]:
        print(f"{cell['optimizer']:10} {cell['filter']:16} {100 * np.mean(cell['accuracies']):.1f} %")
    plot(numbers, arguments.output_dir / "doppler_finetuning.png")


if __name__ == "__main__":
    main()
