"""A linear head by AdaGrad in a public subspace, against projected SGD and against training on the public records.

AG News as hashed words: 512 counts of a text, of norm 1, and a head of 2,052 weights. Of the 10,001 records of the
train file 500 count as public, a different part for every seed, which all rows share; delta 1e-5. Step sizes (and the
rank) are the best of a grid on 1,600 records of the test file, with a seed that is not reported; the accuracies are
those on the other 6,000. `HeadRun` draws its noise from the operating system: a second run has different noise.

    python -m recipes.paper.subspace.head --data FOLDER --output_dir docs/reproductions

FOLDER holds train.tsv and test.tsv (text, class name; no header).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.convex import (
    HeadConfig,
    HeadRun,
    SubspaceHeadConfig,
    clip_features,
    make_head_plan,
    make_subspace_plan,
)
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from recipes.paper.runs import Folder, best_of, draw_bars, experiment, panels, percent, save
from recipes.paper.steps import EngineSums, Part, PrivateSteps, descend
from recipes.paper.texts import AG_NEWS_CLASSES, ag_news, bucket

WIDTH, RADIUS, NUM_STEPS, DELTA = 512, 30.0, 60, 1e-5
NUM_PUBLIC, NUM_VALIDATION, TUNING_SEED = 500, 1600, 1000
BATCH, ADAM_STEPS = 500, 380  # of DP-Adam: 20 epochs
WARM = 0.01  # step size of ordinary training on the public records: the best of those tried for them alone
Tensors = dict[str, torch.Tensor]
Cell = tuple[float, int]  # step size, rank
Train = Callable[["Task", float, Cell, int], nn.Module]  # of epsilon and a seed


def pick(data: Tensors, rows: Sequence[int] | torch.Tensor) -> Tensors:
    """Some records."""
    index = torch.as_tensor(rows, dtype=torch.long)
    return {name: values[index] for name, values in data.items()}


@dataclasses.dataclass(frozen=True)
class Task:
    """Private and public records, those that choose step sizes, and those that are reported."""

    private: Tensors
    public: Tensors
    validation: Tensors
    test: Tensors


class LinearHead(nn.Module):
    """Softmax regression with a bias, from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, len(AG_NEWS_CLASSES))
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.head(batch["features"])


def losses(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Cross entropy of each record, (B,)."""
    return nn.functional.cross_entropy(model(batch), batch["labels"], reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, data: Tensors) -> float:
    return (model(data).argmax(dim=1) == data["labels"]).float().mean().item()


def read(path: Path) -> Tensors:
    """Hashed words of each text, counted and of norm 1, (N, 512), and labels, (N,)."""
    texts, labels = ag_news(path)
    counts = torch.zeros(len(texts), WIDTH)
    for i, text in enumerate(texts):
        for word in text.lower().split():
            counts[i, bucket(word, WIDTH)] += 1
    return {"features": nn.functional.normalize(counts, dim=1), "labels": torch.tensor(labels)}


@functools.lru_cache(maxsize=1)
def files(folder: Path) -> tuple[Tensors, Tensors]:
    """The records of both files."""
    return read(folder / "train.tsv"), read(folder / "test.tsv")


def split(folder: Path, seed: int) -> Task:
    """Private and public records of a seed; validation and test are the same for all."""
    records, test = files(folder)
    order = np.random.default_rng(seed).permutation(len(records["labels"]))
    held_out = np.random.default_rng(0).permutation(len(test["labels"]))
    return Task(
        pick(records, order[NUM_PUBLIC:]), pick(records, order[:NUM_PUBLIC]),
        pick(test, held_out[:NUM_VALIDATION]), pick(test, held_out[NUM_VALIDATION:]),
    )  # fmt: skip


def head_run(config: HeadConfig, task: Task) -> nn.Module:
    """Train a head as `linear_probe.py` does, from its features on."""
    records = [
        (clip_features(part["features"], config.feature_norm, config.bias_feature).double(), part["labels"])
        for part in (task.private, task.public)
    ]
    num, in_subspace = len(task.private["labels"]), isinstance(config, SubspaceHeadConfig)
    plan: Any = (make_subspace_plan if in_subspace else make_head_plan)(config, num_examples=num)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        run = HeadRun(plan, output_dir=Path(folder, "out"), private_state_dir=Path(folder, "private"))
        weights = run.train(*records[0], len(AG_NEWS_CLASSES), public=records[1] if in_subspace else None)
    model = LinearHead()
    with torch.no_grad():
        model.head.weight.copy_(weights[:, :WIDTH]), model.head.bias.copy_(weights[:, -1] * config.bias_feature)
    return model


def settings(task: Task, epsilon: float, rate: float) -> dict[str, Any]:
    return dict(
        head_radius=RADIUS, feature_norm=1.1, expected_batch_size=len(task.private["labels"]), num_steps=NUM_STEPS,
        target_epsilon=epsilon, target_delta=DELTA, learning_rate=rate,
    )  # fmt: skip


def by_sgd(task: Task, epsilon: float, cell: Cell, seed: int) -> nn.Module:
    return head_run(HeadConfig(**settings(task, epsilon, cell[0])), task)


def by_adagrad(task: Task, epsilon: float, cell: Cell, seed: int) -> nn.Module:
    return head_run(SubspaceHeadConfig(**settings(task, epsilon, cell[0]), rank=cell[1]), task)


def fit(data: Tensors, rate: float, seed: int) -> LinearHead:
    """Train a head by Adam without privacy, batches of 100."""
    model = LinearHead()
    optimizer, rng = torch.optim.Adam(model.parameters(), lr=rate), np.random.default_rng(seed)
    for step in range(ADAM_STEPS):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / ADAM_STEPS)
        optimizer.zero_grad()
        losses(model, pick(data, rng.choice(len(data["labels"]), 100, replace=False))).mean().backward()
        optimizer.step()
    return model


def without_privacy(part: str) -> Train:
    return lambda task, epsilon, cell, seed: fit(getattr(task, part), cell[0], seed)


def public_first(task: Task, epsilon: float, cell: Cell, seed: int) -> nn.Module:
    """Train on the public records without privacy, then on the private ones by DP-Adam."""
    model = fit(task.public, WARM, seed)
    config = PrivacyConfig(target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=BATCH)
    plan = make_plan(config, num_examples=len(task.private["labels"]), num_steps=ADAM_STEPS)
    optimizer = torch.optim.Adam(model.parameters(), lr=cell[0])

    def parts(rows: torch.Tensor) -> list[Part]:
        batch = pick(task.private, rows)
        return [(lambda: losses(model, batch), len(rows))]

    engine, key = make_engine(model, plan.clipper), np.random.default_rng(seed).bytes(32)
    for step in descend(PrivateSteps(plan, EngineSums(engine, parts), keys=(key, key)), engine, optimizer, ADAM_STEPS):
        optimizer.param_groups[0]["lr"] = cell[0] * (1 - step / ADAM_STEPS)
    return model


RATES = [0.003, 0.01, 0.03]
# row -> how it is trained, its grid, and whether it is private
ROWS: dict[str, tuple[Train, list[Cell], bool]] = {
    "private records, no privacy": (without_privacy("private"), [(r, 0) for r in RATES], False),
    "public records alone, no privacy": (without_privacy("public"), [(r, 0) for r in RATES], False),
    "projected SGD": (by_sgd, [(rate, 0) for rate in (0.8, 1.6, 3.2)], True),
    "AdaGrad in the public subspace": (
        by_adagrad, [(rate, rank) for rate in (3.0, 10.0) for rank in (32, 128)], True
    ),
    "public records, then DP-Adam": (public_first, [(r, 0) for r in RATES], True),
}  # fmt: skip


def report(name: str, given: argparse.Namespace, epsilon: float) -> dict[str, Any]:
    """The best cell of a row, under every seed."""
    by, grid, is_private = ROWS[name]
    tuning = split(given.data, TUNING_SEED)
    tried = {cell: accuracy(by(tuning, epsilon, cell, TUNING_SEED), tuning.validation) for cell in grid}
    best = best_of(tried)
    tasks = ((seed, split(given.data, seed)) for seed in range(given.num_seeds))
    found = [accuracy(by(task, epsilon, best, seed), task.test) for seed, task in tasks]
    return {
        "row": name, "epsilon": epsilon if is_private else None, "rate": best[0], "rank": best[1] or None,
        "accuracies": found, "mean": statistics.mean(found), "stdev": statistics.stdev(found),
        "tried": {f"rate {rate:g}, rank {rank}" if rank else f"rate {rate:g}": v for (rate, rank), v in tried.items()},
    }  # fmt: skip


def compute(given: argparse.Namespace) -> dict[str, Any]:
    rows = [
        report(name, given, epsilon)
        for name, (_, _, is_private) in ROWS.items()
        for epsilon in (given.epsilons if is_private else given.epsilons[:1])
    ]
    return {
        "num_private": len(files(given.data)[0]["labels"]) - NUM_PUBLIC, "num_public": NUM_PUBLIC,
        "num_steps": NUM_STEPS, "head_radius": RADIUS, "delta": DELTA, "warm_rate": WARM, "coordinates": 2052,
        "seeds": list(range(given.num_seeds)), "tuning_seed": TUNING_SEED, "rows": rows,
    }  # fmt: skip


def plot(numbers: dict[str, Any], picture: Path) -> None:
    """Accuracies of the rows; a colour for every budget."""
    rows = numbers["rows"]
    figure, (axis,) = panels(1, width=7.0, height=0.24 * len(rows))
    budgets = sorted({row["epsilon"] for row in rows if row["epsilon"]})
    labels = [row["row"] + (f", epsilon {row['epsilon']:g}" if row["epsilon"] else "") for row in rows]
    colors = [f"C{budgets.index(row['epsilon'])}" if row["epsilon"] else "C7" for row in rows]
    draw_bars(axis, labels, [percent(row["accuracies"]) for row in rows], colors)
    axis.set(xlabel="test accuracy, %", title=f"AG News, {numbers['coordinates']:,} coordinates")
    save(figure, picture)


main = experiment(
    "subspace_head", compute, plot, data=Folder("folder with train.tsv and test.tsv"), epsilons=[0.25, 1.0],
    num_seeds=5,
)  # fmt: skip

if __name__ == "__main__":
    main()
