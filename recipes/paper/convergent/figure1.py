"""Figure 1 of the paper with real constants: epsilon against the number of steps, by every bound there is.

A softmax head on SST-2: 67,349 records, batches of 1,024, features of norm 1, so L = sqrt(2) and M = 1/2; weights in a
ball, the step size half of what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hf_dpopt.convex.last_iterate import ProjectedSGD, last_iterate_epsilon, plateau
from recipes.paper.runs import experiment, panels, save

NUM_EXAMPLES, BATCH, DELTA, NOISE = 67_349, 1024, 1e-5, 4.0
RADII = (0.1, 1.0)
L2 = 1e-3
STEPS = [int(t) for t in np.unique(np.geomspace(10, 1e7, 25).round())]
FAR = 1e9  # radius of a ball that bounds nothing: plain composition
PLAIN_PLD_LIMIT = 200_000  # steps, beyond which plain composition takes minutes


class LastShift(ProjectedSGD):
    """The paper's own allocation: the whole shift in the last step, Eq. (5.3)."""

    def shift_costs(self, horizons: np.ndarray) -> np.ndarray:
        return (1 - self.step_size * self.l2) ** (2 * horizons) * (self.distance / self.step_size) ** 2


def setting(radius: float, num_steps: int, l2: float = 0.0, kind: type[ProjectedSGD] = ProjectedSGD) -> ProjectedSGD:
    return kind(
        num_examples=NUM_EXAMPLES, expected_batch_size=BATCH, num_steps=num_steps, noise_multiplier=NOISE,
        diameter=2 * radius, lipschitz=math.sqrt(2), smoothness=0.5, step_size=1 / (0.5 + 2 * l2), l2=l2,
    )  # fmt: skip


def compute(given: Any = None) -> dict[str, Any]:
    """For each radius and bound: epsilon at every number of steps."""
    found = []
    for name, form in (("composition, Renyi", "rdp"), ("composition, PLD", "pld")):
        steps = [t for t in STEPS if form == "rdp" or t <= PLAIN_PLD_LIMIT]
        curve = [last_iterate_epsilon(setting(FAR, t), DELTA, form=form).composition for t in steps]  # type: ignore[arg-type]
        found.append({"bound": name, "radius": None, "l2": 0.0, "steps": steps, "epsilons": curve})
    bounds = (
        ("Eq. (3.6), Renyi", ProjectedSGD, "rdp", 0.0),
        ("trade-off functions (PLD)", ProjectedSGD, "pld", 0.0),
        ("Eq. (5.3), Renyi", LastShift, "rdp", L2),
        ("strongly convex, cheapest shifts, Renyi", ProjectedSGD, "rdp", L2),
        ("strongly convex, cheapest shifts, PLD", ProjectedSGD, "pld", L2),
    )
    for radius in RADII:
        for name, kind, form, l2 in bounds:
            bounded: list[float] = []
            for t in STEPS:
                settled = len(bounded) > 3 and abs(bounded[-1] / bounded[-4] - 1) < 1e-4  # further steps are free
                run = setting(radius, t, l2, kind)
                bounded.append(bounded[-1] if settled else last_iterate_epsilon(run, DELTA, form=form).epsilon)  # type: ignore[arg-type]
            found.append({"bound": name, "radius": radius, "l2": l2, "steps": STEPS, "epsilons": bounded})
    plateaus = {str(radius): plateau(setting(radius, 1), DELTA) for radius in RADII}
    about = {k: v for k, v in dataclasses.asdict(setting(1.0, 1)).items() if k not in ("diameter", "num_steps")}
    return {"setting": about, "delta": DELTA, "free_after": plateaus, "curves": found}


def plot(numbers: dict[str, Any], path: Any) -> None:
    """Logarithmic axes; a panel for each radius."""
    figure, axes = panels(len(RADII), width=5.0, height=4.2)
    for axis, radius in zip(axes, RADII, strict=True):
        mine = [curve for curve in numbers["curves"] if curve["radius"] in (None, radius)]
        for i, curve in enumerate(mine):
            axis.plot(
                curve["steps"], curve["epsilons"], color=f"C{i}", label=curve["bound"],
                linestyle="--" if curve["radius"] is None else "-",
            )  # fmt: skip
        axis.axvline(numbers["free_after"][str(radius)], color="k", linewidth=0.7, linestyle=":")
        axis.set(
            xscale="log", yscale="log", xlabel="steps", ylabel=f"epsilon at delta {numbers['delta']:g}",
            title=f"weights in a ball of radius {radius:g}", ylim=(None, 100),
        )  # fmt: skip
        axis.legend(fontsize=7)
    save(figure, path)


main = experiment("convergent_figure1", compute, plot)

if __name__ == "__main__":
    main()
