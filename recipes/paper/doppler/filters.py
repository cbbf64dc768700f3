"""Filters compared: those of the paper's Figure 8, designs by specification, and one that adapts, at one budget.

Every filter has a learning rate of its own, found on a seed that is not reported. DP-AdamBC has the filter in place of
its first moment; ``plain`` is its own ``momentum``, ``none`` is no first moment at all.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.signal

from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from recipes.paper.doppler.spectrum import frequency_response
from recipes.paper.doppler.task import Size
from recipes.paper.doppler.training import COLORS, NAMES, OPTIONS, PLAIN, Runs, gain
from recipes.paper.runs import draw_bars, experiment, panels, percent, save

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


def compute(given: argparse.Namespace) -> dict[str, Any]:
    runs, cells = Runs(given, Size()), []
    for optimizer in given.optimizers:
        plain = runs.cell(optimizer, PLAIN, given.epsilon)
        for name in FILTERS[optimizer]:
            cell = runs.cell(optimizer, name, given.epsilon)
            found = gain(cell, plain)
            measured = {"gain": found["gain"], "gain_error": found["error"]}
            cells.append({**cell, **measured, **noise_ratios(name, given.num_steps)})
    return {"cells": cells}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Accuracies by filter, the noise on a quadratic; and the responses of the filters in a picture of their own."""
    cells = numbers["cells"]
    optimizers = list(dict.fromkeys(cell["optimizer"] for cell in cells))
    figure, (*axes, quadratic) = panels(len(optimizers) + 1, width=5.4, height=5.0)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        mine = [cell for cell in cells if cell["optimizer"] == optimizer]
        accuracies = [percent(cell["accuracies"]) for cell in mine]
        labels = [f"{cell['filter']}  (rate {cell['rate']:g})" for cell in mine]
        draw_bars(axis, labels, accuracies, [COLORS[optimizer]] * len(mine))
        axis.axvline(np.mean(accuracies[0]), color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel="test accuracy, %", title=f"{NAMES[optimizer]}, epsilon {mine[0]['epsilon']:g}")
    etas = np.geomspace(1e-3, 1.9, 200)
    for name, style in zip(FIXED, STYLES, strict=False):
        ratios = [stationary_ratio(LowPassFilter.parse(name), eta) for eta in etas]  # type: ignore[arg-type]
        quadratic.loglog(etas, ratios, label=name, **style)
    quadratic.set(
        xlabel="learning rate x curvature", ylabel="variance of the weights at rest / without a filter",
        title="noise on a quadratic", ylim=(0.05, 20),
    )  # fmt: skip
    quadratic.legend(fontsize=7, loc="lower left")
    save(figure, path)
    plot_responses(path.with_name("doppler_responses.png"))


STYLES = [{"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"} for i in range(20)]


def plot_responses(path: Path) -> None:
    """Gain over frequency, and weights of the gradients of earlier steps; the legend has the noise that passes."""
    figure, (gains, weights) = panels(2, width=6.2, height=5.2)
    frequencies = np.geomspace(1e-3, 1, 600)
    for name, style in zip(("none", *FIXED), STYLES, strict=False):
        low_pass = LowPassFilter.parse(name)
        response = impulse_response(low_pass.b, low_pass.a, 10_000)
        decibels = 20 * np.log10(np.maximum(abs(frequency_response(low_pass, frequencies)), 1e-12))
        noise = np.linalg.norm(response)
        gains.semilogx(frequencies, decibels, label=f"{name} (noise x {noise:.2f})", **style)
        weights.plot(np.arange(40), response[:40], marker=".", markersize=4, **style)
    gains.set(title="gain", xlabel="frequency / Nyquist frequency", ylabel="decibels", ylim=(-60, 6))
    gains.legend(fontsize=8, loc="lower left")
    # the whole weight that `none` gives to the present gradient would hide the rest
    weights.set(title="weight of a gradient", xlabel="steps ago", ylabel="weight", ylim=(None, 0.5))
    save(figure, path)


main = experiment("doppler_filters", compute, plot, **OPTIONS, num_seeds=3, epsilon=2.0, optimizers=tuple(FILTERS))

if __name__ == "__main__":
    main()
