"""`AdaptiveFIR`: the formula, computed slowly over the whole recording, and what it is for."""

from __future__ import annotations

import json
import secrets

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.recursion import start_up_gain
from tests.contract import postprocess as contract
from tests.reference.low_pass import adaptive_fir, adaptive_fir_as_printed, is_usable


@pytest.fixture(autouse=True)
def _any_seed():
    torch.manual_seed(secrets.randbits(63))


class NoiseOf:
    """The noise level of a covariance over the steps, (T, T), after as many releases as `step` says."""

    def __init__(self, covariance: np.ndarray):
        self.matrix, self.step = covariance, 0

    def variance(self) -> float:
        return float(self.matrix[self.step - 1, self.step - 1])

    def covariance(self, lag: int) -> float:
        assert 1 <= lag < self.step, "asked for the noise of a release that was not"
        return float(self.matrix[self.step - 1, self.step - 1 - lag])


def correlated(num_steps: int, stddev: float) -> np.ndarray:
    """``B B^T`` of noise that is partly taken back two steps long, louder in later steps."""
    noising = np.eye(num_steps) - 0.5 * np.eye(num_steps, k=-1) - 0.2 * np.eye(num_steps, k=-2)
    noising *= np.linspace(0.8, 1.2, num_steps)[:, None]
    return stddev**2 * noising @ noising.T


def independent(num_steps: int, stddev: float) -> np.ndarray:
    return stddev**2 * np.eye(num_steps)


def recordings(covariance: np.ndarray, d: int, memory: float) -> torch.Tensor:
    """A gradient of unit variance, its correlation `memory` from one step to the next, under that noise; (T, d)."""
    num_steps = len(covariance)
    signal, x = [], torch.randn(d, dtype=torch.float64)
    for _ in range(num_steps):
        x = memory * x + (1 - memory**2) ** 0.5 * torch.randn(d, dtype=torch.float64)
        signal.append(x)
    noise = torch.tensor(np.linalg.cholesky(covariance)) @ torch.randn(num_steps, d, dtype=torch.float64)
    return torch.stack(signal) + noise


def run(low_pass: AdaptiveFIR, recorded: torch.Tensor) -> tuple[torch.Tensor, list[tuple[float, ...]]]:
    """Outputs and weights of every step; the coordinates are spread over two tensors."""
    outputs, weights = [], []
    for g in recorded:
        if isinstance(low_pass.noise, NoiseOf):
            low_pass.noise.step += 1
        given = {"b": g[:6].reshape(2, 3).clone(), "a": g[6:].clone()}
        filtered = low_pass.update(given)
        assert torch.equal(given["a"], g[6:])
        outputs.append(torch.cat([filtered["b"].flatten(), filtered["a"]]))
        weights.append(low_pass.b)
    return torch.stack(outputs), weights


@pytest.mark.parametrize("make", [independent, correlated])
@pytest.mark.parametrize("memory", [0.99, 0.9, 0.5])
@pytest.mark.parametrize("taps, refresh_every", [(4, 10), (6, 4), (3, 7)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_equals_the_slow_reference(make, memory, taps, refresh_every, dtype, tolerance):
    covariance = make(50, 0.7)
    recorded = recordings(covariance, 400 if dtype == torch.float64 else 4000, memory).to(dtype)
    low_pass = AdaptiveFIR(taps, NoiseOf(covariance), refresh_every=refresh_every)
    outputs, weights = run(low_pass, recorded)
    wanted, wanted_weights = adaptive_fir(recorded.double().numpy(), covariance, taps, refresh_every)
    np.testing.assert_allclose(weights, wanted_weights, atol=tolerance)
    np.testing.assert_allclose(outputs.numpy(), wanted, atol=tolerance)
    if memory == 0.99:
        assert not np.allclose(wanted_weights[-1], np.eye(taps)[0]), "it never adapted: the test compares nothing"


def test_a_gradient_that_stays_is_averaged_whatever_the_noise():
    """Weights of a constant gradient are 1/taps. Their stddev here is about 0.002: 20 of them are allowed for.

    Whoever takes the noise for independent sees half of the signal gone at lag 1, and finds weight 0 there.
    """
    num_steps, d, taps = 50, 40_000, 4
    covariance = np.eye(num_steps) - 0.5 * (np.eye(num_steps, k=1) + np.eye(num_steps, k=-1)) * 0.999
    recorded = recordings(covariance, d, 1.0)
    low_pass = AdaptiveFIR(taps, NoiseOf(covariance), refresh_every=num_steps)
    run(low_pass, recorded)
    assert np.allclose(low_pass.b, 1 / taps, atol=0.04)
    ignorant = AdaptiveFIR(taps, IndependentNoise(1.0), refresh_every=num_steps)
    run(ignorant, recorded)
    assert abs(ignorant.b[1]) < 0.04


@pytest.mark.parametrize("make", [independent, correlated])
@pytest.mark.parametrize("memory", [0.99, 0.3, -0.9])
@pytest.mark.parametrize("taps, refresh_every", [(4, 10), (6, 4), (3, 7)])
def test_as_printed_equals_the_printed_formula_and_takes_every_weight(make, memory, taps, refresh_every):
    """Noise of one variance, which may be correlated: the paper's formula does not ask. A signal that turns included."""
    covariance = make(50, 0.7)
    covariance *= 0.49 / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    recorded = recordings(covariance, 400, memory)
    low_pass = AdaptiveFIR(taps, NoiseOf(covariance), refresh_every=refresh_every, as_printed=True)
    outputs, weights = run(low_pass, recorded)
    wanted, wanted_weights = adaptive_fir_as_printed(recorded.numpy(), 0.49, taps, refresh_every)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(outputs.numpy(), wanted, rtol=1e-6, atol=1e-7)
    assert len(set(weights)) > 2, "it never adapted: the test compares nothing"


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("as_printed", [False, True])
def test_keeps_the_contract_of_filters(check, as_printed):
    check(lambda: AdaptiveFIR(2, IndependentNoise(0.3), refresh_every=3, as_printed=as_printed))


def test_weights_that_fail_a_check_are_not_taken():
    quiet, d = IndependentNoise(0.0), 50
    low_pass = AdaptiveFIR(3, quiet, refresh_every=10)
    turning = torch.ones(10, d, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(5)[:, None]
    run(low_pass, turning)  # c = (1/2, -3/2, 1/2)
    assert low_pass.b == (1.0, 0.0, 0.0)
    run(low_pass, torch.ones(20, d, dtype=torch.float64))
    assert low_pass.b == pytest.approx([1 / 3] * 3)
    run(low_pass, torch.cat([turning, turning]))
    assert low_pass.b == pytest.approx([1 / 3] * 3)
    run(low_pass, torch.full((20, d), float("inf"), dtype=torch.float64))
    assert low_pass.b == pytest.approx([1 / 3] * 3)


def test_no_step_gets_louder_noise():
    """Recordings at all correlations; the check of the class and that of the reference agree."""
    taken = set()
    for memory in np.linspace(0.6, 1.0, 30):
        covariance = independent(30, 0.5)
        low_pass = AdaptiveFIR(5, NoiseOf(covariance), refresh_every=30)
        run(low_pass, recordings(covariance, 200, memory))
        assert is_usable(np.array(low_pass.b))
        assert start_up_gain(low_pass.b) == pytest.approx(1)
        taken.add(low_pass.b)
    assert len(taken) > 5


def test_parameters_and_states():
    noise = IndependentNoise(0.1)
    for options in ({}, {"as_printed": True}):
        low_pass = AdaptiveFIR(5, noise, refresh_every=9, **options)
        parameters = json.loads(json.dumps(low_pass.parameters()))
        again = AdaptiveFIR(noise=noise, **parameters)
        assert again.parameters() == low_pass.parameters() and again.noise is noise
        assert again.as_printed == ("as_printed" in options)
    with pytest.raises(DPConfigError, match="taps=5.*taps=6.*Continue with the filter"):
        AdaptiveFIR(6, noise, refresh_every=9).load_state_dict(low_pass.state_dict())


@pytest.mark.parametrize("options, message", [
    ({"taps": 0}, "an integer >= 2"),
    ({"taps": 1}, "Use 2 or more"),
    ({"taps": 2.5}, "an integer >= 2"),
    ({"taps": 4, "refresh_every": 0}, "refresh_every=0"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises(DPConfigError, match=message):
        AdaptiveFIR(noise=IndependentNoise(0.0), **options)
