"""Training from scratch with and without a low-pass filter: DPSGD, DP-AdamBC, DP-AdamW and DP-GaLore.

The filter is ``first_order_v1``. Every cell (optimizer, filter, epsilon) has a learning rate of its own, found in the
same way on a seed that is not reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recipes.paper.doppler.task import Size
from recipes.paper.doppler.training import COLORS, NAMES, OPTIONS, PLAIN, Runs, gains
from recipes.paper.runs import draw_curves, draw_lines, experiment, panels, percent, plain_ticks, save

FILTER = "first_order_v1"
WHOLE_SWEEP = (1.0, 2.0, 4.0, 8.0)
ENDS = (2.0, 8.0)
CELLS = (
    ("dp_sgd", PLAIN, WHOLE_SWEEP),
    ("dp_sgd", FILTER, WHOLE_SWEEP),
    ("dp_adam_bc", PLAIN, WHOLE_SWEEP),
    ("dp_adam_bc", FILTER, WHOLE_SWEEP),
    ("dp_adamw", PLAIN, WHOLE_SWEEP),
    ("dp_adamw", FILTER, ENDS),
    ("dp_galore", PLAIN, ENDS),
    ("dp_galore", FILTER, ENDS),
)


def compute(given: argparse.Namespace) -> dict[str, Any]:
    runs = Runs(given, Size())
    cells = [
        runs.cell(optimizer, low_pass, epsilon)
        for optimizer, low_pass, epsilons in CELLS
        for epsilon in sorted(epsilons, reverse=True)
    ]
    references = [runs.cell(optimizer, PLAIN, None) for optimizer in ("dp_sgd", "dp_adamw")]
    return {"cells": cells, "gains": gains(cells), "without_noise": references}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy against epsilon, the learning curves at the loosest budget, and accuracy against the learning rate."""
    figure, (sweep, curves, rates) = panels(3, width=5.0, height=4.2)
    cells, largest = numbers["cells"], max(WHOLE_SWEEP)

    def label(cell: dict[str, Any]) -> str:
        return f"{'' if cell['filter'] == PLAIN else 'LP-'}{NAMES[cell['optimizer']]}"

    draw_lines(sweep, cells, "epsilon", lambda cell: percent(cell["accuracies"]), label)
    plain_ticks(sweep, WHOLE_SWEEP)
    sweep.set(xlabel="epsilon (delta 1e-5)", ylabel="test accuracy, %", title="tuned learning rates")
    for cell in (cell for cell in cells if cell["epsilon"] == largest):
        style = {"color": COLORS[cell["optimizer"]], "linestyle": "-" if cell["filter"] == PLAIN else "--"}
        draw_curves(curves, cell, label(cell), **style)
        tried = sorted((float(rate), 100 * accuracy) for rate, accuracy in cell["tried"].items())
        rates.plot(*zip(*tried, strict=True), marker="o", label=f"{label(cell)}, best {cell['rate']:g}", **style)
    curves.set_title(f"epsilon {largest:g}: mean and range of the seeds")
    rates.set(
        xscale="log", xlabel="learning rate", ylabel="validation accuracy, %",
        title=f"epsilon {largest:g}: the search for rates",
    )  # fmt: skip
    rates.legend(fontsize=7, loc="lower center")
    save(figure, path)


main = experiment("doppler_from_scratch", compute, plot, **OPTIONS, num_seeds=3)

if __name__ == "__main__":
    main()
