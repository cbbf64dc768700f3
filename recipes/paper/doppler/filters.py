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

from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from recipes.paper.doppler.spectrum import frequency_response
from recipes.paper.doppler.task import Size
from recipes.paper.doppler.training import COLORS, NAMES, OPTIONS, PLAIN, Runs, gain
from recipes.paper.runs import draw_bars, experiment, panels, percent, save

DESIGNS = ("butterworth:2:0.1", "chebyshev:2:0.1:0.5")
ADAPTIVE = "adaptive:8"
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


def noise_ratios(name: str, num_steps: int) -> dict[str, Any]:
    """Noise with the filter relative to that without: stddev in a gradient and in the weights."""
    if name in (PLAIN, ADAPTIVE):
        return {}
    low_pass = LowPassFilter.parse(name)
    assert isinstance(low_pass, LowPassFilter)
    in_weights = passed_on(low_pass, num_steps)
    return {
        "noise_in_gradient": float(np.linalg.norm(impulse_response(low_pass.b, low_pass.a, 10_000))),
        "noise_in_weights": float(np.linalg.norm(in_weights) / math.sqrt(num_steps)),
        "signal_in_weights": float(in_weights.mean()),
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
    """Accuracies by filter; and the responses of the filters in a picture of their own."""
    cells = numbers["cells"]
    optimizers = list(dict.fromkeys(cell["optimizer"] for cell in cells))
    figure, axes = panels(len(optimizers), width=5.4, height=5.0)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        mine = [cell for cell in cells if cell["optimizer"] == optimizer]
        accuracies = [percent(cell["accuracies"]) for cell in mine]
        labels = [f"{cell['filter']}  (rate {cell['rate']:g})" for cell in mine]
        draw_bars(axis, labels, accuracies, [COLORS[optimizer]] * len(mine))
        axis.axvline(np.mean(accuracies[0]), color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel="test accuracy, %", title=f"{NAMES[optimizer]}, epsilon {mine[0]['epsilon']:g}")
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
