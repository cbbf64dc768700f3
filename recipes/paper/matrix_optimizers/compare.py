"""Optimizers for matrices against tuned DP-AdamW, on several tasks, in pairs.

Every cell has the best learning rate of a climb by factors of 2 on records and a seed that are not reported; then
seeds that share initial weights and batches with those of DP-AdamW, with fresh noise.

    python -m recipes.paper.matrix_optimizers.compare --sst2 FOLDER --ag_news FOLDER --model ENCODER \\
        --output_dir docs/reproductions

Runs are kept in ``matrix_optimizers.jsonl``; those that are there are not made again. The table is made of the cells
that are complete (``--only_table`` makes no run).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.dp2.output import versions
from recipes.paper.matrix_optimizers.task import TASKS, kept_tasks
from recipes.paper.matrix_optimizers.training import METHODS, Run, kept_runs, reported, tune
from recipes.paper.runs import KeptRuns, interval

EPSILONS = (3.0, 8.0, 1.0)
STEPS_OF = {
    "lora": (40, 120),
    "full": (40, 120),
    "topics": (80, 200),
    "phrases": (80, 200),
}  # steps, expected records of each
START = {
    "lora": 0.032,
    "full": 0.000125,
    "topics": 0.008,
    "phrases": 0.008,
}  # where the climbs begin, for every method alike
NUM_SEEDS, DATE = 5, "2026-11-24"


class Missing(Exception):
    """A run of this cell is not there."""


def cell(runs: KeptRuns, task: str, method: str, epsilon: float, num_seeds: int) -> dict[str, Any]:
    """Accuracies at the best learning rate, in %."""
    num_steps, batch = STEPS_OF[task]
    run = Run(task=task, method=method, epsilon=epsilon, rate=0.0, seed=0, num_steps=num_steps, batch=batch)
    tried = tune(runs, run, START[task])
    rate = max(tried, key=lambda one: tried[one])
    found = reported(runs, dataclasses.replace(run, rate=rate), range(num_seeds))
    return {
        "task": task, "method": method, "epsilon": epsilon, "rate": rate,
        "tried": {f"{one:g}": 100 * score for one, score in tried.items()}, "test": found,
        "mean": float(np.mean(found)), "stddev": float(np.std(found, ddof=1)),
    }  # fmt: skip


def with_differences(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells with what they have over DP-AdamW in pairs, half of the 95 % interval, and who won."""
    base = {(one["task"], one["epsilon"]): np.array(one["test"]) for one in cells if one["method"] == "DP-AdamW"}
    for one in cells:
        if one["method"] != "DP-AdamW" and (one["task"], one["epsilon"]) in base:
            over, half = interval(np.array(one["test"]) - base[one["task"], one["epsilon"]])
            one |= {"over_dp_adamw": over, "half_of_95_interval": half}
            one["verdict"] = "win" if over > half else "loss" if over < -half else "tie"
    return cells


def table(runs: KeptRuns, num_seeds: int) -> list[dict[str, Any]]:
    """The cells of which all runs are there, where there is something to compare."""
    rows = []
    for task, epsilon, method in itertools.product(TASKS, sorted(EPSILONS), METHODS):
        try:
            rows.append(cell(runs, task, method, epsilon, num_seeds))
        except Missing:
            continue
    rows = with_differences(rows)
    compared = {(row["task"], row["epsilon"]) for row in rows if "verdict" in row}
    return [row for row in rows if (row["task"], row["epsilon"]) in compared]


def _none(run: Run) -> dict[str, Any]:
    raise Missing(run)


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options of every command."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sst2", type=Path, help="folder with train.tsv of GLUE's SST-2")
    made.add_argument("--ag_news", type=Path, help="folder with train.tsv and test.tsv of AG News")
    made.add_argument("--model", help="folder of a pretrained BERT")
    made.add_argument("--states", type=Path, default=Path("matrix_states.pt"), help="file that keeps the states")
    made.add_argument("--output_dir", type=Path, required=True, help="folder for JSONL and JSON")
    made.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    return made


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    made.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    made.add_argument("--num_seeds", type=int, default=NUM_SEEDS)
    made.add_argument("--only_table", action="store_true", help="make the table of the runs that are there")
    given = made.parse_args()
    path = given.output_dir / "matrix_optimizers.jsonl"
    if not given.only_table:
        tasks = kept_tasks(given.sst2, given.ag_news, given.model, given.states)
        runs = kept_runs(path, tasks)
        for epsilon, task, method in itertools.product(given.epsilons, given.tasks, given.methods):
            cell(runs, task, method, epsilon, given.num_seeds)
    rows = table(KeptRuns(path, _none, lambda run, result: ""), given.num_seeds)
    about = {"command": "python -m recipes.paper.matrix_optimizers.compare", **versions(), "date": DATE}
    (given.output_dir / "matrix_optimizers.json").write_text(
        json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    for row in rows:
        accuracy, over = f"{row['mean']:.2f} +- {row['stddev']:.2f}", ""
        if "verdict" in row:
            over = f"{row['over_dp_adamw']:+.2f} +- {row['half_of_95_interval']:.2f} {row['verdict']}"
        print(f"{row['task']:7} eps {row['epsilon']:g} {row['method']:32} {accuracy}  {over}")


if __name__ == "__main__":
    main()
