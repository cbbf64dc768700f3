"""Private federated averaging of a next-word model: DP-SGD over users against correlated noise.

A round: users train on up to 16 of their messages, each move is clipped, the noisy mean goes to SGD with momentum 0.95
and a rate that falls to 0.05 of itself over the last quarter. DP-SGD has Poisson samples of users and their
amplification; the others have users in a fixed order, a whole pass apart (the min-separation), with noise tuned for
momentum and schedule. Every cell has a server learning rate of its own, found on a seed and on users not reported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.paper.federated.task import Size, Task, read_task
from recipes.paper.federated.training import MECHANISMS, USUAL, Run, Runs
from recipes.paper.runs import panels, save

START_RATE = 0.2
COLORS = {
    "DP-SGD": "#4c72b0", "tree": "#937860", "Honaker": "#8172b3", "nu-DP-FTRL": "#dd8452", "BLT": "#55a868",
    "DP-SGD, quantile": "#64b5cd", "BLT, quantile": "#ccb974",
}  # fmt: skip
METRICS = ("accuracy", "user_accuracy", "perplexity")


def compute(arguments: argparse.Namespace, task: Task, path: Path) -> dict[str, Any]:
    """The cells asked for, and the ceiling without noise."""
    runs = Runs(path, task)
    cells = []
    for epsilon in (None, *arguments.epsilons) if arguments.ceiling else arguments.epsilons:
        for mechanism in arguments.mechanisms if epsilon else ["DP-SGD"]:
            run = Run(
                mechanism=mechanism, epsilon=epsilon, rate=START_RATE, seed=0, num_rounds=arguments.num_rounds,
                users=arguments.users, clipping_norm=arguments.clipping_norm, local_rate=arguments.local_rate,
                local_batch=arguments.local_batch, public_steps=arguments.public_steps,
            )  # fmt: skip
            cells.append(runs.cell(run, arguments.num_seeds))
            print(line(cells[-1]), flush=True)
    return {
        "size": vars(task.size), "num_words": task.num_words, "num_users": task.num_users,
        "num_records": {name: len(getattr(task, name)) for name in ("train", "validation", "test")}, "cells": cells,
    }  # fmt: skip


def line(cell: dict[str, Any]) -> str:
    """A cell in a line."""
    name = f"{cell['mechanism']:10} epsilon {cell['epsilon']:g}" if cell["epsilon"] else "without noise"
    accuracies = 100 * np.array(cell["accuracy"])
    return (
        f"{name:22} rate {cell['rate']:<6g} accuracy {accuracies.mean():.2f} +- {np.std(accuracies, ddof=1):.2f} %, "
        f"per user {100 * np.mean(cell['user_accuracy']):.2f} %, perplexity {np.mean(cell['perplexity']):.1f}"
    )


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy by mechanism and epsilon; learning curves at the loosest budget."""
    cells, ceiling = [c for c in numbers["cells"] if c["epsilon"]], [c for c in numbers["cells"] if not c["epsilon"]]
    epsilons = sorted({cell["epsilon"] for cell in cells})
    figure, (bars, curves) = panels(2, width=5.4, height=4.2)
    names = list(dict.fromkeys(cell["mechanism"] for cell in cells))
    for i, name in enumerate(names):
        for cell in (c for c in cells if c["mechanism"] == name):
            at = epsilons.index(cell["epsilon"]) + (i - (len(names) - 1) / 2) * 0.15
            accuracies = 100 * np.array(cell["accuracy"])
            is_first = cell["epsilon"] == epsilons[0]
            bars.errorbar(
                at, accuracies.mean(), accuracies.std(ddof=1), fmt="o", capsize=4, color=COLORS[name],
                label=name if is_first else None,
            )  # fmt: skip
            bars.plot(np.full(len(accuracies), at), accuracies, "k.", markersize=3)
            if cell["epsilon"] == epsilons[-1]:
                _band(curves, cell, name, COLORS[name], "-")
    for cell in ceiling:
        mean = 100 * float(np.mean(cell["accuracy"]))
        bars.axhline(mean, color="#7f7f7f", linestyle=":", label="without noise")
        _band(curves, cell, "without noise", "#7f7f7f", ":")
    bars.set_xticks(range(len(epsilons)), [f"epsilon {e:g}" for e in epsilons])
    bars.set(ylabel="next-word accuracy of held-out users, %", title="mean, deviation and every seed")
    bars.legend(fontsize=8)
    curves.set(xlabel="round", ylabel="validation accuracy, %", title=f"epsilon {epsilons[-1]:g}: mean and range")
    curves.legend(fontsize=8)
    save(figure, path)


def _band(axis: Any, cell: dict[str, Any], label: str, color: str, style: str) -> None:
    rounds = [step for step, _ in cell["curves"][0]]
    band = 100 * np.array([[accuracy for _, accuracy in curve] for curve in cell["curves"]])
    axis.plot(rounds, band.mean(axis=0), color=color, linestyle=style, label=label)
    axis.fill_between(rounds, band.min(axis=0), band.max(axis=0), color=color, alpha=0.12, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.paper.federated.next_word", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, help="folder with messages.jsonl.gz of ubuntu-irc")
    parser.add_argument("--public_file", type=Path, required=True, help="public texts: words, and first weights")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--name", default="next_word", help="of the files written")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[2.0, 8.0])
    parser.add_argument("--mechanisms", nargs="+", default=list(USUAL), choices=list(MECHANISMS))
    parser.add_argument("--ceiling", action=argparse.BooleanOptionalAction, default=True, help="a run without noise")
    parser.add_argument("--num_rounds", type=int, default=320)
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--users", type=int, default=64, help="in a round")
    parser.add_argument("--clipping_norm", type=float, default=1.0)
    parser.add_argument("--local_rate", type=float, default=0.5)
    parser.add_argument("--local_batch", type=int, default=4)
    parser.add_argument("--public_steps", type=int, default=0, help="of ordinary training on public text first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    task = read_task(arguments.data, arguments.public_file, Size())
    numbers = compute(arguments, task, arguments.output_dir / "federated_runs.jsonl")
    about = {
        "command": "python -m recipes.paper.federated.next_word",
        "options": {k: v for k, v in vars(arguments).items() if not isinstance(v, Path)},
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "torch", "transformers")},
    }
    path = arguments.output_dir / f"federated_{arguments.name}.json"
    path.write_text(json.dumps({**about, **numbers}, indent=1) + "\n", encoding="utf-8")
    if any(cell["epsilon"] for cell in numbers["cells"]):
        plot(numbers, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
