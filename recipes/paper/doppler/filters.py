"""Filters compared: those of the paper's Figure 8, designs by specification, and one that adapts, at one budget.

Every filter has a learning rate of its own, found on a seed that is not reported. DP-AdamBC has the filter in place of
its first moment; ``plain`` is its own ``momentum``, ``none`` is no first moment at all.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.signal

from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from recipes.paper.correlated_noise.output import panels, save
from recipes.paper.doppler import output
from recipes.paper.doppler.filter_plots import plot_filters
from recipes.paper.doppler.task import Size, read_data
from recipes.paper.doppler.training import PLAIN, START_RATES, Run, Runs, mean_and_error

DESIGNS = ("butterworth:2:0.1", "chebyshev:2:0.1:0.5")
ADAPTIVE = "adaptive:8"
ETAS = (0.01, 0.1, 0.3, 1.0, 1.5)  # learning rate x curvature
FILTERS = {
    "dp_sgd": (
        PLAIN, "momentum", "first_order_v1", "first_order_v2", "second_order", "f1", "f2", "f3", "f4", "f5", "f6",
        *DESIGNS, ADAPTIVE,
    ),
    "dp_adam_bc": (PLAIN, "none", "first_order_v1", "first_order_v2", "second_order", "f4", *DESIGNS, ADAPTIVE),
}  # fmt: skip
FIXED = tuple(name for name in FILTERS["dp_sgd"] if name not in (PLAIN, ADAPTIVE))


def passed_on(low_pass: LowPassFilter, num_steps: int) -> np.ndarray:
    """How much of the gradient of each step has arrived in the weights after `num_steps` of SGD at rate 1; (T,).

    Step s adds ``h_{t-s} / c_t`` of itself in every later step t. Their sum is 1 for all but the last steps, whatever
    the filter: its gain at frequency 0 is 1.
    """
    h = impulse_response(low_pass.b, low_pass.a, num_steps)
    arrived = 1 / np.cumsum(h)
    return np.array([h[: num_steps - s] @ arrived[s:] for s in range(num_steps)])


def stationary_variance(low_pass: LowPassFilter, eta: float) -> float:
    """Of the iterates of ``w -= eta m``, m the filtered ``w + z``, z white noise of variance 1; inf if they diverge.

    A quadratic of curvature k at learning rate r has ``eta = r k``. Without a filter it is ``eta / (2 - eta)``.
    """
    b, a = np.array(low_pass.b), np.array([1.0, *low_pass.a])
    size = max(len(b), len(a))
    b, a = np.pad(b, (0, size - len(b))), np.pad(a, (0, size - len(a)))
    denominator = np.convolve([1.0, -1.0], a)  # of the closed loop, (z - 1) A + eta B
    denominator[1:] += eta * b
    transition, noise, output_row, _ = scipy.signal.tf2ss(eta * b, denominator)  # b lags by the step that it moves
    if np.abs(np.linalg.eigvals(transition)).max() >= 1:
        return math.inf
    covariance = scipy.linalg.solve_discrete_lyapunov(transition, noise @ noise.T)
    return float((output_row @ covariance @ output_row.T)[0, 0])


def stationary_ratio(low_pass: LowPassFilter, eta: float) -> float:
    """The variance with the filter relative to that without."""
    return stationary_variance(low_pass, eta) * (2 - eta) / eta


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def noise_ratios(name: str, num_steps: int) -> dict[str, Any]:
    """Noise with the filter relative to that without: stddev in a gradient and in the weights, variance at rest."""
    if name in (PLAIN, ADAPTIVE):
        return {}
    low_pass = LowPassFilter.parse(name)
    assert isinstance(low_pass, LowPassFilter)
    in_weights = passed_on(low_pass, num_steps)
    return {
        "noise_in_gradient": float(np.linalg.norm(impulse_response(low_pass.b, low_pass.a, 10_000))),
        "noise_in_weights": float(np.linalg.norm(in_weights) / math.sqrt(num_steps)),
        "signal_in_weights": float(in_weights.mean()),
        "stationary_variance": {f"{eta:g}": _finite(stationary_ratio(low_pass, eta)) for eta in ETAS},
    }


def compute(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = Runs(arguments.output_dir / "doppler_runs.jsonl", read_data(arguments.data, Size()))
    cells = []
    for optimizer in arguments.optimizers:
        plain: list[float] = []
        for name in FILTERS[optimizer]:
            run = Run(
                optimizer=optimizer, filter=name, epsilon=arguments.epsilon, rate=0.0, seed=0,
                num_steps=arguments.num_steps,
            )  # fmt: skip
            cell = runs.cell(run, arguments.num_seeds, START_RATES[optimizer])
            plain = plain or cell["accuracies"]
            pairs = zip(cell["accuracies"], plain, strict=True)
            gain, error = mean_and_error([100 * (filtered - without) for filtered, without in pairs])
            cells.append({**cell, "gain": gain, "gain_error": error, **noise_ratios(name, arguments.num_steps)})
    return {"cells": cells}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """One bar per filter, and a dot per seed; the rate that was chosen beside it."""
    cells = numbers["cells"]
    optimizers = list(dict.fromkeys(cell["optimizer"] for cell in cells))
    figure, (*axes, quadratic) = panels(len(optimizers) + 1, width=5.4, height=5.0)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        mine = [cell for cell in cells if cell["optimizer"] == optimizer][::-1]
        accuracies = 100 * np.array([cell["accuracies"] for cell in mine])
        positions = np.arange(len(mine))
        spread = accuracies.std(axis=1, ddof=1)
        axis.barh(
            positions, accuracies.mean(axis=1), xerr=spread, capsize=3, height=0.7, color=output.COLORS[optimizer],
            alpha=0.6, error_kw={"elinewidth": 1},
        )  # fmt: skip
        for seed in range(accuracies.shape[1]):
            axis.plot(accuracies[:, seed], positions, "k.", markersize=3)
        axis.axvline(accuracies[-1].mean(), color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(positions, [f"{cell['filter']}  (rate {cell['rate']:g})" for cell in mine])
        low, high = accuracies.min(), accuracies.max()
        axis.set(
            xlabel="test accuracy, %", xlim=(low - 0.35 * (high - low) - 0.5, high + 0.5),
            title=f"{output.NAMES[optimizer]}, epsilon {mine[0]['epsilon']:g}",
        )  # fmt: skip
        axis.grid(axis="y", visible=False)
    etas = np.geomspace(1e-3, 1.9, 200)
    for i, name in enumerate(FIXED):
        ratios = [stationary_ratio(LowPassFilter.parse(name), eta) for eta in etas]  # type: ignore[arg-type]
        quadratic.loglog(etas, ratios, color=f"C{i % 10}", linestyle="-" if i < 10 else "--", label=name)
    quadratic.set(
        xlabel="learning rate x curvature", ylabel="variance of the weights at rest / without a filter",
        title="noise on a quadratic", ylim=(0.05, 20),
    )  # fmt: skip
    quadratic.legend(fontsize=7, loc="lower left")
    save(figure, path)


def plot_responses(path: Path) -> None:
    """Frequency and impulse responses of the filters with fixed coefficients."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = plot_filters(Path(folder), {name: LowPassFilter.parse(name) for name in ("none", *FIXED)})
        shutil.copyfile(next(picture for picture in pictures if picture.suffix == ".png"), path)


def main() -> None:
    parser = output.parser("filters", __doc__)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=list(FILTERS), choices=list(FILTERS))
    arguments = parser.parse_args()
    numbers = output.write("filters", arguments, lambda: compute(arguments))
    for cell in numbers["cells"]:
        print(
            f"{cell['optimizer']:10} {cell['filter']:20} rate {cell['rate']:<7g} "
            f"{100 * np.mean(cell['accuracies']):.1f} %, {cell['gain']:+.1f} +- {cell['gain_error']:.1f}"
        )
    plot(numbers, arguments.output_dir / "doppler_filters.png")
    plot_responses(arguments.output_dir / "doppler_responses.png")


if __name__ == "__main__":
    main()
