"""Private federated averaging of a next-word model: DP-SGD over users against correlated noise.

A round: users train on up to 16 of their messages, each update is clipped, the noisy mean goes to SGD with momentum
0.95 and a rate that falls to 0.05 of itself over the last quarter. DP-SGD has Poisson samples of users and their
amplification; the others have users in a fixed order, a whole pass apart (the min-separation), with noise tuned for
momentum and schedule. Every cell has its own server learning rate, found on a seed and on users that are not reported.

    python -m recipes.paper.federated.next_word --data FOLDER --public_file FILE --output_dir docs/reproductions

FOLDER holds messages.jsonl.gz of ubuntu-irc; FILE has the public texts that the words come from. Runs are kept in
``federated_runs.jsonl``; those that are there are not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.paper.federated.task import Size, read_task
from recipes.paper.federated.training import MECHANISMS, Run, Runs
from recipes.paper.runs import Folder, draw_curves, experiment, panels, percent, save

START_RATE = 0.2
COLORS = {"DP-SGD": "#4c72b0", "Honaker": "#8172b3", "nu-DP-FTRL": "#dd8452", "BLT": "#55a868"}
CEILING = {"label": "without noise", "color": "#7f7f7f", "linestyle": ":"}


def compute(given: argparse.Namespace) -> dict[str, Any]:
    """The cells asked for, and the ceiling without noise."""
    torch.set_num_threads(1)
    task = read_task(given.data, given.public_file, Size())
    runs = Runs(given.output_dir / "federated_runs.jsonl", task)
    asked = [("DP-SGD", None), *((name, epsilon) for epsilon in given.epsilons for name in given.mechanisms)]
    cells = [
        runs.cell(Run(mechanism=name, epsilon=of, rate=START_RATE, seed=0), given.num_seeds) for name, of in asked
    ]
    return {
        "size": vars(task.size), "num_words": task.num_words, "num_users": task.num_users,
        "num_records": {name: len(getattr(task, name)) for name in ("train", "validation", "test")}, "cells": cells,
    }  # fmt: skip


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy by mechanism and epsilon; learning curves at the loosest budget."""
    ceiling, *cells = numbers["cells"]
    epsilons, names = sorted({c["epsilon"] for c in cells}), list(dict.fromkeys(c["mechanism"] for c in cells))
    figure, (bars, curves) = panels(2, width=5.4, height=4.2)
    for cell in cells:
        name, accuracies = cell["mechanism"], percent(cell["accuracy"])
        at = epsilons.index(cell["epsilon"]) + (names.index(name) - (len(names) - 1) / 2) * 0.15
        label = name if cell["epsilon"] == epsilons[0] else None
        mean, stddev = accuracies.mean(), accuracies.std(ddof=1)
        bars.errorbar(at, mean, stddev, fmt="o", capsize=4, color=COLORS[name], label=label)
        bars.plot(np.full(len(accuracies), at), accuracies, "k.", markersize=3)
        if cell["epsilon"] == epsilons[-1]:
            draw_curves(curves, cell, label=name, color=COLORS[name])
    bars.axhline(percent(ceiling["accuracy"]).mean(), **CEILING)
    draw_curves(curves, ceiling, **CEILING)
    bars.set_xticks(range(len(epsilons)), [f"epsilon {e:g}" for e in epsilons])
    bars.set(ylabel="next-word accuracy of held-out users, %", title="mean, deviation and every seed")
    curves.set(xlabel="round", ylabel="validation accuracy, %", title=f"epsilon {epsilons[-1]:g}: mean and range")
    for axis in (bars, curves):
        axis.legend(fontsize=8)
    save(figure, path)


main = experiment(
    "federated_next_word", compute, plot, data=Folder("folder with messages.jsonl.gz of ubuntu-irc"),
    public_file=Folder("public texts, whose most frequent words are used"), epsilons=[2.0, 8.0],
    mechanisms=tuple(MECHANISMS), num_seeds=3,
)  # fmt: skip

if __name__ == "__main__":
    main()
