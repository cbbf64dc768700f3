"""Excess risk of private heads in public subspaces: against the dimension, and against the number of steps.

Logistic regression on unit vectors, full batches, the mean of all iterates, by the descents of `hf_dpopt.convex`, with
noise of seeds. Step sizes are the best of a grid for the mean of runs whose seeds are not reported; the risk is that
above the least empirical one.

* **dimension**: 1,000 records, epsilon 2, 60 steps. Records lie in a random subspace of dimension 4 of the p, or in
  all p; labels are drawn. Where does noise of p dimensions hurt?
* **steps**: labels without noise, so that gradients fall, records spread unevenly in a subspace of dimension 4 of 64.
  Cor. 3.3: with gradients that fall like ``t^-alpha``, AdaGrad is as good as it gets after ``(epsilon n)^(2 / (1 + 2
  alpha))`` steps, where noisy SGD needs ``(epsilon n)^2``. Gradients are clipped to such an envelope, so alpha is what
  is asked for, not what the data have; the exponent of these data is printed, too.

    python -m recipes.paper.subspace.risk --output_dir docs/reproductions
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from hf_dpopt.convex import HeadConfig, SubspaceHeadConfig, make_subspace_plan
from hf_dpopt.convex.adagrad import SubspaceDescent
from hf_dpopt.convex.head_training import ProjectedDescent
from recipes.paper.runs import (
    KeptRuns,
    best_of,
    experiment,
    interval,
    log_slope,
    mean_and_error,
    panels,
    plain_ticks,
    save,
)  # fmt: skip

RANK, NUM_PUBLIC, DELTA = 4, 16, 1e-6
Records = tuple[torch.Tensor, torch.Tensor]  # features, (n, p), and labels 0 and 1, (n,)
WIDE = 1e6  # radius of a ball that no run reaches


@dataclasses.dataclass(frozen=True)
class Problem:
    """Records, the least risk on the private ones, and the norm of the weights that have it."""

    private: Records
    public: Records
    least: float
    radius: float


@dataclasses.dataclass(frozen=True)
class Method:
    """A descent: by all coordinates ("gd"), or a value of `SubspaceHeadConfig.adagrad`; and its envelope."""

    adagrad: str
    envelope: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """All that an excess risk depends on; the arguments of `make_data` and `excess` say what is what."""

    method: Method
    p: int
    rank: int | None
    num: int
    scale: float | None
    ball: float | None
    in_ball: bool
    steps: int
    epsilon: float
    rate: float = 0.0
    seed: int = 0


GD, PROJECTED = Method("gd"), Method("none")
RELEASED, ALGORITHM_1 = Method("released"), Method("clean")

# --- data ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def make_data(
    p: int, rank: int | None, seed: int, num: int, scale: float | None, ball: float | None = None
) -> Problem:
    """Private and public records, unit vectors in a random subspace.

    Args:
        p: dimension of the records.
        rank: of the subspace; None for all p.
        num: number of private records.
        scale: norm of the true weights of a logistic model, per root of the rank; None for labels without noise of
            records that are spread unevenly.
        ball: radius of the ball in which the risk is least; None for everywhere.
    """
    rng = np.random.default_rng(seed)  # of the coordinates: in every dimension the same problem, elsewhere
    r = p if rank is None else rank
    basis = np.eye(p) if rank is None else np.linalg.qr(np.random.default_rng((seed, p)).standard_normal((p, r)))[0]
    z = rng.standard_normal((num + NUM_PUBLIC, r))
    direction = rng.standard_normal(r)
    if scale is None:  # uneven, and all coordinates matter alike: the first gradient does not point to the minimum
        spread = 2.0 ** -np.arange(r)
        z, direction = z * spread, np.sign(direction) / spread
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    direction /= np.linalg.norm(direction)
    margins = math.sqrt(r) * z @ direction
    labels = margins > 0 if scale is None else rng.random(len(z)) < 1 / (1 + np.exp(-scale * margins))
    least, radius = least_risk(z[:num], np.where(labels[:num], 1.0, -1.0), ball)
    x, y = torch.tensor(z @ basis.T), torch.tensor(labels).long()
    return Problem((x[:num], y[:num]), (x[num:], y[num:]), least, radius)


def least_risk(z: np.ndarray, y: np.ndarray, ball: float | None) -> tuple[float, float]:
    """Of all weights, or those in the ball, on the coordinates in which the records lie; and their norm."""

    def risk(w: np.ndarray) -> tuple[float, np.ndarray]:
        margins = -y * (z @ w)
        return float(np.logaddexp(0, margins).mean()), z.T @ (-y / (1 + np.exp(-margins))) / len(y)

    start = np.zeros(z.shape[1])
    if ball is None:
        found = minimize(risk, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000})
    else:
        inside = {"type": "ineq", "fun": lambda w: ball**2 - w @ w, "jac": lambda w: -2 * w}
        found = minimize(risk, start, jac=True, method="SLSQP", constraints=inside, options={"ftol": 1e-12})
    return float(found.fun), float(np.linalg.norm(found.x))


# --- runs ------------------------------------------------------------------------------------------------------------


@functools.cache
def noise_of(num_steps: int, num: int, epsilon: float) -> float:
    """Noise multiplier of full batches."""
    config = SubspaceHeadConfig(
        head_radius=1.0, feature_norm=1.0, expected_batch_size=num, num_steps=num_steps, target_epsilon=epsilon,
        target_delta=DELTA,
    )  # fmt: skip
    return make_subspace_plan(config, num_examples=num).noise_multiplier


def excess(
    method: Method, problem: Problem, radius: float, num_steps: int, noise: float, rate: float, seed: int
) -> float:
    """Excess risk of the mean of the iterates of one run.

    Args:
        radius: of the ball of ``w_1 - w_0``, the weights of a logistic model.
        noise: noise multiplier.
        rate: step size in units of these weights; for AdaGrad the length of its first step.
    """
    scale = math.sqrt(2)  # two weights of opposite sign are shorter than their difference
    values = dict(
        head_radius=radius / scale, feature_norm=1.0, has_bias=False, expected_batch_size=len(problem.private[1]),
        num_steps=num_steps, noise_multiplier=noise, learning_rate=rate / scale,
    )  # fmt: skip
    descent: SubspaceDescent | ProjectedDescent
    if method == GD:
        descent = ProjectedDescent(HeadConfig(**values), 2, problem.private[0].size(1))
    else:
        config = SubspaceHeadConfig(**values, rank=RANK, adagrad=method.adagrad, envelope=method.envelope)
        descent = SubspaceDescent(config, 2, problem.public, noise_multiplier=noise)
    mean, rng = torch.zeros_like(descent.weights), torch.Generator().manual_seed(seed)
    for step in range(1, num_steps + 1):
        query = descent.query(*problem.private, step)
        query += math.sqrt(2) * noise * torch.randn(query.shape, generator=rng, dtype=torch.float64)
        descent.move(query, step)
        mean += (descent.weights - mean) / step
    (x, y), w = problem.private, mean[1] - mean[0]
    return float(torch.nn.functional.softplus((1 - 2 * y) * (x @ w)).mean()) - problem.least


def excess_of(run: Run) -> dict[str, float]:
    problem = make_data(run.p, run.rank, run.seed, run.num, run.scale, run.ball)
    radius, noise = problem.radius if run.in_ball else WIDE, noise_of(run.steps, run.num, run.epsilon)
    return {"excess": excess(run.method, problem, radius, run.steps, noise, run.rate, run.seed)}


def tuned(kept: KeptRuns, run: Run, rates: Sequence[float], seeds: Sequence[int], num: int) -> dict[str, Any]:
    """Excess risks under `num` seeds, at the step size that is best for other seeds; their mean and 95 % interval."""
    runs = {rate: dataclasses.replace(run, rate=rate) for rate in rates}
    best = best_of({rate: -kept.mean(one, seeds, "excess") for rate, one in runs.items()})
    found = [result["excess"] for result in kept.of_seeds(runs[best], range(num))]
    mean, half = interval(np.array(found))
    return {"rate": best, "excess": found, "mean": mean, "half_interval": half}


# --- against the dimension -------------------------------------------------------------------------------------------

NUM_RECORDS, NUM_STEPS, EPSILON = 1000, 60, 2.0
TUNING_SEEDS = (1000, 1001, 1002, 1003, 1004, 1005)
SCALE = 5.0  # of the true weights, per root of the rank: margins are as wide in every dimension
# panel -> curve -> (rank of the data, method, inside of a ball on whose border the minimiser lies)
CURVES: dict[str, dict[str, tuple[int | None, Method, bool]]] = {
    "data of rank 4": {
        "DP-GD": (RANK, GD, False),
        "projected": (RANK, PROJECTED, False),
        "AdaGrad, released": (RANK, RELEASED, False),
        "Algorithm 1": (RANK, ALGORITHM_1, False),
    },
    "data of rank 4, weights in a ball": {
        "DP-GD": (RANK, GD, True),
        "projected": (RANK, PROJECTED, True),
        "AdaGrad, released": (RANK, RELEASED, True),
        "Algorithm 1": (RANK, ALGORITHM_1, True),
    },
    "data of full rank": {"DP-GD": (None, GD, False)},
}
GD_RATES, ADAGRAD_RATES = [2.0, 8.0, 32.0, 128.0], [0.6, 2.0, 6.0, 20.0]


def against_dimension(kept: KeptRuns, dimensions: Sequence[int], num_seeds: int) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    for p in dimensions:
        for panel, curves in CURVES.items():
            for name, (rank, method, in_ball) in curves.items():
                if rank is None and p > NUM_RECORDS // 8:
                    continue  # the records are separable, or nearly: no finite weights have the least risk
                run = Run(method, p, rank, NUM_RECORDS, SCALE, None, in_ball, NUM_STEPS, EPSILON)
                rates = GD_RATES if method in (GD, PROJECTED) else ADAGRAD_RATES
                found = tuned(kept, run, rates, TUNING_SEEDS, num_seeds)
                points.append({"panel": panel, "curve": name, "p": p, **found})
    slopes: dict[str, dict[str, dict[str, float]]] = {}
    for panel, curves in CURVES.items():
        for name in curves:
            line = [point for point in points if (point["panel"], point["curve"]) == (panel, name)]
            mean, error = mean_and_error(log_slope([x["p"] for x in line], [x["excess"] for x in line]))
            slopes.setdefault(panel, {})[name] = {"mean": mean, "standard_error": error}
    return {
        "num_records": NUM_RECORDS, "num_steps": NUM_STEPS, "epsilon": EPSILON,
        "rates": {"gd": GD_RATES, "adagrad": ADAGRAD_RATES}, "seeds": list(range(num_seeds)),
        "tuning_seeds": TUNING_SEEDS, "slopes": slopes, "points": points,
    }  # fmt: skip


# --- against the number of steps -------------------------------------------------------------------------------------

DIMENSION, BALL = 64, 20.0
CELLS = ((256, 0.25), (256, 1.0), (1024, 0.25), (1024, 1.0))  # records and epsilon: epsilon n is 64, 256, 256, 1024
ALPHAS = (0.0, 0.25, 0.5)
STEPS_METHODS = {
    "DP-GD": GD,
    **{f"projected, alpha {alpha:g}": Method("none", alpha) for alpha in ALPHAS},
    **{f"Algorithm 1, alpha {alpha:g}": Method("clean", alpha) for alpha in ALPHAS},
}
MULTIPLIERS = (0.3, 1.0, 3.0, 10.0)  # of the step size that the theory of each method has


def theory_rate(method: Method, num_steps: int, num: int, noise: float) -> float:
    """Radius over ``sqrt(T)`` and the root mean square of a noisy gradient; the radius for AdaGrad.

    With an envelope both fall like ``t^-alpha``, and steps may be as much longer.
    """
    if method.adagrad == "clean":
        return BALL
    dims = 2 * DIMENSION if method == GD else RANK
    gradient = math.sqrt(1 + dims * (math.sqrt(2) * noise / num) ** 2)
    mean_square = float(np.mean(np.arange(1.0, num_steps + 1) ** (-2 * method.envelope)))
    return BALL / (gradient * math.sqrt(num_steps * mean_square))


def against_steps(kept: KeptRuns, steps: Sequence[int], num_seeds: int) -> dict[str, Any]:
    points, enough = [], []
    for num, epsilon in CELLS:
        for name, method in STEPS_METHODS.items():
            cell, line = {"num_records": num, "epsilon": epsilon, "curve": name}, []
            for num_steps in steps:
                run = Run(method, DIMENSION, RANK, num, None, BALL, True, num_steps, epsilon)
                base = theory_rate(method, num_steps, num, noise_of(num_steps, num, epsilon))
                found = tuned(kept, run, [m * base for m in MULTIPLIERS], TUNING_SEEDS[:2], num_seeds)
                line.append({"steps": num_steps, **found})
            points += [{**cell, **point} for point in line]
            enough.append({**cell, **_enough(line)})
    return {
        "dimension": DIMENSION, "ball": BALL, "multipliers": MULTIPLIERS, "tuning_seeds": TUNING_SEEDS[:2],
        "seeds": list(range(num_seeds)), "gradient_exponent": gradient_exponent(),
        "claimed": [
            {"num_records": n, "epsilon": e, "alpha": a, "steps": (e * n) ** (2 / (1 + 2 * a))}
            for n, e in CELLS for a in ALPHAS
        ],
        "enough": enough, "points": points,
    }  # fmt: skip


def _enough(line: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The number of steps with the least mean risk, and the fewest from which it is not told, by paired intervals."""
    best = min(line, key=lambda point: point["mean"])
    for point in line:
        mean, half = (
            interval(np.array(point["excess"]) - np.array(best["excess"])) if point is not best else (0.0, 0.0)
        )
        if mean <= half:
            return {"best": best["steps"], "best_mean": best["mean"], "enough": point["steps"]}
    raise AssertionError("the best is among them")


def gradient_exponent() -> float:
    """Exponent of the fall of the mean norm of record gradients with the steps of Algorithm 1, without noise."""
    problem, num_steps = make_data(DIMENSION, RANK, 0, 512, None, BALL), 1024
    config = SubspaceHeadConfig(
        head_radius=BALL / math.sqrt(2), feature_norm=1.0, has_bias=False, expected_batch_size=512,
        num_steps=num_steps, noise_multiplier=0.0, learning_rate=BALL / math.sqrt(2), rank=RANK, adagrad="clean",
    )  # fmt: skip
    descent, found = SubspaceDescent(config, 2, problem.public, noise_multiplier=0.0), []
    x, y = problem.private
    for step in range(1, num_steps + 1):
        errors = torch.sigmoid((1 - 2 * y) * (x @ (descent.weights[1] - descent.weights[0])))
        found.append(math.sqrt(2) * float(errors.mean()))
        descent.move(descent.query(x, y, step), step)
    return -float(log_slope(np.arange(1, num_steps + 1), np.array(found)))


# --- the command -----------------------------------------------------------------------------------------------------


def compute(given: argparse.Namespace) -> dict[str, Any]:
    kept = KeptRuns(given.output_dir / "subspace_risk_runs.jsonl", excess_of)
    return {
        "rank": RANK, "num_public": NUM_PUBLIC, "delta": DELTA, "adjacency": "add_or_remove_one",
        "steps": against_steps(kept, given.steps, given.num_step_seeds),
        "dimension": against_dimension(kept, given.dimensions, given.num_seeds),
    }  # fmt: skip


def draw_risks(axis: Any, points: Sequence[dict[str, Any]], x: str, labels: dict[str, str]) -> None:
    """Mean risk with its 95 % interval; a line for each curve."""
    for name, label in labels.items():
        line = [point for point in points if point["curve"] == name]
        errors = [point["half_interval"] for point in line]
        style = {"marker": "o", "markersize": 4, "capsize": 2, "label": label}
        axis.errorbar([point[x] for point in line], [point["mean"] for point in line], errors, **style)
    axis.set(yscale="log", ylabel="excess empirical risk (95 %)")
    plain_ticks(axis, sorted({point[x] for point in points}))
    axis.legend(fontsize=7)


def plot(numbers: dict[str, Any], picture: Path) -> None:
    dimension, steps = numbers["dimension"], numbers["steps"]
    figure, axes = panels(len(CURVES), width=3.8, height=3.6)
    for axis, (panel, slopes) in zip(axes, dimension["slopes"].items(), strict=True):
        labels = {name: f"{name}: slope {slope['mean']:.2f}" for name, slope in slopes.items()}
        draw_risks(axis, [x for x in dimension["points"] if x["panel"] == panel], "p", labels)
        axis.set(title=panel, xlabel="dimension p", ylim=(3e-4, 0.6))
    save(figure, picture)
    cells = sorted({(point["num_records"], point["epsilon"]) for point in steps["points"]})
    figure, axes = panels(len(cells), width=3.8, height=3.8)
    for axis, (num, epsilon) in zip(axes, cells, strict=True):
        own = [x for x in steps["points"] if (x["num_records"], x["epsilon"]) == (num, epsilon)]
        draw_risks(axis, own, "steps", {name: name for name in STEPS_METHODS})
        axis.set(title=f"n = {num}, epsilon = {epsilon:g}", xlabel="steps")
    save(figure, picture.with_name("subspace_steps.png"))


main = experiment(
    "subspace_risk", compute, plot, dimensions=[4, 16, 64, 256, 1024], num_seeds=10,
    steps=[1, 4, 16, 64, 256, 1024], num_step_seeds=8,
)  # fmt: skip

if __name__ == "__main__":
    main()
