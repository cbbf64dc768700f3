"""What filters do over frequency: against their impulse responses, and on noise of a known law."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import PRESETS, LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from tests.reference.spectrum import equation_4, frequency_response, power_ratio, power_spectral_density

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reproductions"


@pytest.fixture(autouse=True)
def _any_seed():
    torch.manual_seed(secrets.randbits(63))


@pytest.mark.parametrize("name", PRESETS)
def test_frequency_response_is_the_transform_of_the_impulse_response(name):
    low_pass = LowPassFilter.preset(name)
    frequencies = np.array([0.7, 0.0, 0.013, 1.0])
    lags = np.arange(2000)
    wanted = np.exp(-1j * np.pi * np.outer(frequencies, lags)) @ impulse_response(low_pass.b, low_pass.a, 2000)
    np.testing.assert_allclose(frequency_response(low_pass, frequencies), wanted, atol=1e-12)


def test_frequency_response_of_an_adaptive_filter_is_that_of_its_weights():
    low_pass = AdaptiveFIR(4, IndependentNoise(0.0), refresh_every=8)
    for _ in range(8):
        low_pass({"w": torch.ones(10)})
    np.testing.assert_allclose(abs(frequency_response(low_pass, np.array([0.0, 0.5, 1.0]))), [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("segment", [64, 255])
def test_density_of_white_noise_is_its_variance(segment):
    """15 overlapping segments or more of 400 coordinates: the stddev of a bin is below 2%, and 12% is allowed for."""
    frequencies, density = power_spectral_density(0.5 * torch.randn(2048, 400), segment)
    assert frequencies[0] == 0 and len(frequencies) == segment // 2 + 1
    assert frequencies[-1] == pytest.approx(1 if segment % 2 == 0 else 1 - 1 / segment)
    np.testing.assert_allclose(density, 0.25, rtol=0.12)


@pytest.mark.parametrize("name", PRESETS)
def test_equation_4_is_the_sum_over_lags(name):
    """An autoregressive signal, whose autocorrelation is ``r^tau``; the sum of Eq. 4 lag by lag."""
    low_pass, frequencies = LowPassFilter.preset(name), np.linspace(0, 1, 20_001)
    response = impulse_response(low_pass.b, low_pass.a, 2000)
    for r in (-0.3, 0.0, 0.6, 0.99):
        density = 1 / abs(1 - r * np.exp(-1j * np.pi * frequencies)) ** 2
        total, squares = 0.0, 0.0
        for lag, weight in enumerate(response):
            total += weight * (r**lag - 0.5)
            squares += weight**2
        assert equation_4(low_pass, frequencies, density) == pytest.approx(total / squares, rel=1e-4, abs=1e-4)


def test_equation_4_on_the_recorded_spectra():
    """Against four values that another hand computed from the printed formula, on the same spectra."""
    run = json.loads((DOCS / "doppler_spectra.json").read_text())["runs"]["plain"]
    wanted = {"none": 0.50, "momentum": -7.2, "first_order_v1": -4.4, "second_order": -4.6}
    for name, value in wanted.items():
        args = LowPassFilter.preset(name), np.array(run["frequencies"]), np.array(run["density"]["signal"])
        assert equation_4(*args) == pytest.approx(value, abs=0.051), name
        assert run["gains"][name]["equation_4"] == pytest.approx(equation_4(*args)), name


def test_power_ratio():
    """A constant gradient under independent noise gains ``1 / sum h^2``; noise like the signal cannot be told from it."""
    frequencies = np.linspace(0, 1, 20_001)
    constant = np.zeros_like(frequencies)
    constant[0] = 1.0
    for name in PRESETS:
        low_pass = LowPassFilter.preset(name)
        gained = power_ratio(low_pass, frequencies, constant, 0.3)
        assert gained == pytest.approx(1 / (impulse_response(low_pass.b, low_pass.a, 3000) ** 2).sum(), rel=1e-6)
        like_signal = np.exp(-5 * frequencies)
        assert power_ratio(low_pass, frequencies, like_signal, 7 * like_signal) == pytest.approx(1)
    fast = np.where(frequencies > 0.5, 1.0, 0.0)
    assert power_ratio(LowPassFilter.preset("second_order"), frequencies, fast, 1.0) < 0.01
