"""RMSProp whose preconditioner is stale, without clip or noise: how long a D may be used (arXiv:2212.00309, Figure 2).

D is made of the first gradient, and then in every s-th step of the mean of the last s gradients; with s = 1 this is
RMSProp. Rates and floors of D are chosen under a seed and on records that are not reported.

    python -m recipes.paper.dp2.stale --data FOLDER --output_dir docs/reproductions
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.paper.dp2.data import Task, imdb
from recipes.paper.dp2.imdb import SETTING
from recipes.paper.dp2.training import TUNING_SEED
from recipes.paper.runs import Folder, KeptRuns, draw_lines, experiment, interval, panels, percent, plain_ticks, save

DELAYS = (1, 5, 65, 195, 585, 2340)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
FLOORS = (1e-7, 1e-4)
BETA = 0.9
SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on."""

    delay: int
    rate: float
    floor: float
    seed: int


def train(task: Task, run: Run, *, num_steps: int, batch: int) -> dict[str, Any]:
    """Accuracies and the training loss of the last weights, and the mean of ``sum g^2 / D`` over ``sum D``."""
    model, generator = task.model(), torch.Generator().manual_seed(run.seed)
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    moment, scale = [torch.zeros_like(p) for p in parameters], [torch.ones_like(p) for p in parameters]
    count, ratios = 0, []
    for step in range(num_steps):
        words_BW, labels_B = task.train.batch(torch.randint(len(task.train), (batch,), generator=generator))
        gradients = torch.autograd.grad(task.losses(model(words_BW), labels_B).mean(), parameters)
        torch._foreach_add_(total, gradients)
        count += 1
        if step % run.delay == 0:
            for v, d, g in zip(moment, scale, total, strict=True):
                v.mul_(BETA).addcmul_(g / count, g / count, value=1 - BETA)
                d.copy_(v.sqrt() + run.floor)
                g.zero_()
            count = 0
        divided = [g / d for g, d in zip(gradients, scale, strict=True)]
        above = sum(float((g * u).sum()) for g, u in zip(gradients, divided, strict=True))
        ratios.append(above / sum(float(d.sum()) for d in scale))
        with torch.no_grad():
            torch._foreach_add_(parameters, divided, alpha=-run.rate)
    words_NW, labels_N = task.train.batch(torch.arange(len(task.train)))
    with torch.no_grad():
        loss = float(task.losses(model(words_NW), labels_N).mean())
    return {
        "tuning": task.accuracy(model, task.tuning), "test": task.accuracy(model, task.test), "loss": loss,
        "ratio": float(np.mean(ratios)),
    }  # fmt: skip


def compute(given: argparse.Namespace) -> dict[str, Any]:
    task = imdb(given.data)
    kept = KeptRuns(
        given.output_dir / "dp2_stale.jsonl",
        lambda run: train(task, run, num_steps=SETTING.num_steps, batch=SETTING.batch),
    )
    rows: list[dict[str, Any]] = []
    for delay in DELAYS:
        tried = [Run(delay, rate, floor, TUNING_SEED) for rate, floor in itertools.product(RATES, FLOORS)]
        best = max(tried, key=lambda run: kept.result(run)["tuning"])
        runs = kept.of_seeds(best, range(SEEDS))
        row = {name: [run[name] for run in runs] for name in ("test", "loss", "ratio")}
        rows.append({"delay": delay, "rate": best.rate, "floor": best.floor, **row})
    for row in rows:
        gain, half = interval(np.subtract(row["test"], rows[0]["test"]))
        row |= {"mean": float(np.mean(row["test"])), "over_rmsprop": gain, "half_of_95_interval": half}
    return {"num_steps": SETTING.num_steps, "batch": SETTING.batch, "rows": rows}


def plot(numbers: dict[str, Any], path: Path) -> None:
    figure, (left, right) = panels(2, width=5.0, height=4.0)
    for axis, name, values in ((left, "test accuracy, %", "test"), (right, "training loss", "loss")):
        draw_lines(
            axis, numbers["rows"], "delay",
            lambda row, values=values: percent(row[values]) if values == "test" else row[values],
            lambda row: "RMSProp, no privacy",
        )  # fmt: skip
        plain_ticks(axis, DELAYS)
        axis.set(xlabel="delay s, steps", ylabel=name)
    save(figure, path)


main = experiment("dp2_stale", compute, plot, data=Folder("folder with train, test and unsup.jsonl.gz"))

if __name__ == "__main__":
    main()
