"""Power spectral density of the released gradients of a real run, before and after the filter, and what that gains.

Two runs of DPSGD, without a filter and with ``first_order_v1``. The data are public, so the gradient before the noise
is recorded, too: the signal need not be guessed. D = recorded coordinates, T = steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.postprocess.low_pass import PRESETS, LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from recipes.paper.doppler.spectrum import equation_4, power_ratio, power_spectral_density
from recipes.paper.doppler.task import Size, read_data
from recipes.paper.doppler.training import OPTIONS, PLAIN, Run, train
from recipes.paper.runs import experiment, panels, save

FILTER = "first_order_v1"
STAGES = ("signal", "released", "filtered")
NUM_COORDINATES = 8192
DESIGNS = ("butterworth:2:0.1", "chebyshev:2:0.1:0.5")


class Recorder:
    """Some coordinates of the gradients of every step, always the same."""

    def __init__(self) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._chosen_D: torch.Tensor | None = None

    def __call__(self, step: int, *stages: dict[str, torch.Tensor]) -> None:
        for name, gradients in zip(STAGES, stages, strict=True):
            flat = torch.cat([gradients[key].flatten() for key in sorted(gradients)])
            if self._chosen_D is None:
                order = np.random.default_rng(0).permutation(len(flat))
                self._chosen_D = torch.tensor(order[:NUM_COORDINATES])
            self._rows.setdefault(name, []).append(flat[self._chosen_D].clone())

    def recorded(self) -> dict[str, torch.Tensor]:
        """Stage -> (T, D)."""
        return {name: torch.stack(rows) for name, rows in self._rows.items()}


def passed_on(low_pass: LowPassFilter, num_steps: int) -> np.ndarray:
    """How much of the gradient of each step has arrived in the weights after `num_steps` of SGD at rate 1; (T,).

    Step s adds ``h_{t-s} / c_t`` of itself in every later step t. Their sum is 1 for all but the last steps, whatever
    the filter: its gain at frequency 0 is 1.
    """
    h = impulse_response(low_pass.b, low_pass.a, num_steps)
    arrived = 1 / np.cumsum(h)
    return np.array([h[: num_steps - s] @ arrived[s:] for s in range(num_steps)])


def analyse(recorded: dict[str, torch.Tensor], noise_variance: float, segment: int) -> dict[str, Any]:
    """Spectra of the stages, and what each filter would gain on that signal and that noise."""
    spectra = {name: power_spectral_density(x, segment) for name, x in recorded.items()}
    frequencies, signal = spectra["signal"]
    noise_TD = (recorded["released"] - recorded["signal"]).double()
    filters = {name: LowPassFilter.preset(name) for name in PRESETS}
    filters |= {name: LowPassFilter.parse(name) for name in DESIGNS}  # type: ignore[misc]
    gains = {}
    for name, low_pass in filters.items():
        arrived_T = torch.tensor(passed_on(low_pass, len(noise_TD)))
        signal_moved, noise_moved = (float((arrived_T @ x).norm()) for x in (recorded["signal"].double(), noise_TD))
        gains[name] = {
            "equation_4": equation_4(low_pass, frequencies, signal),
            "power_ratio": power_ratio(low_pass, frequencies, signal, noise_variance),
            "ratio_of_displacement": (signal_moved / noise_moved) ** 2,
        }
    plain = gains["none"]["ratio_of_displacement"]
    for gain in gains.values():
        gain["ratio_of_displacement"] /= plain
    noise_density = power_spectral_density(noise_TD, segment)[1]
    return {
        "frequencies": frequencies.tolist(),
        "density": {name: density.tolist() for name, (_, density) in spectra.items()},
        "noise_variance": noise_variance,
        "noise_density_over_variance": [float(x) / noise_variance for x in (noise_density.min(), noise_density.max())],
        "snr_of_a_gradient": float(np.trapezoid(signal, frequencies) / noise_variance),
        "snr_of_displacement": plain,
        "signal_below_a_tenth": float(
            np.trapezoid(signal[frequencies <= 0.1], frequencies[frequencies <= 0.1])
            / np.trapezoid(signal, frequencies)
        ),
        "gains": gains,
    }


def compute(given: argparse.Namespace) -> dict[str, Any]:
    data, runs = read_data(given.data, Size()), {}
    for name in (PLAIN, FILTER):
        run = Run(
            optimizer="dp_sgd", filter=name, epsilon=given.epsilon, rate=given.rate, seed=0, num_steps=given.num_steps
        )
        recorder = Recorder()
        result = train(run, data, observe=recorder)
        stddev = result["noise_multiplier"] * run.clipping_norm / run.batch
        runs[name] = {**result, **analyse(recorder.recorded(), stddev**2, given.segment)}
    return {"num_coordinates": NUM_COORDINATES, "runs": runs}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Densities of the filtered run, those of both signals, Eq. 4 by filter, and two ratios of ours."""
    plain, filtered = numbers["runs"][PLAIN], numbers["runs"][FILTER]
    figure, (spectra, signals, predicted, ratios) = panels(4, width=4.6, height=4.2)
    for name, label in (("released", "released"), ("filtered", f"after {FILTER}"), ("signal", "before the noise")):
        spectra.semilogy(filtered["frequencies"], filtered["density"][name], label=label)
    spectra.axhline(filtered["noise_variance"], color="black", linestyle=":", label="variance of the noise")
    spectra.set(ylabel="power of a coordinate", title=f"LP-DPSGD ({FILTER})")
    for run, label in ((plain, "DPSGD"), (filtered, "LP-DPSGD")):
        share = np.array(run["density"]["signal"]) / run["noise_variance"]
        signals.semilogy(run["frequencies"], share, label=label)
    signals.set(ylabel="signal / noise", title="the gradient before the noise")
    names = sorted(plain["gains"], key=lambda name: plain["gains"][name]["power_ratio"])
    bars = (
        (predicted, 0, "equation_4", None),
        (ratios, 0.2, "power_ratio", "power of a filtered gradient"),
        (ratios, -0.2, "ratio_of_displacement", "way from the start"),
    )
    for axis, shift, key, label in bars:
        values = [plain["gains"][name][key] for name in names]
        axis.barh(np.arange(len(names)) + shift, values, height=0.38 if shift else 0.76, label=label)
        axis.set_yticks(range(len(names)), names)
    predicted.axvline(0.5, color="black", linewidth=0.8)
    predicted.set(xlabel="line: no filter", title="normalised SNR, Eq. 4 of the paper")
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set(xlabel="signal / noise relative to no filter", title="ratios of powers (ours)")
    for axis in (spectra, signals):
        axis.set_xlabel("frequency / Nyquist frequency")
    for axis in (spectra, signals):
        axis.legend(fontsize=7)
    ratios.legend(fontsize=7, loc="center right")
    save(figure, path)


main = experiment(
    "doppler_spectra", compute, plot, data=OPTIONS["data"], epsilon=2.0, rate=1.0, num_steps=1024, segment=256
)

if __name__ == "__main__":
    main()
