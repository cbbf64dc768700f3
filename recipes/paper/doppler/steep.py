"""Where a filter might help: a model with directions so steep that SGD oscillates, with noise and without.

The model of the other commands, with its tables of positions and token types. Every cell has a learning rate of its
own, found on a seed that is not reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.correlated_noise.output import panels, save
from recipes.paper.doppler import output
from recipes.paper.doppler.from_scratch import gains
from recipes.paper.doppler.task import Size, read_data
from recipes.paper.doppler.training import PLAIN, START_RATES, Run, Runs

OPTIMIZERS = {"dp_sgd": (PLAIN, "first_order_v1", "first_order_v2", "momentum"), "dp_adamw": (PLAIN, "first_order_v1")}
EPSILONS = (8.0, None)


def compute(arguments: argparse.Namespace) -> dict[str, Any]:
    size = Size(with_positions=True)
    runs = Runs(arguments.output_dir / "doppler_runs.jsonl", read_data(arguments.data, size))
    cells = [
        runs.cell(
            Run(
                optimizer=optimizer, filter=name, epsilon=epsilon, rate=0.0, seed=0, num_steps=arguments.num_steps,
                size=size,
            ),
            arguments.num_seeds,
            START_RATES[optimizer],
        )
        for optimizer, names in OPTIMIZERS.items()
        for name in names
        for epsilon in EPSILONS
    ]  # fmt: skip
    return {"cells": cells, "gains": gains(cells)}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Learning curves, with noise and without."""
    figure, axes = panels(len(EPSILONS), width=5.4, height=4.2)
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        for i, cell in enumerate(cell for cell in numbers["cells"] if cell["epsilon"] == epsilon):
            steps = [step for step, _ in cell["curves"][0]]
            band = 100 * np.array([[accuracy for _, accuracy in curve] for curve in cell["curves"]])
            label = f"{output.NAMES[cell['optimizer']]}, {cell['filter']} (rate {cell['rate']:g})"
            axis.plot(steps, band.mean(axis=0), color=f"C{i}", label=label)
            axis.fill_between(steps, band.min(axis=0), band.max(axis=0), color=f"C{i}", alpha=0.15, linewidth=0)
        axis.set(
            xlabel="step", ylabel="validation accuracy, %", ylim=(20, 80),
            title="without noise, clipped" if epsilon is None else f"epsilon {epsilon:g}",
        )  # fmt: skip
        axis.legend(fontsize=7, loc="upper left")
    save(figure, path)


def main() -> None:
    parser = output.parser("steep", __doc__)
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--num_seeds", type=int, default=3)
    arguments = parser.parse_args()
    numbers = output.write("steep", arguments, lambda: compute(arguments))
    for cell in numbers["cells"]:
        print(
            f"{cell['optimizer']:10} {cell['filter']:16} {cell['epsilon']} {100 * np.mean(cell['accuracies']):.1f} %"
        )
    plot(numbers, arguments.output_dir / "doppler_steep.png")


if __name__ == "__main__":
    main()
