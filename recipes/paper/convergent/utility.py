"""When does the bound on the last iterate pay? Accuracy of a linear head against the number of steps.

SST-2 and AG News, unit-norm sentence embeddings of a frozen encoder (so R = 1), projected noisy SGD with Poisson
batches. (a) plain composition: the noise is calibrated anew for every number of steps; (b) last iterate: beyond the
plateau more steps need no more noise. Both have the radius of the ball and the step size that are best on records held
out from training, on a seed that is not reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.convex.last_iterate import ProjectedSGD, plateau
from recipes.paper.convergent.sgd import iterates, noise_of
from recipes.paper.runs import Folder, KeptRuns, draw_lines, experiment, panels, percent, save
from recipes.paper.texts import AG_NEWS_CLASSES, ag_news, embeddings, sst2

TUNING_SEED, HELD_OUT, DELTA, BATCH = 1000, 3000, 1e-5, 256
STEPS = (300, 1000, 3000, 10_000, 30_000, 100_000)
EPSILONS = (1.0, 2.0, 4.0)


def by_name(path: Path) -> tuple[list[str], list[int]]:
    """AG News with its classes in the order of their names, as the kept runs have them."""
    texts, labels = ag_news(path)
    return texts, np.argsort(np.argsort(AG_NEWS_CLASSES))[labels].tolist()


TASKS = {  # reader, folder, and the files of training and test records
    "sst2": (sst2, "glue-sst2", ("train", "dev")),
    "ag_news": (by_name, "ag-news", ("train", "test")),
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


def read_data(folder: Path, task: str, model: Path, cache: Path) -> Data:
    """Texts, their embeddings (kept in `cache`), and `HELD_OUT` training records set apart."""
    read, place, files = TASKS[task]
    splits = []
    for name in files:
        texts, labels = read(folder / place / f"{name}.tsv")
        kept = cache / f"{task}-{name}.npy"
        if not kept.exists():
            np.save(kept, embeddings(texts, model).numpy())
        embedded = torch.from_numpy(np.load(kept))
        constant = torch.full((len(embedded), 1), 0.25)
        features = torch.cat([embedded * (1 - 0.25**2) ** 0.5 * (1 - 1e-6), constant], dim=1)
        splits.append(Split(features, torch.tensor(labels)))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(splits[0])))
    apart, rest = order[:HELD_OUT], order[HELD_OUT:]
    train_split, held_out = (Split(splits[0].features[i], splits[0].labels[i]) for i in (rest, apart))
    return Data(train_split, held_out, splits[1], int(splits[0].labels.max()) + 1)


def compute(given: argparse.Namespace) -> dict[str, Any]:
    """Cell by cell: tuned on the records held out, reported on the test set."""
    torch.set_num_threads(1)
    cells = []
    for task in given.tasks:
        data = read_data(given.data, task, given.model, given.output_dir)
        runs = KeptRuns(given.output_dir / "convergent_runs.jsonl", functools.partial(train, data=data))
        for epsilon, accounting, num_steps in itertools.product(given.epsilons, GRIDS, given.steps):
            common = dict(task=task, accounting=accounting, epsilon=epsilon, num_steps=num_steps)
            asked = [
                Run(**common, radius=radius, rate=rate, l2=l2, seed=TUNING_SEED)  # type: ignore[arg-type]
                for radius, rate, l2 in GRIDS[accounting]
            ]
            best = max(asked, key=lambda run: runs.result(run)["held_out"])
            results = runs.of_seeds(best, range(given.num_seeds))
            noise = results[0]["noise_multiplier"]
            noisy = dataclasses.replace(best.setting(len(data.train)), noise_multiplier=noise)
            cells.append({
                **common, "radius": best.radius, "rate": best.rate, "l2": best.l2, "noise_multiplier": noise,
                "accuracies": [result["test"] for result in results], "free_after": plateau(noisy, DELTA),
            })  # fmt: skip
    return {"cells": cells}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy against steps, a panel for each task."""
    tasks = list(dict.fromkeys(cell["task"] for cell in numbers["cells"]))
    figure, axes = panels(len(tasks), width=5.4, height=4.2)
    for axis, task in zip(axes, tasks, strict=True):
        draw_lines(
            axis, (cell for cell in numbers["cells"] if cell["task"] == task), "num_steps",
            lambda cell: percent(cell["accuracies"]),
            lambda cell: f"epsilon {cell['epsilon']:g}, {cell['accounting']}",
        )  # fmt: skip
        axis.set(xscale="log", xlabel="steps", ylabel="test accuracy, %", title=task)
    save(figure, path)


main = experiment(
    "convergent_utility", compute, plot, data=Folder("folder that holds glue-sst2 and ag-news"),
    model=Folder("folder of a sentence encoder"), tasks=tuple(TASKS), epsilons=list(EPSILONS), steps=list(STEPS),
    num_seeds=5,
)  # fmt: skip

if __name__ == "__main__":
    main()
