"""What the final weights of a convex head cost at most and at least, against the number of steps.

python -m recipes.paper.convergent.lower_bound_plot --output_dir runs/paper    the head of docs/convex.md
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.convex.last_iterate import last_iterate_epsilon
from recipes.paper.convergent.lower_bound import last_iterate_lower_epsilons
from recipes.paper.runs import experiment, panels, save

NUM_LENGTHS = 13  # numbers of steps, whose bounds are computed
BEYOND = 10  # times the steps of the plan, or those after which more are free, are shown
SETTLED = 1e-3  # relative change from one length to the next, beyond the plateau, that ends the computation
HEAD = {  # of SST-2, in docs/convex.md
    "expected_batch_size": 1024, "num_steps": 100_000, "target_epsilon": 2.0, "head_radius": 10.0, "feature_norm": 1.0,
    "l2": 0.001,
}  # fmt: skip


def head_bounds(plan: HeadPlan) -> dict[str, Any]:
    """Both bounds on epsilon of the final weights, by the number of steps, with the noise of a plan without decay.

    Steps go from 10 to beyond the plan's and those after which more are free. An upper bound that is refused is nan,
    and so is a ratio without one of the two.
    """
    free = plan.free_steps()
    last = BEYOND * plan.sgd.num_steps if free is None else max(plan.sgd.num_steps, BEYOND * free)
    steps = sorted({int(t) for t in np.geomspace(10, max(100, last), NUM_LENGTHS).round()} | {plan.sgd.num_steps})
    upper: list[float] = []
    for num_steps in steps:
        is_flat = len(upper) > 1 and free is not None and num_steps > BEYOND / 2 * free
        if is_flat and abs(upper[-1] / upper[-2] - 1) < SETTLED:
            upper.append(upper[-1])
            continue
        try:
            run = dataclasses.replace(plan.sgd, num_steps=num_steps)
            upper.append(last_iterate_epsilon(run, plan.delta).epsilon)
        except DPConfigError:  # more steps have too large batches too often
            upper.append(math.nan)
    lower = last_iterate_lower_epsilons(plan.sgd, steps, plan.delta)
    ratios = [up / low if low > 0 else math.nan for up, low in zip(upper, lower, strict=True)]
    about = {"num_steps": plan.sgd.num_steps, "free_after": free, "delta": plan.delta}
    return {**about, "steps": steps, "upper": upper, "lower": lower, "ratios": ratios}


def compute(given: Any = None) -> dict[str, Any]:
    return head_bounds(make_head_plan(HeadConfig(**HEAD), num_examples=67_349))


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Both bounds on epsilon, and their ratio, against the number of steps."""
    figure, (of_epsilon, of_ratio) = panels(2, width=5.2, height=4.2)
    steps, lower = numbers["steps"], np.array(numbers["lower"])
    of_epsilon.loglog(steps, numbers["upper"], marker="o", markersize=3, label="upper bound")
    shown = np.where(lower > 0, lower, math.nan)
    of_epsilon.loglog(steps, shown, marker="o", markersize=3, label="lower bound: a walk on an interval")
    of_ratio.semilogx(steps, numbers["ratios"], color="C2", marker="o", markersize=3)
    for axis in (of_epsilon, of_ratio):
        axis.axvline(numbers["num_steps"], color="black", linewidth=0.8, label="steps of the plan")
        if numbers["free_after"] is not None:
            axis.axvline(numbers["free_after"], color="black", linewidth=0.8, linestyle=":", label="free beyond")
    of_epsilon.set(title="final weights", xlabel="steps", ylabel=f"epsilon at delta {numbers['delta']:g}")
    of_ratio.set(title="what the analysis may give away", xlabel="steps", ylabel="upper / lower", ylim=(0, None))
    of_epsilon.legend(fontsize=8)
    save(figure, path)


main = experiment("head", compute, plot)

if __name__ == "__main__":
    main()
