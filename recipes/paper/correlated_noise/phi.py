"""The damping of nu-DP-FTRL: predicted error phi(nu) in the paper's CIFAR setting, and where it is least.

2000 steps, 20 epochs of 100 steps, clip and noise multiplier 1. Besides prefix sums, the error of the optimizer that
is used: momentum 0.95, without and with the cooldown to 0.05 of the learning rate over the last 500 steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.noise import (
    NuDPFTRL,
    Participation,
    Workload,
    linear_cooldown,
    momentum_workload,
    optimize_nu,
    prefix_sum_workload,
)
from recipes.paper.runs import experiment, panels, save

N, EPOCHS = 2000, 20
NUS = [0.0, 1e-4, 10**-3.4, 1e-3, 10**-2.6, 10**-2.4, 1e-2, 10**-1.5, 0.1, 1.0]


def settings() -> dict[str, tuple[Participation, Workload]]:
    epochs = Participation(EPOCHS, N // EPOCHS)
    return {
        "prefix_sums": (epochs, prefix_sum_workload(N)),
        "prefix_sums_one_epoch": (Participation(), prefix_sum_workload(N)),
        "momentum": (epochs, momentum_workload(N, 0.95)),
        "momentum_and_cooldown": (epochs, momentum_workload(N, 0.95, linear_cooldown(N, 500))),
    }


def compute(given: Any = None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "nus": NUS,
        "sensitivity": [NuDPFTRL(nu).sensitivity(N, Participation(EPOCHS, N // EPOCHS)) for nu in NUS],
    }
    for name, (participation, workload) in settings().items():
        losses = [NuDPFTRL(nu).mean_loss(N, participation, workload) for nu in NUS]
        best = optimize_nu(N, participation, workload)
        least = best.mean_loss(N, participation, workload)
        result[name] = {"mean_loss": losses, "best_nu": best.nu, "least": least,
                        "least_over_undamped": least / losses[0], "least_over_dp_sgd": least / losses[-1]}  # fmt: skip
    return result


def plot(numbers: dict[str, Any], path: Path) -> None:
    figure, (axis,) = panels(1, width=5.6, height=3.8)
    labels = {
        "prefix_sums": ("prefix sums, 20 epochs", "C1"), "prefix_sums_one_epoch": ("prefix sums, one epoch", "C0"),
        "momentum": ("momentum 0.95", "C2"), "momentum_and_cooldown": ("momentum 0.95, cooldown", "C4"),
    }  # fmt: skip
    positive = np.array(numbers["nus"][1:])
    for name, (label, color) in labels.items():
        row = numbers[name]
        losses = np.array(row["mean_loss"][1:])
        style = "s--" if name == "momentum_and_cooldown" else "o-"  # which lies on the curve without cooldown
        axis.loglog(positive, losses / row["least"], style, color=color, label=label, markersize=3)
        axis.plot([row["best_nu"]], [1.0], "*", color=color, markersize=11)
    axis.set(xlabel=r"damping $\nu$ (1 is DP-SGD; star: minimum)", ylabel=r"predicted error $\phi(\nu)$ / least")
    axis.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axis.minorticks_off()
    axis.legend()
    save(figure, path)


main = experiment("phi", compute, plot)

if __name__ == "__main__":
    main()
