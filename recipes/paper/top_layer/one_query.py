"""One query before the first step, on adapters: against tuned DP-AdamW and what lies between, on SST-2.

Every cell has the best learning rate of a climb by factors of 2 on phrases and a seed that are not reported; then
paired seeds: the same initial weights, batches where the sampler is the same, fresh noise. D has the package's default
floor. The clip lies far below the norms of all records in every row.

    python -m recipes.paper.top_layer.one_query --data FOLDER_OF_SST2 --model ENCODER --output_dir docs/reproductions

Runs are kept in ``top_layer.jsonl``; those that are there are not made again.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from recipes.paper.runs import experiment, interval
from recipes.paper.top_layer.task import kept_task
from recipes.paper.top_layer.training import OPTIONS, Run, cell, kept_runs

METHODS: dict[str, dict[str, Any]] = {
    "DP-AdamW": {"optimizer": "dp_adamw"},
    "banded, D from one query": {"mechanism": "banded", "scale": "query"},
    "banded SGD": {"mechanism": "banded"},
    "independent noise, D from one query": {"scale": "query"},
    "independent noise, D from releases": {"scale": "releases"},
}
START = {"dp_adamw": 0.032, "dp_sgd_momentum": 1.0}


def with_differences(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells with their mean, and what they have over DP-AdamW in pairs, with half of the 95 % interval."""
    base = {one["epsilon"]: np.array(one["test"]) for one in cells if one["method"] == "DP-AdamW"}
    for one in cells:
        test = np.array(one["test"])
        one["mean"], one["stddev"] = float(test.mean()), float(test.std(ddof=1))
        if one["method"] != "DP-AdamW":
            one["over_dp_adamw"], one["half_of_95_interval"] = interval(test - base[one["epsilon"]])
    return cells


def compute(given: argparse.Namespace) -> dict[str, Any]:
    runs, cells = kept_runs(given, kept_task(given)), []
    for epsilon in given.epsilons:
        for method in given.methods:
            run = Run(epsilon=epsilon, rate=0.0, seed=0, **{"optimizer": "dp_sgd_momentum", **METHODS[method]})
            cells.append({"method": method, **cell(runs, run, START[run.optimizer], given.num_seeds)})
    return {"rows": with_differences(cells)}


main = experiment("one_query_top_layer", compute, **OPTIONS, epsilons=[1.0, 3.0, 8.0], methods=tuple(METHODS))

if __name__ == "__main__":
    main()
