"""Orthogonalised momentum of released matrices, and the bias that noise leaves after that map."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
import torch
from torch import nn

from hf_dpopt.optim import DPAdamBC, DPAdamW, DPMuon
from hf_dpopt.optim.muon import newton_schulz, without_bias
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.noise_level import variance_of_momentum
from tests.optim.test_adam import LRS, VARIANCES, train, weights_and_gradients
from tests.reference import optim as reference
from tests.reference import spectra
from tests.reference.optim import ExponentialAverage, StepNoise

SHAPES = [(4, 7), (7, 4), (5, 5), (9,), (3, 8), (4, 4, 4)]  # the first three are turned
MATRICES = 3


@pytest.fixture(autouse=True)
def _any_seed():
    torch.manual_seed(secrets.randbits(63))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6)])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_map_is_that_of_the_singular_values(shape, degree):
    matrix = torch.randn(shape).double()
    expected = spectra.turned(matrix.numpy(), 5, degree)
    torch.testing.assert_close(newton_schulz(matrix, iterations=5, degree=degree).numpy(), expected, rtol=0, atol=1e-9)
    many = newton_schulz(matrix, iterations=30, degree=degree)
    gram = many @ many.mT if shape[0] <= shape[1] else many.mT @ many
    torch.testing.assert_close(gram, torch.eye(min(shape)).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_correction_is_half_the_variance_times_the_laplacian(shape, degree):
    matrix = torch.randn(shape).double()
    got = without_bias(matrix, 0.3, iterations=4, degree=degree).numpy()
    laplacian = spectra.laplacian_of_turned(matrix.numpy(), 4, degree)
    plain = spectra.turned(matrix.numpy(), 4, degree)
    np.testing.assert_allclose(got, plain - 0.15 * laplacian, rtol=1e-4, atol=1e-5 * (1 + np.abs(laplacian).max()))


def test_equal_singular_values_need_no_case_of_their_own():
    got = without_bias(torch.eye(4, 6).double(), 0.1, iterations=4, degree=2).numpy()
    expected = spectra.turned(np.eye(4, 6), 4, 2) - 0.05 * spectra.laplacian_of_turned(np.eye(4, 6), 4, 2)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("turn", [newton_schulz, lambda m, **kw: without_bias(m, 0.5, **kw)])
def test_nothing_stays_nothing(turn):
    assert torch.equal(turn(torch.zeros(3, 4), iterations=5, degree=2), torch.zeros(3, 4))


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e20, 1e37])
@pytest.mark.parametrize("turn", [newton_schulz, lambda m, **kw: without_bias(m, 0.0, **kw)])
def test_the_map_has_no_scale(turn, scale):
    matrix = torch.tensor([[1.0, -1.0, 2.0], [0.5, 1.0, 1.0]])
    expected = newton_schulz(matrix, iterations=5, degree=2)
    torch.testing.assert_close(turn(matrix * scale, iterations=5, degree=2), expected, rtol=0, atol=1e-4)


def test_the_correction_has_no_scale():
    matrix = torch.randn(5, 8).double()
    expected = without_bias(matrix, 0.1, iterations=5, degree=2)
    got = without_bias(matrix * 1e-30, 0.1 * 1e-60, iterations=5, degree=2)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_without_noise_there_is_no_bias():
    matrix = torch.randn(6, 9)
    plain = newton_schulz(matrix, iterations=5, degree=2)
    torch.testing.assert_close(without_bias(matrix, 0.0, iterations=5, degree=2), plain, rtol=0, atol=1e-5)


def test_monte_carlo_the_mean_over_the_noise_is_nearer_to_the_map_without_noise():
    """Mean of O(M + s Z) over 600 draws in opposite pairs, whose first order falls away, against O(M).

    The bias is 0.04 of the norm of O(M) here and the correction leaves 0.01, the higher orders; of the difference to
    the mean over all draws, which the pairs make of second order, less than 0.003 is seen.
    """
    m, n, stddev, num = 4, 6, 0.05, 600
    u, v = torch.linalg.qr(torch.randn(m, m).double())[0], torch.linalg.qr(torch.randn(n, m).double())[0]
    signal = (u * torch.tensor([0.8, 0.5, 0.3, 0.1]).double()) @ v.mT
    options = dict(iterations=2, degree=2)
    target = newton_schulz(signal, **options)
    plain, corrected = torch.zeros_like(signal), torch.zeros_like(signal)
    for _ in range(num // 2):
        noise = stddev * torch.randn(m, n).double()
        for noisy in (signal + noise, signal - noise):
            plain += newton_schulz(noisy, **options) / num
            corrected += without_bias(noisy, stddev**2, **options) / num
    bias, left = (float((mean - target).norm() / target.norm()) for mean in (plain, corrected))
    assert left < bias / 2 and bias > 0.02, (bias, left)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("inner", ["adamw", "adam_bc"])
def test_matrices_move_by_turned_momentum_and_the_rest_as_adam(bias_correction, inner):
    weights, gradients = weights_and_gradients(torch.float64, SHAPES)
    before = [w.detach().clone() for w in weights]
    noise, options = StepNoise(VARIANCES), dict(betas=(0.8, 0.95), eps=1e-3)
    of_matrices = dict(momentum=0.7, scale=0.3, iterations=3, degree=2)
    optimizer = DPMuon(
        [{"params": weights[::2], "weight_decay": 0.3}, {"params": weights[1::2]}],
        lr=9.0, inner=inner, noise=noise, bias_correction=bias_correction, **of_matrices, **options,
    )  # fmt: skip
    train(optimizer, weights, gradients, noise=noise)
    if inner == "adam_bc":
        options["variances"] = VARIANCES
    for i, (w, start, of_w) in enumerate(zip(weights, before, gradients, strict=True)):
        slow = dict(lrs=LRS, weight_decay=0.3 * (i % 2 == 0))
        if i < MATRICES:
            known = VARIANCES if bias_correction else None
            of_w = [g.numpy() for g in of_w]
            expected = torch.tensor(spectra.muon(start.numpy(), of_w, variances=known, **slow, **of_matrices))
        else:
            expected = reference.adam(start, of_w, **slow, **options)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-4, atol=1e-4, msg=lambda m, i=i: f"{SHAPES[i]}: {m}")


def test_a_filter_takes_the_place_of_the_momentum():
    weights, gradients = weights_and_gradients(shapes=[(4, 7)])
    start = weights[0].detach().double().numpy()
    optimizer = DPMuon(weights, lr=9.0, filter=ExponentialAverage(0.6), scale=0.3, iterations=3)
    train(optimizer, weights, gradients)
    of_w = [g.double().numpy() for g in gradients[0]]  # a factor common to all gradients changes nothing
    expected = spectra.muon(start, of_w, lrs=LRS, momentum=0.6, scale=0.3, iterations=3, degree=2)
    np.testing.assert_allclose(weights[0].detach().numpy(), expected, rtol=0, atol=1e-4)
    assert "momentum" not in optimizer.state[weights[0]]


@pytest.mark.parametrize("inner, cls", [("adamw", DPAdamW), ("adam_bc", DPAdamBC)])
@pytest.mark.parametrize("switch", [{"orthogonalize": False}, {"min_side": 100}, {"max_side": 3}])
def test_where_nothing_is_turned_it_is_the_inner_optimizer_to_the_last_bit(inner, cls, switch):
    weights, gradients = weights_and_gradients(shapes=SHAPES)
    theirs = [nn.Parameter(w.detach().clone()) for w in weights]
    options = dict(lr=0.1, weight_decay=0.1, noise=IndependentNoise(0.5))
    train(DPMuon(weights, inner=inner, **switch, **options), weights, gradients)
    train(cls(theirs, **options), theirs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def test_a_group_may_stay_with_adam():
    weights, gradients = weights_and_gradients(shapes=[(5, 6), (5, 6)])
    optimizer = DPMuon([{"params": weights[:1]}, {"params": weights[1:], "orthogonalize": False}], lr=0.1)
    train(optimizer, weights, gradients)
    assert "momentum" in optimizer.state[weights[0]] and "exp_avg" in optimizer.state[weights[1]]


def test_a_full_step_has_the_size_that_is_said():
    for shape in ((6, 40), (40, 6), (12, 12)):
        w = nn.Parameter(torch.zeros(shape))
        w.grad = torch.randn(shape)
        DPMuon([w], lr=0.5, scale=0.2, iterations=30).step()
        rms = float(w.detach().square().mean().sqrt())
        assert rms == pytest.approx(0.5 * 0.2 * math.sqrt(max(shape)) * math.sqrt(min(shape) / w.numel()), rel=1e-3)


def test_the_variance_of_momentum_is_that_of_the_sum_of_correlated_noise():
    """Against ``w^T K w`` with the covariance K of the noise, for every step."""

    class Level:
        def __init__(self, covariance):
            self.k, self.t = covariance, 0

        def variance(self):
            return float(self.k[self.t, self.t])

        def covariance(self, lag):
            return float(self.k[self.t, self.t - lag])

    steps, decay, found = 12, 0.9, 0.0
    noising = np.tril(np.random.default_rng().standard_normal((steps, steps)))
    level = Level(noising @ noising.T)
    for level.t in range(steps):
        found = variance_of_momentum(level, found, decay, level.t + 1)
        weights = decay ** np.arange(level.t, -1, -1)
        assert found == pytest.approx(float(weights @ level.k[: level.t + 1, : level.t + 1] @ weights))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"momentum": 1.0}, r"momentum=1.0 is out of range. Use a number in \[0, 1\)"),
        ({"iterations": 0}, "iterations=0 is not a positive count"),
        ({"iterations": 31}, "iterations=31 is above 30. Use 5."),
        ({"iterations": 11, "bias_correction": True}, "iterations=11 with bias_correction=True is above 10"),
        ({"degree": 3}, "degree=3 is unknown. Use one of: 1, 2"),
        ({"inner": "sgd"}, "inner='sgd' is unknown. Use one of: adamw, adam_bc"),
        ({"scale": -1.0}, "scale=-1.0 is out of range"),
        ({"bias_correction": True, "filter": ExponentialAverage(0.5)}, "with a filter.*Leave out one of the two"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        DPMuon([nn.Parameter(torch.zeros(4, 4))], lr=0.1, **options)
