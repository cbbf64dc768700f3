"""Spectral denoising: the formulas by a full SVD, what is left of noise alone, and what it is for."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.optim import DPAdamW
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.spectral import SpectralDenoising, denoise
from tests.contract import postprocess as contract
from tests.reference import spectra

ALPHA = 1e-6  # false-alarm probability, whatever the seed


@pytest.fixture(autouse=True)
def _any_seed():
    torch.manual_seed(secrets.randbits(63))


def low_rank(m: int, n: int, sizes: list[float]) -> torch.Tensor:
    """A matrix with these singular values and directions drawn at random; float64."""
    u, v = (torch.linalg.qr(torch.randn(side, len(sizes)).double())[0] for side in (m, n))
    return (u * torch.tensor(sizes).double()) @ v.mT


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (12, 12), (1, 9)])
@pytest.mark.parametrize("values", ["shrink", "restore"])
def test_it_is_what_a_full_svd_gives(shape, values):
    """Values on both sides of the edge; those next to it are moved away, where rounding would decide."""
    stddev, b = 0.3, min(shape) / max(shape)
    edge = stddev * math.sqrt(max(shape)) * (1 + math.sqrt(b))
    sizes = [edge * factor for factor in (0.3, 0.9, 1.1, 3.0)][-min(shape) :]
    matrix = low_rank(*shape, sizes)
    got = denoise(matrix, stddev**2, values).numpy()
    np.testing.assert_allclose(got, spectra.denoised(matrix.numpy(), stddev**2, values), rtol=0, atol=1e-9)
    assert np.linalg.matrix_rank(got, tol=1e-6) == min(2, min(shape))


def test_what_float32_cannot_decompose_float64_does(monkeypatch):
    matrix, eigh = torch.randn(5, 8), torch.linalg.eigh
    expected = denoise(matrix, 0.01)

    def fails(x):
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return eigh(x)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    torch.testing.assert_close(denoise(matrix, 0.01), expected, rtol=1e-4, atol=1e-4)


def test_of_noise_alone_nothing_is_left_to_speak_of():
    """At level ALPHA the largest singular value is below ``sqrt(m) + sqrt(n) + sqrt(2 log(1 / ALPHA))`` (Davidson and
    Szarek), and so is what the formula leaves of each: far less than the noise. Mostly nothing is left at all."""
    m, n, stddev = 60, 100, 0.2
    largest = math.sqrt(m) + math.sqrt(n) + math.sqrt(2 * math.log(1 / ALPHA))
    y, b = largest / math.sqrt(n), m / n
    most = math.sqrt((y * y - b - 1) ** 2 - 4 * b) / y * math.sqrt(n) * stddev
    left = [float(torch.linalg.matrix_norm(denoise(stddev * torch.randn(m, n), stddev**2), 2)) for _ in range(20)]
    assert max(left) < most
    assert sum(one == 0 for one in left) >= 8  # probability of each below 0.2: TW_1 > 0 at 0.17


@pytest.mark.parametrize("shape", [(200, 300), (300, 200)])
def test_it_is_nearer_to_the_signal_than_any_other_size_of_what_it_kept(shape):
    """Along the singular vectors of the noisy matrix, the best sizes are known here; those of the formula are as good
    to within a few percent, at which it is nearer than the truncated matrix and far nearer than the noisy one."""
    m, n, stddev = *shape, 0.1
    signal = low_rank(m, n, [stddev * math.sqrt(300) * factor for factor in (4.0, 2.5, 1.6)])
    noisy = signal + stddev * torch.randn(m, n).double()
    u, s, vh = torch.linalg.svd(noisy, full_matrices=False)
    best = ((u[:, :3].mT @ signal) * vh[:3]).sum(dim=1)  # of <u_i, G v_i>
    errors = {
        "noisy": float((noisy - signal).norm()),
        "truncated": float(((u[:, :3] * s[:3]) @ vh[:3] - signal).norm()),
        "best": float(((u[:, :3] * best) @ vh[:3] - signal).norm()),
        "shrunk": float((denoise(noisy, stddev**2) - signal).norm()),
    }
    assert errors["best"] <= errors["shrunk"] < 1.05 * errors["best"], errors
    assert errors["shrunk"] < 0.95 * errors["truncated"] < 0.3 * errors["noisy"], errors
    of_signal, off = torch.linalg.svdvals(signal)[:3], s[:3]
    restored = torch.linalg.svdvals(denoise(noisy, stddev**2, "restore"))[:3]
    torch.testing.assert_close(restored, of_signal, rtol=0, atol=0.7)  # their stddev is 0.1 to 0.15
    assert float((restored - of_signal).sum()) < 0.5 * float((off - of_signal).sum())


def test_an_average_finds_what_single_releases_hide():
    """A signal below the edge of one release, and above that of the average of many."""
    m, n, stddev = 30, 50, 1.0
    signal = low_rank(m, n, [0.8 * stddev * (math.sqrt(m) + math.sqrt(n))]).float()
    low_pass = SpectralDenoising(IndependentNoise(stddev), average=0.95)
    for _ in range(80):
        found = low_pass.update({"w": signal + stddev * torch.randn(m, n)})["w"]
    assert float((found - signal).norm()) < 0.5 * float(signal.norm())


@pytest.mark.parametrize("average", [0.0, 0.8])
def test_the_average_and_its_noise_are_followed(average):
    """Against the SVD of the weighted mean of all releases, with the variance of its noise, where it is correlated."""

    class Level:
        step = 0
        matrix = 0.04 * np.array([[1.0 if i == j else -0.3 * (abs(i - j) == 1) for j in range(9)] for i in range(9)])

        def variance(self):
            return float(self.matrix[self.step, self.step])

        def covariance(self, lag):
            return float(self.matrix[self.step, self.step - lag])

    level = Level()
    low_pass = SpectralDenoising(level, average=average, strength=0.75)
    gradients = [low_rank(5, 9, [3.0]) + 0.2 * torch.randn(5, 9).double() for _ in range(9)]
    for t, gradient in enumerate(gradients, start=1):
        level.step = t - 1
        weights = np.array([average ** (t - i) for i in range(1, t + 1)])
        weights /= weights.sum()
        mean = sum(weight * g.numpy() for weight, g in zip(weights, gradients, strict=False))
        variance = float(weights @ level.matrix[:t, :t] @ weights)
        expected = 0.75 * spectra.denoised(mean, variance, "shrink") + 0.25 * mean
        got = low_pass.update({"w": gradient, "b": gradient[0]})
        np.testing.assert_allclose(got["w"].numpy(), expected, rtol=0, atol=1e-8)
        np.testing.assert_allclose(got["b"].numpy(), mean[0] if average else gradient[0].numpy(), rtol=0, atol=1e-12)


def test_without_noise_it_is_the_average_alone():
    gradient = torch.randn(6, 4)
    assert torch.equal(SpectralDenoising(IndependentNoise(0.0)).update({"w": gradient})["w"], gradient)
    weights = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    filtered = DPAdamW(weights[:1], 0.1, filter=LowPassFilter.parse("spectral", IndependentNoise(0.0)))
    plain = DPAdamW(weights[1:], 0.1, betas=(0.9, 0.999))
    for _ in range(6):
        weights[0].grad = weights[1].grad = torch.randn(6, 4)
        filtered.step()
        plain.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


def test_an_optimizer_tells_it_the_level_of_the_noise():
    w = nn.Parameter(torch.zeros(30, 50))
    optimizer = DPAdamW([w], 0.1, filter=SpectralDenoising(average=0.9))
    w.grad = torch.randn(30, 50)
    with pytest.raises(DPConfigError, match="was not told the level of the noise. Pass noise="):
        optimizer.step()
    optimizer.set_noise(IndependentNoise(2.0))  # twice what is there: nothing is left
    optimizer.step()
    assert float(w.detach().abs().max()) == 0.0


CASES = {
    "single": lambda: SpectralDenoising(IndependentNoise(0.2)),
    "average": lambda: SpectralDenoising(IndependentNoise(0.5), average=0.7, values="restore"),
    "bf16": lambda: SpectralDenoising(IndependentNoise(0.5), average=0.7, strength=0.5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES)
def test_keeps_the_contract_of_filters(check, case):
    check(CASES[case])


def test_its_name_on_a_command_line():
    noise = IndependentNoise(0.5)
    assert LowPassFilter.parse("spectral", noise).parameters() == SpectralDenoising(average=0.9).parameters()
    made = LowPassFilter.parse("spectral:0", noise, dtype=torch.bfloat16)
    assert isinstance(made, SpectralDenoising) and (made.average, made.noise, made.dtype) == (0, noise, torch.bfloat16)
    assert SpectralDenoising.from_parameters(made.parameters(), noise).parameters() == made.parameters()
    with pytest.raises(DPConfigError, match="needs the noise level"):
        LowPassFilter.parse("spectral:0.5")
    with pytest.raises(DPConfigError, match="spectral:AVERAGE"):
        LowPassFilter.parse("spectral:x", noise)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"average": 1.0}, r"average=1 would never move. Use a number in \[0, 1\)"),
        ({"average": -0.1}, r"average=-0.1 is outside \[0, 1\]"),
        ({"strength": 1.5}, r"strength=1.5 is outside \[0, 1\]"),
        ({"values": "keep"}, "values='keep' is unknown. Use one of: 'shrink', 'restore'"),
        ({"min_side": 0}, "min_side=0 is not a positive count"),
        ({"dtype": torch.float16}, "cannot hold a filter's buffers"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(DPConfigError, match=match):
        SpectralDenoising(IndependentNoise(1.0), **options)


def test_the_state_of_another_filter_is_refused():
    state = SpectralDenoising(IndependentNoise(1.0), average=0.5).state_dict()
    with pytest.raises(DPConfigError, match="belongs to another filter"):
        SpectralDenoising(IndependentNoise(1.0), average=0.9).load_state_dict(state)
