"""Second moments at the first weights, part by part, and the D that one query makes of them: what it can know.

python -m recipes.paper.top_layer.scales --data FOLDER_OF_SST2 --model ENCODER --output_dir docs/reproductions
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import ClippingEngine, make_engine
from hf_dpopt.clipping.scaling import Factored
from hf_dpopt.common.types import Released
from hf_dpopt.preclip import OneQuery
from recipes.paper.runs import experiment
from recipes.paper.top_layer.task import Task, kept_task
from recipes.paper.top_layer.training import OPTIONS, Run, TopLayer, answer, squared_sums

PARTS = ("lora_A", "lora_B", "head")
NUM_RECORDS = 6000  # whose mean squares stand for those of all


def divisors(run: Run, engine: ClippingEngine, released: Released) -> dict[str, torch.Tensor]:
    """D of a released answer, in the shapes of the parameters."""
    assert isinstance(run.preclip, OneQuery)
    preclip = run.preclip.start(engine.parameters, clipping_norm=run.clip)
    preclip.receive_opening(released)
    made = {}
    for name, part in preclip.inverse().items():
        shape = engine.parameters[name].shape
        made[name] = 1 / (part.matrix(shape) if isinstance(part, Factored) else part.inverse)
    return made


def measure(task: Task, run: Run, num_records: int = NUM_RECORDS) -> dict[str, Any]:
    """Share of the mean squared norm of clipped gradients, and D, of each part; correlations are of logarithms."""
    engine = make_engine(TopLayer(task.layer, run.seed), run.plan(len(task.train)).clipper)
    rows = torch.arange(min(num_records, len(task.train)))
    single, summed = (squared_sums(engine, task.train, rows, by_rows=by_rows) for by_rows in (False, True))
    moments = {name: value / len(rows) for name, value in single.items()}
    of_all = {name: value * (len(task.train) / len(rows)) for name, value in summed.items()}
    released = answer(run, of_all, len(task.train), np.random.default_rng(run.seed))  # type: ignore[arg-type]
    found, total = divisors(run, engine, released), sum(float(value.sum()) for value in moments.values())
    parts = {}
    for part in PARTS:
        names = [name for name in moments if part in name]
        moment = torch.cat([moments[name].flatten() for name in names])
        divisor = torch.cat([found[name].flatten() for name in names]).double()
        known = moment > 0
        related = np.corrcoef(moment[known].log(), divisor[known].log())[0, 1] if known.any() else None
        parts[part] = {
            "coordinates": len(moment), "share": float(moment.sum()) / total,
            "divisor": divisor.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist(),
            "correlation": None if related is None else float(related),
        }  # fmt: skip
    return parts


def compute(given: argparse.Namespace) -> dict[str, Any]:
    run = Run(epsilon=3.0, rate=0.0, seed=0, optimizer="dp_sgd_momentum", mechanism="banded", scale="query")
    return {"epsilon": run.epsilon, "parts": measure(kept_task(given), run)}


main = experiment("one_query_top_layer_scales", compute, **OPTIONS)

if __name__ == "__main__":
    main()
