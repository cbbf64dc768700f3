"""Plots of filters: frequency response, memory, and effect on recorded gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import PRESETS, LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from hf_dpopt.report.figures import pyplot, save_figure
from recipes.paper.doppler.spectrum import frequency_response

LOWEST_GAIN = -60.0  # decibels
LOWEST_FREQUENCY = 1e-3
SHOWN_STEPS = 40
MEMORY_STEPS = 10_000  # over which the power of the noise that passes is added up


def plot_filters(folder: Path, filters: Mapping[str, LowPassFilter | AdaptiveFIR] | None = None) -> list[Path]:
    """Write ``filters.png`` and ``filters.svg``: gain over frequency, and weights of the gradients of earlier steps.

    The legend has the stddev of independent noise after the filter, in units of that before it.

    Args:
        folder: folder of the two files; made if it does not exist.
        filters: label -> filter; None for all presets.

    Raises:
        DPConfigError: if matplotlib is not installed.
    """
    plt = pyplot()
    filters = {name: LowPassFilter.preset(name) for name in PRESETS} if filters is None else filters
    figure, (gain, weights) = plt.subplots(1, 2, figsize=(12.5, 5.2))
    frequencies, largest = np.geomspace(LOWEST_FREQUENCY, 1, 600), 0.0
    for i, (label, low_pass) in enumerate(filters.items()):
        style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"}
        response = impulse_response(low_pass.b, low_pass.a, MEMORY_STEPS)
        noise = float(np.sqrt((response**2).sum()))
        decibels = 20 * np.log10(np.maximum(abs(frequency_response(low_pass, frequencies)), 1e-12))
        gain.semilogx(frequencies, decibels, label=f"{label} (noise x {noise:.2f})", **style)
        largest = max(largest, float(response[1:].max()))
        weights.plot(np.arange(SHOWN_STEPS), response[:SHOWN_STEPS], marker=".", markersize=4, **style)
    gain.set(
        title="gain", xlabel="frequency / Nyquist frequency", ylabel="decibels", ylim=(LOWEST_GAIN, 6),
        xlim=(LOWEST_FREQUENCY, 1),
    )  # fmt: skip
    gain.legend(fontsize=8, loc="lower left")
    weights.set(title="weight of a gradient", xlabel="steps ago", ylabel="weight")
    if largest > 0:
        weights.set_ylim(
            top=1.1 * largest
        )  # the whole weight that `none` gives to the present one would hide the rest
    figure.tight_layout()
    return save_figure(figure, folder, "filters")
