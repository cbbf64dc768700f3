"""Finetuning with and without a low-pass filter.

    python -m recipes.paper.doppler.finetuning --model MODEL_FOLDER --data FOLDER --output_dir docs/reproductions

Runs are kept in ``doppler_finetuning.jsonl``. FOLDER holds train.tsv and dev.tsv (sentence, label).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recipes.paper.doppler.training import COLORS, NAMES
from recipes.paper.finetuning import OPTIONS, table
from recipes.paper.runs import draw_bars, experiment, panels, percent, save

METHODS = {
    f"{NAMES[optimizer]}, {name}": {"optim": optimizer, **settings}
    for optimizer in ("dp_adamw", "dp_adam_bc")
    for name, settings in {"no filter": {}, "first_order_v1": {"filter": "first_order_v1"}}.items()
}


def compute(given: argparse.Namespace) -> dict[str, Any]:
    common = {
        "max_steps": given.num_steps, "expected_batch_size": given.batch, "per_device_train_batch_size": 64,
        "clipping_norm": given.clipping_norm,
    }  # fmt: skip
    methods = {
        name: [{**settings, "learning_rate": rate} for rate in given.rates] for name, settings in METHODS.items()
    }
    return {"cells": table(given, "doppler_finetuning.jsonl", methods, common)}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracy by optimizer and filter: mean, standard deviation, and a dot per seed."""
    figure, (axis,) = panels(1, width=6.4, height=3.4)
    cells = numbers["cells"]
    labels = [f"{cell['method']} (rate {cell['settings']['learning_rate']:g})" for cell in cells]
    colors = [COLORS[cell["settings"]["optim"]] for cell in cells]
    draw_bars(axis, labels, [percent(cell["accuracies"]) for cell in cells], colors)
    axis.set(xlabel="accuracy, %", title="SST-2, LoRA, epsilon 8")
    save(figure, path)


main = experiment(
    "doppler_finetuning", compute, plot, **OPTIONS, num_steps=48, batch=256, clipping_norm=0.1, rates=[2e-3, 4e-3]
)

if __name__ == "__main__":
    main()
