"""What the final weights of a convex head cost at most and at least, against the number of steps.

python -m recipes.paper.convergent.lower_bound_plot --output_dir runs/paper    the head of docs/convex.md
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.last_iterate import last_iterate_epsilon
from hf_dpopt.convex.plan import HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.report.figures import pyplot, save_figure
from recipes.paper.convergent.lower_bound import last_iterate_lower_epsilons

NUM_LENGTHS = 13  # numbers of steps, whose bounds are computed
BEYOND = 10  # times the steps of the plan, or those after which more are free, are shown
SETTLED = 1e-3  # relative change from one length to the next, beyond the plateau, that ends the computation
HEAD = {  # of SST-2, in docs/convex.md
    "expected_batch_size": 1024, "num_steps": 100_000, "target_epsilon": 2.0, "head_radius": 10.0, "feature_norm": 1.0,
    "l2": 0.001,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HeadBounds:
    """Bounds on epsilon of the final weights, by the number of steps, with the noise of the plan.

    Attributes:
        steps: numbers of steps, increasing.
        upper: epsilon that is never exceeded; nan where the bound is refused.
        lower: epsilon that some losses reach.
    """

    steps: tuple[int, ...]
    upper: tuple[float, ...]
    lower: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Upper bound over lower bound; nan where there is none to divide by."""
        return tuple(up / low if low > 0 else math.nan for up, low in zip(self.upper, self.lower, strict=True))


def head_bounds(plan: HeadPlan) -> HeadBounds:
    """Compute both bounds at lengths from 10 steps to beyond the plan's and those after which steps are free.

    Args:
        plan: a plan with noise and a constant step size.
    """
    free = plan.free_steps()
    last = BEYOND * plan.sgd.num_steps if free is None else max(plan.sgd.num_steps, BEYOND * free)
    lengths = {int(t) for t in np.geomspace(10, max(100, last), NUM_LENGTHS).round()} | {plan.sgd.num_steps}
    steps = sorted(lengths)
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
    return HeadBounds(tuple(steps), tuple(upper), tuple(last_iterate_lower_epsilons(plan.sgd, steps, plan.delta)))


def plot_head(plan: HeadPlan, folder: Path) -> list[Path]:
    """Write ``head.png`` and ``head.svg``: both bounds on epsilon, and their ratio, against the number of steps.

    Args:
        plan: a plan with noise and a constant step size.
        folder: folder of the two files; made if it does not exist.

    Raises:
        DPConfigError: if matplotlib is not installed, or the plan has no noise or a step size that decays.
    """
    if not plan.is_private or plan.config.decay:
        raise DPConfigError(
            "There is no lower bound without noise, or with steps that decay. Plot a plan with noise and decay 0."
        )
    plt = pyplot()
    bounds, free = head_bounds(plan), plan.free_steps()
    figure, (of_epsilon, of_ratio) = plt.subplots(1, 2, figsize=(10.5, 4.2))
    of_epsilon.loglog(bounds.steps, bounds.upper, marker="o", markersize=3, label="upper bound")
    shown = [low if low > 0 else math.nan for low in bounds.lower]
    of_epsilon.loglog(bounds.steps, shown, marker="o", markersize=3, label="lower bound: a walk on an interval")
    of_ratio.semilogx(bounds.steps, bounds.ratios, color="C2", marker="o", markersize=3)
    for axis in (of_epsilon, of_ratio):
        axis.axvline(plan.sgd.num_steps, color="black", linewidth=0.8, label="steps of the plan")
        if free is not None:
            axis.axvline(free, color="black", linewidth=0.8, linestyle=":", label="steps beyond are free")
    of_epsilon.set(title="epsilon of the final weights", xlabel="steps", ylabel=f"epsilon at delta {plan.delta:g}")
    of_ratio.set(title="what the analysis may give away", xlabel="steps", ylabel="upper / lower bound", ylim=(0, None))
    of_epsilon.legend(fontsize=8)
    sgd = plan.sgd
    figure.suptitle(
        f"{sgd.num_examples:,} records, batches of {sgd.expected_batch_size:,}, noise multiplier "
        f"{sgd.noise_multiplier:.3g}, ball of radius {sgd.diameter / 2:g}"
    )
    figure.tight_layout()
    return save_figure(figure, folder, "head")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.paper.convergent.lower_bound_plot", description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/paper"), help="folder for the plots")
    plan = make_head_plan(HeadConfig(**HEAD), num_examples=67_349)
    for path in plot_head(plan, parser.parse_args().output_dir):
        print(path)


if __name__ == "__main__":
    main()
