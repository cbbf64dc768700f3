"""Figure 1: mean estimation, DP-SGD beside the best correlated noise, over the learning rate.

The caption says that correlated noise is orders of magnitude better as the learning rate tends to 0 or 1; the exact
ratio tends to 1 at learning rate 1. Dotted: a lower bound for every correlation, with the rate of Theorem 2.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.correlated_noise import exact
from recipes.paper.runs import experiment, panels, save

ETAS = [1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 0.999]


def compute(given: Any = None) -> dict[str, Any]:
    rows = []
    for eta in ETAS:
        sgd, ftrl = exact.mean_estimation_sgd(eta), exact.mean_estimation_ftrl(eta)
        lower = exact.mean_estimation_lower_bound(eta)
        rows.append({"eta": eta, "sgd": sgd, "ftrl": ftrl, "lower": lower, "ratio": ftrl / sgd})
    return {"rows": rows}


def plot(numbers: dict[str, Any], path: Path) -> None:
    etas = np.concatenate([np.geomspace(1e-4, 0.5, 100), 1 - np.geomspace(0.5, 1e-3, 50)])
    sgd = np.array([exact.mean_estimation_sgd(eta) for eta in etas])
    ftrl = np.array([exact.mean_estimation_ftrl(eta) for eta in etas])
    figure, (errors, ratio) = panels(2)
    errors.loglog(etas, sgd, color="C0", label="DP-SGD")
    errors.loglog(etas, ftrl, color="C1", label=r"$\nu$-DP-FTRL, $\nu = \eta$ (optimal)")
    errors.loglog(etas, exact.mean_estimation_lower_bound(etas), ":", color="black", label="lower bound, Theorem 2.2")
    for key, color in (("sgd", "C0"), ("ftrl", "C1")):
        points = [(row["eta"], row[key]) for row in numbers["rows"]]
        errors.plot(*zip(*points, strict=True), "o", color=color, markersize=4)
    errors.set(xlabel=r"learning rate $\eta$", ylabel=r"stationary error, units of $G^2/2\rho$")
    errors.legend()
    ratio.semilogx(etas, ftrl / sgd, color="C1", label="exact")
    rate = etas * np.log(etas) ** 2
    ratio.semilogx(etas, rate / rate.max(), "--", color="C7", label=r"shape of $\eta\,\log^2(1/\eta)$")
    ratio.axhline(1, color="black", linewidth=0.8)
    ratio.set(xlabel=r"learning rate $\eta$", ylabel="error relative to DP-SGD", ylim=(0, 1.3))
    ratio.legend(loc="upper left")
    save(figure, path)


main = experiment("figure1", compute, plot)

if __name__ == "__main__":
    main()
