"""Figure 3: the bound for smooth and strongly convex losses over the condition number, by the convex program.

Twice: with the multipliers that hold for every such loss, and with those that hold if the loss is symmetric around its
minimum, which are the ones that the paper's program has as we read it. All curves bound ``(L / 2) E |theta|^2``. The
program is not tight for DP-SGD, whose steps contract: that gives a smaller one, which a quadratic attains.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hf_dpopt.noise import IdentityStrategy, NuDPFTRL
from recipes.paper.correlated_noise.strongly_convex import optimize_strongly_convex, strongly_convex_bound
from recipes.paper.runs import experiment, panels, plain_ticks, save

ETA, L = 0.3, 1.0
KAPPAS = [2, 5, 10, 20, 50, 100, 200]
LAGS = [15, 40, 80]


def bounds(kappa: float, *, symmetric: bool, tau_max: int = 15, optimise: bool = True) -> dict[str, Any]:
    options: dict[str, Any] = {"mu": L / kappa, "L": L, "eta": ETA, "symmetric": symmetric, "tau_max": tau_max}
    began = time.perf_counter()
    row = {
        "kappa": kappa, "tau_max": tau_max,
        "sgd": strongly_convex_bound(IdentityStrategy(), **options).value,
        "nu": strongly_convex_bound(NuDPFTRL(ETA * L / kappa), **options).value,
        "sgd_by_contraction": ETA * L / (2 * (L / kappa) * (2 - ETA * L / kappa)),
    }  # fmt: skip
    if optimise:
        found = optimize_strongly_convex(**options)
        row |= {"optimised": found.bound, "history": list(found.history)}
        row["optimised_cut_to_1024_coefficients"] = strongly_convex_bound(found.strategy, **options).value
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def compute(given: Any = None) -> dict[str, Any]:
    result: dict[str, Any] = {"eta": ETA, "L": L, "units": "d G^2 / (2 rho)"}
    for name, symmetric in (("every_loss", False), ("symmetric_losses", True)):
        result[name] = [bounds(kappa, symmetric=symmetric) for kappa in KAPPAS]
        result[f"{name}_by_tau_max"] = [
            bounds(kappa, symmetric=symmetric, tau_max=lags, optimise=False) for kappa in (10, 50) for lags in LAGS
        ]
    return result


def plot(numbers: dict[str, Any], path: Path) -> None:
    figure, axes = panels(2, width=4.4)
    titles = {
        "every_loss": "every smooth, strongly convex loss",
        "symmetric_losses": "losses symmetric around the minimum",
    }
    curves = [
        ("sgd", "C0o-", "DP-SGD, program"), ("sgd_by_contraction", "C0:", "DP-SGD, by contraction (tight)"),
        ("nu", "C1o-", r"$\nu$-DP-FTRL, $\nu = \eta\mu$"), ("optimised", "C2s--", "optimised"),
    ]  # fmt: skip
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        rows = numbers[name]
        for key, style, label in curves:
            xs = [row["kappa"] for row in rows]
            axis.loglog(xs, [row[key] for row in rows], style, label=label, markersize=4)
        axis.set(title=title, xlabel=r"condition number $L/\mu$", ylim=(0.06, 200))
        plain_ticks(axis, KAPPAS)
        axis.legend(fontsize=8)
    axes[0].set_ylabel(r"bound on the excess loss, units of $dG^2/2\rho$")
    save(figure, path)


main = experiment("figure3", compute, plot)

if __name__ == "__main__":
    main()
