"""Finetuning by `recipes/glue.py`: SST-2, LoRA on a pretrained encoder, epsilon 8; every row at its best settings.

Keys are fresh in every run; what a seed fixes is the first weights of the head, so runs of one seed are not pairs. The
validation records that choose also measure, as is usual on GLUE.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.runs import Folder, KeptRuns, best_of

TUNING_SEED = 1000  # its runs choose settings and are not reported
# for `recipes/glue.py`, as it reads them from a file; those of an experiment come on top
COMMON = {
    "task_name": "sst2", "lora_r": 8, "max_seq_length": 32, "lr_scheduler_type": "constant", "target_epsilon": 8.0,
    "target_delta": 1e-5, "save_strategy": "no", "eval_data_privacy": "public", "report_to": "none",
    "disable_tqdm": True, "logging_steps": 1000, "per_device_eval_batch_size": 218,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "data": Folder("folder with train.tsv and dev.tsv of SST-2"), "model": Folder("folder of a pretrained encoder"),
    "num_seeds": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on, the data, the model and the noise aside."""

    method: str
    settings: dict[str, Any]
    seed: int


def finetune(settings: Mapping[str, Any], data: Path, model: Path) -> dict[str, Any]:
    """One run of `recipes/glue.py` in a process of its own."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = {"train_file": str(data / "train.tsv"), "validation_file": str(data / "dev.tsv")}
        given = {**COMMON, **settings, **files, "model_name_or_path": str(model), "output_dir": f"{folder}/run"}
        Path(folder, "settings.json").write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-m", "recipes.glue", f"{folder}/settings.json"]
        environment = {**os.environ, "HF_DPOPT_PRIVATE_DIR": f"{folder}/private"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"recipes.glue ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
        results = json.loads(Path(folder, "run", "all_results.json").read_text(encoding="utf-8"))
    kept = {"accuracy": results["eval_accuracy"], "loss": results["eval_loss"], "epsilon": results["epsilon"]}
    return {**kept, "seconds": round(time.perf_counter() - began, 1)}


def table(
    given: argparse.Namespace, file: str, methods: Mapping[str, Sequence[dict[str, Any]]], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every method at the best of its candidates.

    Args:
        given: options of the command.
        file: name of the JSONL file.
        methods: name -> candidates, which are settings.
        common: settings of all methods.
    """

    def train(run: Run) -> dict[str, Any]:
        return finetune({**common, **run.settings, "seed": run.seed}, given.data, given.model)

    runs, rows = KeptRuns(given.output_dir / file, train), []
    for method, candidates in methods.items():
        tried = [runs.result(Run(method, settings, TUNING_SEED))["accuracy"] for settings in candidates]
        best = candidates[best_of(dict(enumerate(tried)))]
        found = runs.of_seeds(Run(method, best, 0), range(given.num_seeds))
        accuracies = [result["accuracy"] for result in found]
        rows.append({
            "method": method, "settings": best, "tried": tried, "accuracies": accuracies,
            "mean": float(np.mean(accuracies)), "std": float(np.std(accuracies, ddof=1)),
            "losses": [result["loss"] for result in found], "epsilon": found[0]["epsilon"],
            "seconds_per_run": float(np.mean([result["seconds"] for result in found])),
        })  # fmt: skip
    return rows
