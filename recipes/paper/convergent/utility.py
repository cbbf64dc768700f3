"""When does the bound on the last iterate pay? Accuracy of a linear head against the number of steps.

SST-2 and AG News, unit-norm sentence embeddings of a frozen encoder (so R = 1), projected noisy SGD with Poisson
batches. (a) plain composition: the noise is calibrated anew for every number of steps; (b) last iterate: beyond the
plateau more steps need no more noise. Both have the radius of the ball and the step size that are best on records held
out from training, on a seed that is not reported.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import functools
import json
import math
import platform
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from hf_dpopt.convex.last_iterate import ProjectedSGD, plateau
from recipes.paper.convergent.sgd import iterates, noise_of
from recipes.paper.correlated_noise.output import panels, save
from recipes.paper.runs import KeptRuns

TUNING_SEED, HELD_OUT, DELTA, BATCH = 1000, 3000, 1e-5, 256
STEPS = (300, 1000, 3000, 10_000, 30_000, 100_000)
EPSILONS = (1.0, 2.0, 4.0)
TASKS: dict[str, dict[str, Any]] = {
    "sst2": {"folder": "glue-sst2", "files": ("train.tsv", "dev.tsv"), "text": "sentence", "columns": None},
    "ag_news": {"folder": "ag-news", "files": ("train.tsv", "test.tsv"), "text": "text", "columns": ["text", "label"]},
}
# (radius, step size over 1 / (M + 2 l2), l2). Composition wants small steps that average the noise of many; the bound
# on the last iterate wants what shrinks distances: small balls, long steps, a regulariser
GRIDS = {
    "composition": (
        (1.0, 1.0, 0.0), (10.0, 1.0, 0.0), (10.0, 0.1, 0.0), (10.0, 0.03, 0.0), (10.0, 0.01, 0.0), (10.0, 0.003, 0.0),
        (10.0, 0.1, 1e-2),
    ),
    "last iterate": (
        (0.1, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.1, 0.0), (10.0, 1.0, 3e-4), (10.0, 1.0, 1e-3), (10.0, 1.0, 1e-2),
        (10.0, 0.1, 1e-2), (10.0, 1.0, 1e-1),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Split:
    """Features (N, H + 1) of norm 1 at most, the constant one last, and labels (N,)."""

    features: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Data:
    train: Split
    held_out: Split
    test: Split
    num_labels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on."""

    task: str
    accounting: str
    epsilon: float
    num_steps: int
    radius: float
    rate: float  # the step size, in units of 1 / (M + 2 l2)
    l2: float
    seed: int
    batch: int = BATCH

    def setting(self, num_examples: int) -> ProjectedSGD:
        return ProjectedSGD(
            num_examples=num_examples, expected_batch_size=self.batch, num_steps=self.num_steps, noise_multiplier=1.0,
            diameter=2 * self.radius, lipschitz=math.sqrt(2), smoothness=0.5, l2=self.l2,
            step_size=self.rate / (0.5 + 2 * self.l2),
        )  # fmt: skip


def train(run: Run, data: Data) -> dict[str, Any]:
    """One run with a public key: the data are public.

    Returns:
        Accuracies on the records held out and on the test set, the noise, seconds.
    """
    began = time.process_time()
    setting = run.setting(len(data.train))
    noise = noise_of(setting, run.epsilon, DELTA, run.accounting)
    noisy = dataclasses.replace(setting, noise_multiplier=noise)
    (weights,) = deque(iterates(data.train.features, data.train.labels, data.num_labels, noisy, run.seed), maxlen=1)
    return {
        "held_out": accuracy(weights, data.held_out), "test": accuracy(weights, data.test), "noise_multiplier": noise,
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def accuracy(weights: torch.Tensor, split: Split) -> float:
    return ((split.features @ weights.float().T).argmax(dim=1) == split.labels).float().mean().item()


def read_data(folder: Path, task: str, model: str, cache: Path) -> Data:
    """Texts, their embeddings (kept in `cache`), and `HELD_OUT` training records set apart."""
    about = TASKS[task]
    tables = []
    for name in about["files"]:
        with (folder / about["folder"] / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, about["columns"], delimiter="\t", quoting=csv.QUOTE_NONE))
        tables.append(([row[about["text"]] for row in rows], [row["label"] for row in rows]))
    names = sorted(set(tables[0][1]))
    splits = []
    for (texts, labels), name in zip(tables, about["files"], strict=True):
        kept = cache / f"{task}-{name.removesuffix('.tsv')}.npy"
        if not kept.exists():
            np.save(kept, embed(texts, model))
        embedded = torch.from_numpy(np.load(kept))
        constant = torch.full((len(embedded), 1), 0.25)
        features = torch.cat([embedded * (1 - 0.25**2) ** 0.5 * (1 - 1e-6), constant], dim=1)
        splits.append(Split(features, torch.tensor([names.index(label) for label in labels])))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(splits[0])))
    apart, rest = order[:HELD_OUT], order[HELD_OUT:]
    train_split, held_out = (Split(splits[0].features[i], splits[0].labels[i]) for i in (rest, apart))
    return Data(train_split, held_out, splits[1], len(names))


@torch.no_grad()
def embed(texts: list[str], model: str) -> np.ndarray:
    """Mean of the last hidden states, divided by its norm: (N, H)."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    order = np.argsort([len(text) for text in texts])
    found = np.empty((len(texts), encoder.config.hidden_size), np.float32)
    for first in range(0, len(texts), 64):
        some = order[first : first + 64]
        batch = tokenizer([texts[i] for i in some], padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask_BT1 = batch["attention_mask"].unsqueeze(-1)
        sums_BH = (encoder(**batch).last_hidden_state * mask_BT1).sum(dim=1)
        found[some] = torch.nn.functional.normalize(sums_BH / mask_BT1.sum(dim=1), dim=1).numpy()
    return found


def compute(arguments: argparse.Namespace) -> dict[str, Any]:
    """Cell by cell: tuned on the records held out, reported on the test set."""
    cells = []
    for task in arguments.tasks:
        data = read_data(arguments.data, task, arguments.model, arguments.output_dir)
        runs = KeptRuns(arguments.output_dir / "convergent_runs.jsonl", functools.partial(_train_on, data=data), _line)
        for epsilon in arguments.epsilons:
            for accounting, grid in GRIDS.items():
                for num_steps in arguments.steps:
                    common = dict(task=task, accounting=accounting, epsilon=epsilon, num_steps=num_steps)
                    asked = [
                        Run(**common, radius=radius, rate=rate, l2=l2, seed=TUNING_SEED)  # type: ignore[arg-type]
                        for radius, rate, l2 in grid
                    ]
                    best = max(asked, key=lambda run: runs.result(run)["held_out"])
                    results = [
                        runs.result(dataclasses.replace(best, seed=seed)) for seed in range(arguments.num_seeds)
                    ]
                    cells.append({
                        **common, "radius": best.radius, "rate": best.rate, "l2": best.l2,
                        "noise_multiplier": results[0]["noise_multiplier"],
                        "accuracies": [result["test"] for result in results],
                        "free_after": _free_after(best, len(data.train), results[0]["noise_multiplier"]),
                    })  # fmt: skip
    return {"cells": cells}


def _train_on(run: Run, data: Data) -> dict[str, Any]:
    return train(run, data)


def _free_after(run: Run, num_examples: int, noise: float) -> int | None:
    return plateau(dataclasses.replace(run.setting(num_examples), noise_multiplier=noise), DELTA)


def _line(run: Run, result: dict[str, Any]) -> str:
    return (
        f"{run.task:8} {run.accounting:12} epsilon {run.epsilon:g} T {run.num_steps:<7} radius {run.radius:<5g} rate "
        f"{run.rate:<4g} l2 {run.l2:<6g} seed {run.seed:<4} {100 * result['test']:.1f} % in {result['seconds']:.0f} s"
    )


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy against steps, a panel for each task: colours are epsilons, dashed lines the last iterate."""
    tasks = list(dict.fromkeys(cell["task"] for cell in numbers["cells"]))
    figure, axes = panels(len(tasks), width=5.4, height=4.2)
    for axis, task in zip(axes, tasks, strict=True):
        epsilons = sorted({cell["epsilon"] for cell in numbers["cells"] if cell["task"] == task})
        for i, epsilon in enumerate(epsilons):
            for j, (accounting, style) in enumerate((("composition", "-"), ("last iterate", "--"))):
                mine = [
                    cell
                    for cell in numbers["cells"]
                    if (cell["task"], cell["epsilon"], cell["accounting"]) == (task, epsilon, accounting)
                ]
                means = [100 * float(np.mean(cell["accuracies"])) for cell in mine]
                spread = [100 * float(np.std(cell["accuracies"], ddof=1)) for cell in mine]
                aside = 1.06 ** (2 * i + j - len(epsilons))  # else error bars hide each other
                axis.errorbar(
                    [cell["num_steps"] * aside for cell in mine], means, spread, color=f"C{i}", linestyle=style,
                    marker="os"[j], markersize=4, capsize=3, label=f"epsilon {epsilon:g}, {accounting}",
                )  # fmt: skip
        axis.set(xscale="log", xlabel="steps", ylabel="test accuracy, %", title=task)
        axis.legend(fontsize=7, handlelength=4)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.paper.convergent.utility", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, help="folder that holds glue-sst2 and ag-news")
    parser.add_argument("--model", required=True, help="folder of a sentence encoder")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--num_seeds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    numbers = compute(arguments)
    about = {
        "command": "python -m recipes.paper.convergent.utility",
        "options": {k: v for k, v in vars(arguments).items() if k not in ("data", "model", "output_dir")},
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "torch", "transformers", "dp-accounting")},
    }
    path = arguments.output_dir / "convergent_utility.json"
    path.write_text(json.dumps({**about, **numbers}, indent=1) + "\n", encoding="utf-8")
    plot(numbers, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
