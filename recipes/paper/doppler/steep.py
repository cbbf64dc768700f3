"""Where a filter might help: a model with directions so steep that SGD oscillates, with noise and without.

The model of the other commands, with its tables of positions and token types. Every cell has a learning rate of its
own, found on a seed that is not reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recipes.paper.doppler.task import Size
from recipes.paper.doppler.training import NAMES, OPTIONS, PLAIN, Runs, draw_curves, gains
from recipes.paper.runs import experiment, panels, save

OPTIMIZERS = {"dp_sgd": (PLAIN, "first_order_v1", "first_order_v2", "momentum"), "dp_adamw": (PLAIN, "first_order_v1")}
EPSILONS = (8.0, None)


def compute(given: argparse.Namespace) -> dict[str, Any]:
    runs = Runs(given, Size(with_positions=True))
    cells = [
        runs.cell(optimizer, name, epsilon)
        for optimizer, names in OPTIMIZERS.items()
        for name in names
        for epsilon in EPSILONS
    ]
    return {"cells": cells, "gains": gains(cells)}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Learning curves, with noise and without."""
    figure, axes = panels(len(EPSILONS), width=5.4, height=4.2)
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        for cell in (cell for cell in numbers["cells"] if cell["epsilon"] == epsilon):
            draw_curves(axis, cell, f"{NAMES[cell['optimizer']]}, {cell['filter']} (rate {cell['rate']:g})")
        axis.set(ylim=(20, 80), title="without noise, clipped" if epsilon is None else f"epsilon {epsilon:g}")
        axis.legend(fontsize=7, loc="upper left")
    save(figure, path)


main = experiment("doppler_steep", compute, plot, **OPTIONS, num_seeds=3)

if __name__ == "__main__":
    main()
