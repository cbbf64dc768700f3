"""DP^2 in finetuning: LoRA on a pretrained encoder, sentiment of SST-2 phrases, against DP-SGD and DP-AdamW.

Drives `recipes/glue.py`. Every method has the best of a few learning rates under a seed that is not reported; the
validation records that choose it also measure, as is usual on GLUE. Runs are kept in ``dp2_lora.jsonl``.

    python -m recipes.paper.dp2.lora --model MODEL_FOLDER --data FOLDER --output_dir docs/reproductions

FOLDER holds train.tsv and dev.tsv (sentence, label).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from recipes import glue
from recipes.paper.dp2 import output
from recipes.paper.dp2.training import TUNING_SEED, Kept

EPSILON, DELTA = 8.0, 1e-5
NUM_TRAIN, BATCH, NUM_STEPS, DELAY, RANK = 10_000, 64, 120, 10, 8


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer, the options of a preconditioner (none for none), and learning rates to try."""

    name: str
    optimizer: str
    rates: tuple[float, ...]
    options: tuple[dict[str, Any], ...] = ({},)

    def candidates(self) -> list[dict[str, Any]]:
        """Every learning rate with every choice of options."""
        return [{"rate": rate, "options": options} for options in self.options for rate in self.rates]


METHODS = [
    Method("DP-SGD", "sgd", (0.1, 0.3, 1.0, 3.0)),
    Method("DP-AdamW", "adamw_torch", (1e-3, 3e-3, 1e-2, 3e-2)),
    Method("DP2-RMSProp", "sgd", (1.0,), tuple({"learning_rate_ratio": ratio} for ratio in (0.03, 0.1, 0.3, 1.0))),
    Method("DP2-RMSProp, AdamW on top", "adamw_torch", (1e-3, 3e-3, 1e-2)),
]


def flags(method: Method, hyper: dict[str, Any], seed: int, model: Path, data: Path, folder: str) -> list[str]:
    """The command line of `recipes/glue.py`."""
    values: dict[str, Any] = {
        "model_name_or_path": model, "train_file": data / "train.tsv", "validation_file": data / "dev.tsv",
        "label_list": "0,1", "output_dir": folder, "private_state_dir": f"{folder}_keys", "seed": seed,
        "target_epsilon": EPSILON, "target_delta": DELTA, "expected_batch_size": BATCH,
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 128, "max_steps": NUM_STEPS,
        "max_train_samples": NUM_TRAIN, "max_seq_length": 32, "lora_r": RANK, "learning_rate": hyper["rate"],
        "optim": method.optimizer, "lr_scheduler_type": "constant", "clipping_norm": 1.0, "noise_rng": "fast",
        "eval_data_privacy": "public", "save_strategy": "no", "report_to": "none", "logging_steps": NUM_STEPS,
    }  # fmt: skip
    if method.name.startswith("DP2"):
        options = json.dumps({"delay": DELAY, **hyper["options"]})
        values |= {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": options}
    listed = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*listed, "--lora_target_modules", "query", "value", "--disable_tqdm", "True", "--skip_self_check", "True"]


def train_once(method: Method, hyper: dict[str, Any], seed: int, model: Path, data: Path) -> dict[str, Any]:
    """One finetuning: validation accuracy and epsilon."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        glue.main(flags(method, hyper, seed, model, data, f"{folder}/run"))
        found = json.loads(Path(folder, "run", "eval_results.json").read_text())
        spent = json.loads(Path(folder, "run", "train_results.json").read_text())
    return {"accuracy": found["eval_accuracy"], "loss": found["eval_loss"], "epsilon": spent["epsilon"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--num_seeds", type=int, default=2)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.output_dir / "dp2_lora.jsonl", ("method", "hyper", "seed", "num_steps", "delay"))

    def run(method: Method, hyper: dict[str, Any], seed: int) -> dict[str, Any]:
        wanted = {"method": method.name, "hyper": hyper, "seed": seed, "num_steps": NUM_STEPS, "delay": DELAY}
        return kept.get(wanted, lambda: train_once(method, hyper, seed, arguments.model, arguments.data))

    rows = []
    for method in METHODS:
        tried = [run(method, hyper, TUNING_SEED) for hyper in method.candidates()]
        best = max(tried, key=lambda found: found["accuracy"])["hyper"]
        found = [run(method, best, seed) for seed in range(arguments.num_seeds)]
        accuracies = [one["accuracy"] for one in found]
        rows.append({
            "method": method.name, "hyper": best, "accuracies": accuracies, "mean": float(np.mean(accuracies)),
            "std": float(np.std(accuracies, ddof=1)) if len(found) > 1 else 0.0, "epsilon": found[0]["epsilon"],
            "seconds": float(np.mean([one["seconds"] for one in found])),
        })  # fmt: skip
    output.save_numbers(arguments.output_dir / "dp2_lora.json", "python -m recipes.paper.dp2.lora", {"table": rows})


if __name__ == "__main__":
    main()
