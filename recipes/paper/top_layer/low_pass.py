"""DOPPLER on finetuning: adapters in the top layer, SST-2, with and without a low-pass filter, in pairs.

SGD without momentum and AdamBC, where the filter takes the place of the first moment. Every cell has the best learning
rate of a climb by factors of 2 on phrases and a seed that are not reported; then seeds that share initial weights and
batches, with fresh noise. The spectra are those of one run of SGD without filter at its best rate.

    python -m recipes.paper.top_layer.low_pass --data FOLDER_OF_SST2 --model ENCODER --output_dir docs/reproductions

Runs are kept in ``top_layer.jsonl``; those that are there are not made again.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from recipes.paper.runs import experiment, interval, mean_and_error
from recipes.paper.top_layer.task import Task, kept_task
from recipes.paper.top_layer.training import OPTIONS, Queries, Run, cell, kept_runs, train

FILTERS = ("plain", "first_order_v1")
START = {"dp_sgd": 4.0, "dp_adam_bc": 0.008, "dp_adamw": 0.032}
NUM_COORDINATES = 2048  # whose spectrum is taken


def gain(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Points that the filter adds, in pairs, with half of their 95 % interval and their standard error."""
    without, with_filter = (np.array(one["test"]) for one in cells)
    mean, half = interval(with_filter - without)
    return {"gain": mean, "half_of_95_interval": half, "standard_error": mean_and_error(with_filter - without)[1]}


def spectra(task: Task, run: Run) -> dict[str, Any]:
    """Share of the power of the mean gradient and of its noise in each tenth of the frequencies, lowest first."""
    signal: list[torch.Tensor] = []
    noise: list[torch.Tensor] = []
    chosen: dict[str, torch.Tensor] = {}

    def observe(step: int, before: Any, released: Any) -> None:
        if not chosen:
            sizes = {name: value.numel() for name, value in before.items()}
            whole = sum(sizes.values())
            generator = torch.Generator().manual_seed(0)
            for name, size in sizes.items():
                chosen[name] = torch.randperm(size, generator=generator)[: max(1, NUM_COORDINATES * size // whole)]
        signal.append(torch.cat([before[name].flatten()[rows] for name, rows in chosen.items()]))
        released_all = torch.cat([released[name].flatten()[rows] for name, rows in chosen.items()])
        noise.append(released_all - signal[-1])

    train(task, Queries(), run, observe)
    made: dict[str, Any] = {}
    for name, series in (("signal", signal), ("noise", noise)):
        power = torch.fft.rfft(torch.stack(series), dim=0).abs().square().sum(1)
        tenths = torch.tensor_split(power, 10)
        made[name] = [float(part.sum() / power.sum()) for part in tenths]
        made[f"{name}_power"] = float(power.sum())
    return made


def compute(given: argparse.Namespace) -> dict[str, Any]:
    task = kept_task(given)
    runs, rows = kept_runs(given, task), []
    for epsilon in given.epsilons:
        for optimizer in given.optimizers:
            cells = []
            for low_pass in FILTERS:
                run = Run(epsilon=epsilon, rate=0.0, seed=0, optimizer=optimizer, filter=low_pass)
                found = cell(runs, run, START[optimizer], given.num_seeds)
                cells.append({"optimizer": optimizer, "filter": low_pass, **found})
            rows.append({"cells": cells, **gain(cells)})
    first = Run(epsilon=given.epsilons[0], rate=rows[0]["cells"][0]["rate"], seed=0, optimizer=given.optimizers[0])
    return {"rows": rows, "spectra": spectra(task, first)}


main = experiment("doppler_top_layer", compute, **OPTIONS, epsilons=[8.0], optimizers=["dp_sgd", "dp_adam_bc"])

if __name__ == "__main__":
    main()
