"""AdamW on released gradients, with and without the noise in its second moment."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_dpopt.optim import DPAdamBC, DPAdamW
from hf_dpopt.postprocess import IndependentNoise
from tests.reference.optim import ExponentialAverage, StepNoise

ALPHA = 1e-6  # two-sided false-alarm probability per case, whatever the seed
SHAPES = [(5, 7), (3,), (4, 2, 3)]
NUM_STEPS = 12
LRS = [0.02 * (1 - t / 20) for t in range(NUM_STEPS)]
VARIANCES = [0.5 * (1 + t % 3) ** 2 for t in range(NUM_STEPS)]  # as loud as the gradients, and not constant


def weights_and_gradients(dtype=torch.float32, shapes=SHAPES, num_steps=NUM_STEPS):
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return weights, [[torch.randn(shape).to(dtype) for _ in range(num_steps)] for shape in shapes]


def two_groups(weights):
    return [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:], "weight_decay": 0.0}]


def train(optimizer, weights, gradients, lrs=LRS):
    for t, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for w, of_w in zip(weights, gradients, strict=True):
            w.grad = None if of_w[t] is None else of_w[t].clone()
        if isinstance(getattr(optimizer, "noise", None), StepNoise):
            optimizer.noise.step = t
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs_to_the_last_bit(dtype):
    """Through a schedule, groups, missing gradients and a closure."""
    weights, gradients = weights_and_gradients(dtype)
    gradients[1][3] = gradients[1][4] = None
    theirs = [nn.Parameter(w.detach().clone()) for w in weights]
    optimizers = [
        DPAdamW(two_groups(weights), lr=0.1, betas=(0.8, 0.97), eps=1e-4, noise=IndependentNoise(5.0)),
        torch.optim.AdamW(two_groups(theirs), lr=0.1, betas=(0.8, 0.97), eps=1e-4, foreach=True),
    ]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5) for o in optimizers]
    for t in range(NUM_STEPS):
        for ws, optimizer, scheduler in zip((weights, theirs), optimizers, schedulers, strict=True):

            def closure(ws=ws, t=t):
                assert torch.is_grad_enabled()
                for w, of_w in zip(ws, gradients, strict=True):
                    w.grad = None if of_w[t] is None else of_w[t].clone()
                return t

            assert optimizer.step(closure) == t
            scheduler.step()
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True)), t


@pytest.mark.parametrize("low_pass", [False, True])
def test_without_noise_adam_bc_is_adamw_to_the_last_bit(low_pass):
    ends = []
    for cls, options in ((DPAdamW, {}), (DPAdamBC, {"noise": IndependentNoise(0.0)})):
        torch.manual_seed(0)
        weights, gradients = weights_and_gradients()
        optimizer = cls(two_groups(weights), lr=0.1, filter=ExponentialAverage(0.7) if low_pass else None, **options)
        train(optimizer, weights, gradients)
        ends.append(torch.cat([w.detach().flatten() for w in weights]))
    assert torch.equal(*ends)


def test_averages_of_bfloat16_weights_hold_the_difference():
    """In bfloat16, 0.999 v rounds to v again: v^ would only ever grow, and v^ - Phi would be nothing but that error."""
    num_steps, stddev = 300, 1.0
    weights = [nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))]
    optimizer = DPAdamBC(weights, lr=0.01, noise=IndependentNoise(stddev))
    total = torch.zeros(2000, dtype=torch.float64)
    beta2 = 0.999
    for _ in range(num_steps):
        weights[0].grad = (torch.randn(2000) * stddev).bfloat16()
        total = beta2 * total + (1 - beta2) * weights[0].grad.double() ** 2
        optimizer.step()
    state = optimizer.state[weights[0]]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg_sq"].double(), total, rtol=1e-4, atol=0)
    assert weights[0].dtype == torch.bfloat16


@pytest.mark.parametrize("variance", [-1.0, math.nan, math.inf])
def test_a_noise_level_out_of_range_is_refused(variance):
    w = nn.Parameter(torch.zeros(2))
    w.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"noise.variance\(\)=.* is out of range"):
        DPAdamBC([w], lr=0.1, noise=StepNoise([variance])).step()
    assert torch.equal(w, torch.zeros(2))
