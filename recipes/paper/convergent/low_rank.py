"""Excess risk against dimension: what the ball costs that the bound on the last iterate needs.

The softmax head of the convex mode on the logistic problem of `recipes/paper/subspace/risk.py`: 1,000 unit vectors
in a random subspace of dimension 4 of the p, or in all p; Poisson batches of 100, 300 steps, epsilon 2. Without a ball
only plain composition applies, and noise outside of the subspace never meets a record (arXiv:2008.06570, Theorem 5.1).
Step sizes are the best of a grid for the mean of six runs whose seeds are not reported. Risks are those of the mean of
the second half of the iterates, or of the last one alone, as the bound on the last iterate wants it. (That bound takes
the noise of composition here: its plateau lies beyond 300 steps.)

    python -m recipes.paper.convergent.low_rank --output_dir docs/reproductions
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.convex.last_iterate import ProjectedSGD
from recipes.paper.convergent.sgd import FAR, iterates, noise_of
from recipes.paper.runs import experiment, panels, save
from recipes.paper.subspace.risk import NUM_RECORDS, RANK, TUNING_SEEDS, draw_risks, make_data, risks, slope_of

EPSILON, DELTA, BATCH, NUM_STEPS, NUM_SEEDS = 2.0, 1e-6, 100, 300, 20
DIMENSIONS = (4, 16, 64, 256, 1024)
RADIUS = 8.5  # just outside of the heads of least risk on data of rank 4
RATES = (0.03, 0.1, 0.3, 1.0)  # over 1 / (M + 2 l2); with more, large batches would be no contractions too often


@dataclasses.dataclass(frozen=True)
class Curve:
    """One way to train, on data of `rank` (None: of all dimensions)."""

    rank: int | None = RANK
    in_ball: bool = False
    l2: float = 0.0
    last: bool = False  # the last weights, not a mean


CURVES = {
    "rank 4, no ball": Curve(),
    "rank 4, in a ball": Curve(in_ball=True),
    "rank 4, in a ball, last weights": Curve(in_ball=True, last=True),
    "rank 4, in a ball, l2 = 0.01, last weights": Curve(in_ball=True, l2=1e-2, last=True),
    "full rank, no ball": Curve(rank=None),
}


def setting(curve: Curve, rate: float) -> ProjectedSGD:
    """With the noise that keeps the budget."""
    sgd = ProjectedSGD(
        num_examples=NUM_RECORDS, expected_batch_size=BATCH, num_steps=NUM_STEPS, noise_multiplier=1.0,
        diameter=2 * RADIUS if curve.in_ball else FAR, lipschitz=math.sqrt(2), smoothness=0.5, l2=curve.l2,
        step_size=rate / (0.5 + 2 * curve.l2),
    )  # fmt: skip
    return dataclasses.replace(
        sgd, noise_multiplier=noise_of(sgd, EPSILON, DELTA, "last iterate" if curve.last else "composition")
    )


@functools.cache
def excess(curve: Curve, p: int, rate: float, seed: int) -> float:
    """Empirical risk above the least one, of one run on data of its own."""
    data, _, least, _ = make_data(p, curve.rank, seed)
    labels = (data["y"] > 0).long()
    released, count = torch.zeros(2, p, dtype=torch.float64), 0
    for step, weights in enumerate(iterates(data["x"], labels, 2, setting(curve, rate), seed), start=1):
        if step == NUM_STEPS or (not curve.last and step > NUM_STEPS // 2):
            released, count = released + weights, count + 1
    logits = data["x"].double() @ (released / count).T
    return torch.nn.functional.cross_entropy(logits, labels).item() - least


def compute(given: Any) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    for name, curve in CURVES.items():
        run = functools.partial(excess, curve)
        found = risks(run, RATES, DIMENSIONS, NUM_SEEDS, is_full=curve.rank is None)
        noise = ({"noise_multiplier": setting(curve, point["rate"]).noise_multiplier} for point in found)
        points += [{"curve": name, **point, **more} for point, more in zip(found, noise, strict=True)]
    return {
        "num_records": NUM_RECORDS, "rank": RANK, "batch": BATCH, "num_steps": NUM_STEPS, "epsilon": EPSILON,
        "delta": DELTA, "rates": RATES, "tuning_seeds": TUNING_SEEDS, "seeds": NUM_SEEDS,
        "slopes": {name: slope_of([point for point in points if point["curve"] == name]) for name in CURVES},
        "points": points,
    }  # fmt: skip


def plot(numbers: dict[str, Any], path: Path) -> None:
    figure, (axis,) = panels(1, width=5.4, height=4.2)
    draw_risks(axis, numbers["points"], numbers["slopes"])
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # lines fill the panel
    save(figure, path)


main = experiment("convergent_low_rank", compute, plot)

if __name__ == "__main__":
    main()
