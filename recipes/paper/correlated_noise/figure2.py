"""Figure 2: linear regression, simulated and by the exact formula, with the slopes that the paper prints.

Gradient descent on one sample a step, ``x ~ N(0, H)``, with the noise of DP-SGD and of nu-DP-FTRL at ``nu = eta
lambda_min``; 30,000 steps, of which the last two thirds are averaged. Dashed: the least that any correlation leaves;
dotted: a lower bound for it, with the rate of Theorem 2.2. Label noise (Eq. 10), here of variance 1, adds to the error
of every mechanism. The paper does not state its learning rates; ours are 0.02 to 0.16, on which the exact formula has
both slopes that it prints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from hf_dpopt.noise import NuDPFTRL
from recipes.paper.correlated_noise import exact
from recipes.paper.runs import experiment, log_slope, panels, plain_ticks, save

DIMENSIONS = [8, 16, 32, 64, 128]
EXPONENTS = [0.4, 0.6, 0.8, 1.0]
ETAS = [0.02, 0.04, 0.08, 0.16]
D, ETA = 128, 0.02
NUM_STEPS, NUM_RUNS, SEED = 30_000, 8, 0
PAPER = {"sgd_d": 1.00, "sgd_d_eff": 0.18, "nu_d_eff": 0.94, "sgd_eta": 1.27, "nu_eta": 2.03}


def correlated(white: np.ndarray, coefs: np.ndarray) -> np.ndarray:
    """Noise of a Toeplitz strategy, from its draws, both (steps, columns)."""
    size = next_fast_len(2 * len(white), real=True)
    transfer = rfft(coefs.astype(white.dtype), size)[:, None]
    out = np.empty_like(white)
    for first in range(0, white.shape[1], 64):  # a few columns at a time: the spectrum is as large as the noise
        columns = slice(first, first + 64)
        out[:, columns] = irfft(rfft(white[:, columns], size, axis=0) * transfer, size, axis=0)[: len(white)]
    return out


def simulate(
    eigenvalues: np.ndarray, eta: float, *, num_steps: int = NUM_STEPS, num_runs: int = NUM_RUNS, seed: int = SEED
) -> dict[str, tuple[float, float]]:
    """Mean excess loss and its standard error over the runs, for both mechanisms, which meet the same samples."""
    # D = coordinates, R = runs, M = 2 mechanisms
    rng, d, nu = np.random.default_rng(seed), len(eigenvalues), eta * float(eigenvalues.min())
    white = rng.standard_normal((num_steps, num_runs * d), dtype=np.float32)
    noise = [white, np.sqrt(exact.gamma_squared_nu(nu)) * correlated(white, NuDPFTRL(nu).noising_coefs(num_steps))]
    noise_TMRD = np.stack(noise, axis=1).reshape(num_steps, 2, num_runs, d).astype(np.float32)
    lambda_D = eigenvalues.astype(np.float32)
    theta_MRD, total_MR = np.zeros((2, num_runs, d), np.float32), np.zeros((2, num_runs))
    for t in range(num_steps):
        x_RD = rng.standard_normal((num_runs, d), dtype=np.float32) * np.sqrt(lambda_D)
        inner_MR = np.einsum("rd,mrd->mr", x_RD, theta_MRD)
        theta_MRD -= np.float32(eta) * (x_RD * inner_MR[..., None] + noise_TMRD[t])
        if t >= num_steps // 3:
            total_MR += 0.5 * (theta_MRD * theta_MRD) @ lambda_D
    loss_MR = total_MR / (num_steps - num_steps // 3)
    errors_M = loss_MR.std(axis=1, ddof=1) / np.sqrt(num_runs)
    return {name: (float(loss_MR[m].mean()), float(errors_M[m])) for m, name in enumerate(("sgd", "nu"))}


# what is varied -> its label, and the points that vary nothing else
SWEEPS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "d": ("dimension $d$, eigenvalues $1/k$", lambda p: p["exponent"] == 1.0 and p["eta"] == ETA),
    "d_eff": (r"effective dimension, $d = 128$", lambda p: p["d"] == D and p["eta"] == ETA),
    "eta": (r"learning rate $\eta$, $d = 128$", lambda p: p["d"] == D and p["exponent"] == 1.0),
}
FORMULAS: dict[str, Callable[..., float]] = {"sgd": exact.regression_sgd, "nu": exact.regression_nu}


def point(d: int, exponent: float, eta: float) -> dict[str, Any]:
    """Errors of both mechanisms, exact and simulated."""
    eigenvalues = exact.power_law(d, exponent)
    simulated = simulate(eigenvalues, eta)
    found: dict[str, Any] = {"d": d, "exponent": exponent, "eta": eta, "d_eff": float(eigenvalues.sum())}
    for name, formula in FORMULAS.items():
        mean, error = simulated[name]
        linearised = formula(eigenvalues, eta, linearised=True)
        found[name] = {
            "exact": formula(eigenvalues, eta), "simulated": mean, "standard_error": error, "linearised": linearised
        }  # fmt: skip
    best = exact.regression_best(eigenvalues, eta)
    labels = exact.excess_loss(exact.noise_gains_labels(eigenvalues, eta), eigenvalues, eta)
    lower = exact.regression_lower_bound(eigenvalues, eta)
    return found | {"best": best, "nu_over_best": found["nu"]["exact"] / best, "lower": lower, "label_noise": labels}


def compute(given: Any = None) -> dict[str, Any]:
    settings = {(d, 1.0, ETA) for d in DIMENSIONS} | {(D, a, ETA) for a in EXPONENTS} | {(D, 1.0, eta) for eta in ETAS}
    points = [point(*setting) for setting in sorted(settings)]
    slopes: dict[str, dict[str, float | None]] = {}
    for along, (_, chosen) in SWEEPS.items():
        sweep = [p for p in points if chosen(p)]
        for name in FORMULAS:
            fitted = {
                how: float(log_slope([p[along] for p in sweep], [p[name][how] for p in sweep]))
                for how in ("exact", "simulated", "linearised")
            }
            slopes[f"{name}_{along}"] = {"paper": PAPER.get(f"{name}_{along}"), **fitted}
    off = [p[name]["simulated"] / p[name]["exact"] - 1 for p in points for name in FORMULAS]
    return {
        "num_steps": NUM_STEPS, "num_runs": NUM_RUNS, "seed": SEED, "slopes": slopes,
        "largest_relative_difference": max(map(abs, off)), "points": points,
    }  # fmt: skip


def plot(numbers: dict[str, Any], path: Path) -> None:
    figure, axes = panels(3, width=3.7)
    for axis, (along, (label, chosen)) in zip(axes, SWEEPS.items(), strict=True):
        sweep = sorted((p for p in numbers["points"] if chosen(p)), key=lambda p: p[along])
        xs = [p[along] for p in sweep]
        for name, color, mechanism in (("sgd", "C0", "DP-SGD"), ("nu", "C1", r"$\nu$-DP-FTRL")):
            found = [p[name] for p in sweep]
            slope = numbers["slopes"][f"{name}_{along}"]["exact"]
            axis.loglog(xs, [x["exact"] for x in found], color=color, label=f"{mechanism}: slope {slope:.2f}")
            means, errors = [x["simulated"] for x in found], [2 * x["standard_error"] for x in found]
            axis.errorbar(xs, means, errors, fmt="o", color=color, markersize=4, capsize=2)
        axis.loglog(xs, [p["best"] for p in sweep], "--", color="black", linewidth=1, label="best correlation")
        axis.loglog(xs, [p["lower"] for p in sweep], ":", color="black", linewidth=1, label="lower bound")
        axis.set_xlabel(label)
        plain_ticks(axis, [round(x, 2) if along == "eta" else round(x) for x in xs])
        axis.legend(fontsize=8)
    figure.suptitle("lines: exact formula, with its slope; points: simulated, two standard errors", fontsize=9)
    axes[0].set_ylabel(r"excess loss, units of $G^2/2\rho$")
    save(figure, path)


main = experiment("figure2", compute, plot)

if __name__ == "__main__":
    main()
