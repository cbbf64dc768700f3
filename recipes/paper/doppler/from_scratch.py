"""Training from scratch with and without a low-pass filter: DPSGD, DP-AdamBC, DP-AdamW and DP-GaLore.

The filter is ``first_order_v1``. Every cell (optimizer, filter, epsilon) has a learning rate of its own, found in the
same way on a seed that is not reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.correlated_noise.output import panels, plain_ticks, save
from recipes.paper.doppler import output
from recipes.paper.doppler.task import Size, read_data
from recipes.paper.doppler.training import PLAIN, START_RATES, Run, Runs, mean_and_error

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


def compute(arguments: argparse.Namespace) -> dict[str, Any]:
    size = Size()
    runs = Runs(arguments.output_dir / "doppler_runs.jsonl", read_data(arguments.data, size))
    cells = []
    for optimizer, low_pass, epsilons in CELLS:
        for epsilon in sorted(epsilons, reverse=True):
            run = Run(
                optimizer=optimizer, filter=low_pass, epsilon=epsilon, rate=0.0, seed=0, num_steps=arguments.num_steps
            )
            cells.append(runs.cell(run, arguments.num_seeds, START_RATES[optimizer]))
    references = [
        runs.cell(
            Run(optimizer=optimizer, filter=PLAIN, epsilon=None, rate=0.0, seed=0, num_steps=arguments.num_steps),
            arguments.num_seeds,
            START_RATES[optimizer],
        )
        for optimizer in ("dp_sgd", "dp_adamw")
    ]
    return {"cells": cells, "gains": gains(cells), "without_noise": references}


def gains(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy with the filter less that without, in points, seed by seed: mean and standard error."""
    by_key = {(c["optimizer"], c["filter"], c["epsilon"]): c for c in cells}
    found = []
    for (optimizer, low_pass, epsilon), cell in by_key.items():
        plain = by_key.get((optimizer, PLAIN, epsilon))
        if low_pass == PLAIN or plain is None:
            continue
        pairs = zip(cell["accuracies"], plain["accuracies"], strict=True)
        mean, error = mean_and_error([100 * (filtered - without) for filtered, without in pairs])
        found.append({"optimizer": optimizer, "filter": low_pass, "epsilon": epsilon, "gain": mean, "error": error})
    return found


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy against epsilon, the learning curves at the loosest budget, and accuracy against the learning rate."""
    cells = numbers["cells"]
    figure, (sweep, curves, rates) = panels(3, width=5.0, height=4.2)
    largest = max(cell["epsilon"] for cell in cells)
    for optimizer, low_pass, _ in CELLS:
        mine = sorted(
            (c for c in cells if c["optimizer"] == optimizer and c["filter"] == low_pass), key=lambda c: c["epsilon"]
        )
        if not mine:
            continue
        is_plain = low_pass == PLAIN
        style = {"color": output.COLORS[optimizer], "linestyle": "-" if is_plain else "--"}
        label = output.NAMES[optimizer] if is_plain else f"LP-{output.NAMES[optimizer]}"
        shift = 0.98 if is_plain else 1.02  # so that the error bars of a pair lie side by side
        sweep.errorbar(
            [c["epsilon"] * shift for c in mine],
            [100 * np.mean(c["accuracies"]) for c in mine],
            [100 * np.std(c["accuracies"], ddof=1) for c in mine],
            marker="o" if is_plain else "s", markersize=4, capsize=3, label=label, **style,
        )  # fmt: skip
        last = mine[-1]
        if last["epsilon"] != largest:
            continue
        steps = [step for step, _ in last["curves"][0]]
        band = 100 * np.array([[accuracy for _, accuracy in curve] for curve in last["curves"]])
        curves.plot(steps, band.mean(axis=0), label=label, **style)
        curves.fill_between(steps, band.min(axis=0), band.max(axis=0), color=style["color"], alpha=0.12, linewidth=0)
        tried = sorted((float(rate), 100 * accuracy) for rate, accuracy in last["tried"].items())
        best = max(tried, key=lambda pair: pair[1])[0]
        rates.plot(
            [rate for rate, _ in tried], [accuracy for _, accuracy in tried],
            marker="o" if is_plain else "s", markersize=4, label=f"{label}, best {best:g}", **style,
        )  # fmt: skip
    sweep.set_xscale("log")
    plain_ticks(sweep, sorted({c["epsilon"] for c in cells}))
    sweep.set(xlabel="epsilon (delta 1e-5)", ylabel="test accuracy, %", title="tuned learning rates")
    sweep.legend(fontsize=8)
    curves.set(
        xlabel="step", ylabel="validation accuracy, %", title=f"epsilon {largest:g}: mean and range of the seeds"
    )
    rates.set_xscale("log")
    rates.set(
        xlabel="learning rate", ylabel="validation accuracy, %", title=f"epsilon {largest:g}: the search for rates"
    )
    rates.legend(fontsize=7, loc="lower center")
    save(figure, path)


def main() -> None:
    parser = output.parser("from_scratch", __doc__)
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--num_seeds", type=int, default=3)
    arguments = parser.parse_args()
    numbers = output.write("from_scratch", arguments, lambda: compute(arguments))
    for gain in numbers["gains"]:
        print(
            f"LP-{output.NAMES[gain['optimizer']]} at epsilon {gain['epsilon']:g}: "
            f"{gain['gain']:+.1f} +- {gain['error']:.1f} points"
        )
    plot(numbers, arguments.output_dir / "doppler_from_scratch.png")


if __name__ == "__main__":
    main()
