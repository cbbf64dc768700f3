"""Excess risk against dimension: where noise of p dimensions hurts, and where it does not.

Logistic regression on unit vectors, 1,000 records, full batches, 60 steps, epsilon 2: the setting of the theory
(convex, Lipschitz so that the clip never binds, unconstrained unless it says so). Records lie in a random subspace of
dimension 4 of the p, or in all p. The step size is the best of a grid for the mean of six runs whose seeds are not
reported. The risk is that of the average of the second half of the iterates, above the least empirical risk.

    python -m recipes.paper.subspace.risk --output_dir docs/reproductions
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.iterates import BallProjection, IterateAverage
from recipes.paper.runs import best_of, experiment, log_slope, mean_and_error, panels, plain_ticks, save
from recipes.paper.subspace.training import Recipe, Tensors, public_gradients, train

RANK, NUM_RECORDS, NUM_PUBLIC, NUM_STEPS = 4, 1000, 16, 60
EPSILON, DELTA = 2.0, 1e-6
TUNING_SEEDS = (1000, 1001, 1002, 1003, 1004, 1005)
IN_SUBSPACE: dict[str, Any] = dict(rank=RANK, num_public=NUM_PUBLIC, refresh_every=20, goe_every=20)
# panel -> curve -> (rank of the data, recipe, inside of a ball)
CURVES: dict[str, dict[str, tuple[int | None, Recipe, bool]]] = {
    "data of rank 4": {
        "DP-GD": (RANK, Recipe(), False),
        "projected": (RANK, Recipe("after_noise", **IN_SUBSPACE), False),
        "AdaGrad, released": (RANK, Recipe("after_noise", "released", **IN_SUBSPACE), False),
        "AdaGrad, GOE": (RANK, Recipe("before_clip", "goe", **IN_SUBSPACE), False),
    },
    "data of rank 4, weights in a ball": {
        "DP-GD": (RANK, Recipe(), True),
        "projected": (RANK, Recipe("after_noise", **IN_SUBSPACE), True),
    },
    "data of full rank": {"DP-GD": (None, Recipe(), False)},
}
RATES = {"none": [2.0, 8.0, 32.0, 128.0], "released": [0.6, 2.0, 6.0, 20.0], "goe": [0.6, 2.0, 6.0, 20.0]}
SCALE = 5.0  # of the true weights, per root of the rank: margins are as wide in every dimension


@functools.lru_cache(maxsize=8)
def make_data(p: int, rank: int | None, seed: int) -> tuple[Tensors, Tensors, float, float]:
    """Private and public records, unit vectors in a random subspace with labels of a logistic model in it.

    Returns:
        Both, the least risk on the private ones, and the norm of the weights that have it.
    """
    rng = np.random.default_rng(seed)  # of the coordinates: in every dimension the same problem, elsewhere
    r = p if rank is None else rank
    basis = np.eye(p) if rank is None else np.linalg.qr(np.random.default_rng((seed, p)).standard_normal((p, r)))[0]
    z = rng.standard_normal((NUM_RECORDS + NUM_PUBLIC, r))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    direction = rng.standard_normal(r)
    margins = SCALE * math.sqrt(r) * z @ direction / np.linalg.norm(direction)
    labels = np.where(rng.random(len(z)) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)
    x, y = torch.tensor(z @ basis.T, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)
    private, public = slice(0, NUM_RECORDS), slice(NUM_RECORDS, None)
    least, radius = least_risk(z[private], labels[private])
    return {"x": x[private], "y": y[private]}, {"x": x[public], "y": y[public]}, least, radius


def losses(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Logistic loss of each record, (B,); Lipschitz with constant 1 in the weights."""
    return nn.functional.softplus(-batch["y"] * model(batch["x"]).squeeze(1))


def least_risk(z: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of all weights, by L-BFGS on the coordinates in which the records lie, (n, r); and the norm of those weights."""

    def risk(w: np.ndarray) -> tuple[float, np.ndarray]:
        margins = -y * (z @ w)
        share = 1 / (1 + np.exp(-margins))
        return float(np.logaddexp(0, margins).mean()), z.T @ (-y * share) / len(y)

    found = minimize(risk, np.zeros(z.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 5000})
    return float(found.fun), float(np.linalg.norm(found.x))


@torch.no_grad()
def risk_of(model: nn.Module, data: Tensors) -> float:
    return losses(model.double(), {name: values.double() for name, values in data.items()}).mean().item()


def excess(
    plan: PrivacyPlan, p: int, rank: int | None, recipe: Recipe, in_ball: bool, rate: float, seed: int
) -> float:
    """Of one run, on data of its own."""
    private, public, least, radius = make_data(p, rank, seed)
    model = nn.Linear(p, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    average = IterateAverage(model, start=NUM_STEPS // 2)
    if in_ball:  # the minimiser lies on its border
        BallProjection(model, radius).attach(optimizer)
    average.attach(optimizer)
    source = public_gradients(model, losses, public, NUM_PUBLIC, seed) if recipe.projection != "none" else None
    train(model, losses, private, source, recipe, plan, optimizer, seed)
    average.finish()
    return risk_of(model, private) - least


def compute(given: argparse.Namespace) -> dict[str, Any]:
    config = PrivacyConfig(
        target_epsilon=EPSILON, target_delta=DELTA, expected_batch_size=NUM_RECORDS, sampling="fixed_order",
        adjacency="zero_out",
    )  # fmt: skip
    plan = make_plan(config, num_examples=NUM_RECORDS, num_steps=NUM_STEPS)

    def curve(rank: int | None, recipe: Recipe, in_ball: bool) -> list[dict[str, Any]]:
        run = functools.partial(excess, plan)
        return risks(
            lambda p, rate, seed: run(p, rank, recipe, in_ball, rate, seed), RATES[recipe.preconditioner],
            given.dimensions, given.num_seeds, is_full=rank is None,
        )  # fmt: skip

    points: list[dict[str, Any]] = []
    slopes: dict[str, dict[str, dict[str, float]]] = {}
    for panel, curves in CURVES.items():
        for name, setting in curves.items():
            found = curve(*setting)
            points += [{"panel": panel, "curve": name, **point} for point in found]
            slopes.setdefault(panel, {})[name] = slope_of(found)
    return {
        "num_records": NUM_RECORDS, "rank": RANK, "num_public": NUM_PUBLIC, "num_steps": NUM_STEPS,
        "epsilon": plan.epsilon(), "delta": DELTA, "adjacency": plan.adjacency,
        "noise_multiplier": plan.noise_multiplier, "goe_share": Recipe().goe_share, "rates": RATES,
        "seeds": list(range(given.num_seeds)), "tuning_seeds": TUNING_SEEDS, "slopes": slopes, "points": points,
    }  # fmt: skip


def risks(
    excess: Callable[[int, float, int], float],
    rates: Sequence[float],
    dimensions: Sequence[int],
    num_seeds: int,
    *,
    is_full: bool,
) -> list[dict[str, Any]]:
    """Excess risks by dimension, each at the step size that is best for the seeds that are not reported.

    Args:
        excess: of dimension, step size and seed.
        is_full: whether the data have full rank.
    """
    points = []
    for p in dimensions:
        if is_full and p > NUM_RECORDS // 8:
            continue  # the records are separable, or nearly: no finite weights have the least risk
        best = best_of({rate: -np.mean([excess(p, rate, seed) for seed in TUNING_SEEDS]) for rate in rates})
        found = [excess(p, best, seed) for seed in range(num_seeds)]
        points.append({"p": p, "rate": best, "excess": found, "mean": float(np.mean(found))})
    return points


def slope_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Slope of the risk in the dimension, over the seeds."""
    mean, error = mean_and_error(log_slope([x["p"] for x in points], [x["excess"] for x in points]))
    return {"mean": mean, "standard_error": error}


def draw_risks(axis: Any, points: Sequence[dict[str, Any]], slopes: dict[str, dict[str, float]]) -> None:
    """Mean risk against the dimension, with two standard errors; a line for each curve."""
    for name, slope in slopes.items():
        line = [x for x in points if x["curve"] == name]
        errors = [2 * mean_and_error(x["excess"])[1] for x in line]
        style = {"marker": "o", "markersize": 4, "capsize": 2, "label": f"{name}: slope {slope['mean']:.2f}"}
        axis.errorbar([x["p"] for x in line], [x["mean"] for x in line], errors, **style)
    axis.set(yscale="log", xlabel="dimension p", ylabel="excess empirical risk (2 standard errors)")
    plain_ticks(axis, sorted({x["p"] for x in points}))
    axis.legend(fontsize=8)


def plot(numbers: dict[str, Any], picture: Path) -> None:
    figure, axes = panels(len(CURVES), width=3.8, height=3.6)
    for axis, (panel, slopes) in zip(axes, numbers["slopes"].items(), strict=True):
        draw_risks(axis, [x for x in numbers["points"] if x["panel"] == panel], slopes)
        axis.set(title=panel, ylim=(3e-4, 0.6))
    save(figure, picture)


main = experiment("subspace_risk", compute, plot, dimensions=[4, 16, 64, 256, 1024], num_seeds=20)

if __name__ == "__main__":
    main()
