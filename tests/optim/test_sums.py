"""Every optimizer as a sum over all released gradients, with and without the noise in its second moment."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_dpopt.optim import DPAdaGrad, DPAdamBC, DPAdamW, DPRMSProp
from hf_dpopt.postprocess import IndependentNoise
from tests.optim.test_adam import LRS, VARIANCES, train, two_groups, weights_and_gradients
from tests.reference import optim as reference
from tests.reference.optim import ExponentialAverage, StepNoise

RMSPROP, ADAGRAD = {"alpha": 0.8, "eps": 1e-3}, {"eps": 1e-3}
SUMS = [
    (DPAdamW, reference.adam, {"betas": (0.8, 0.95), "eps": 1e-3}, False),
    *((DPAdamBC, reference.adam, {"betas": (0.8, 0.95), "eps": 0.4, "variance_floor": floor}, True) for floor in (None, 0.0, 0.7)),
    *(
        (cls, reference.rmsprop, options | floor, is_unbiased)
        for cls, options in ((DPRMSProp, RMSPROP), (DPAdaGrad, ADAGRAD))
        for is_unbiased, floor in ((False, {}), (True, {}), (True, {"variance_floor": 0.4}))
    ),
]  # fmt: skip


@pytest.mark.parametrize("cls, slow, options, is_unbiased", SUMS)
@pytest.mark.parametrize("filter_beta", [None, 0.6])
def test_it_is_the_sum_over_all_gradients(cls, slow, options, is_unbiased, filter_beta):
    weights, gradients = weights_and_gradients(torch.float64)
    before = [w.detach().clone() for w in weights]
    low_pass = None if filter_beta is None else ExponentialAverage(filter_beta, torch.float64)
    switch = {"unbiased": is_unbiased} if slow is reference.rmsprop else {}
    optimizer = cls(two_groups(weights), lr=9.0, noise=StepNoise(VARIANCES), filter=low_pass, **options, **switch)
    train(optimizer, weights, gradients)
    known = VARIANCES if is_unbiased else None
    for w, start, of_w, decay in zip(weights, before, gradients, [0.3, 0.0, 0.0], strict=True):
        expected = slow(start, of_w, lrs=LRS, weight_decay=decay, variances=known, filter_beta=filter_beta, **options)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "cls, torchs, options", [(DPRMSProp, torch.optim.RMSprop, RMSPROP), (DPAdaGrad, torch.optim.Adagrad, ADAGRAD)]
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_without_noise_it_is_torchs_to_the_last_bit(cls, torchs, options, unbiased):
    weights, gradients = weights_and_gradients()
    gradients[1][3] = gradients[1][4] = None
    theirs = [nn.Parameter(w.detach().clone()) for w in weights]
    noise = IndependentNoise(0.0 if unbiased else 3.0)
    train(cls(two_groups(weights), lr=9.0, unbiased=unbiased, noise=noise, **options), weights, gradients)
    train(torchs(two_groups(theirs), lr=9.0, foreach=False, **options), theirs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


WRONG = {
    (DPAdamW, DPAdamBC, DPRMSProp, DPAdaGrad): [
        ({"lr": -1.0}, "lr=-1.0 is out of range. Use a finite number >= 0"),
        ({"lr": torch.tensor(0.1)}, "`lr` is a tensor. Use a float"),
        ({"lr": math.nan}, "lr=nan is out of range"),
        ({"lr": "0.1"}, "lr='0.1' is out of range"),
        ({"eps": -1e-8}, "eps=-1e-08 is out of range"),
        ({"weight_decay": math.inf}, "weight_decay=inf is out of range"),
    ],
    (DPAdamW, DPAdamBC): [
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0 is out of range. Use a number in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]=-0.1 is out of range"),
    ],
    (DPRMSProp,): [({"alpha": 1.0}, r"alpha=1.0 is out of range. Use a number in \[0, 1\)")],
}
WRONG_TOGETHER = [
    (DPAdamBC, {"variance_floor": -1.0}, "variance_floor=-1.0 is out of range"),
    (DPAdamBC, {"variance_floor": 0.0, "eps": 0.0}, "divide by zero.*leave variance_floor out"),
    (DPRMSProp, {"variance_floor": 0.0, "eps": 0.0}, "divide by zero"),
]


@pytest.mark.parametrize(
    "cls, options, match", [(cls, *case) for several, cases in WRONG.items() for cls in several for case in cases]
)
def test_options_out_of_range_are_refused(cls, options, match):
    with pytest.raises(ValueError, match=match):
        cls([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **options})
    with pytest.raises(ValueError, match=match):  # also in a group
        cls([{"params": [nn.Parameter(torch.zeros(1))], **options}], lr=0.1)


@pytest.mark.parametrize("cls, options, match", WRONG_TOGETHER)
def test_options_that_do_not_go_together_are_refused(cls, options, match):
    with pytest.raises(ValueError, match=match):
        cls([nn.Parameter(torch.zeros(1))], lr=0.1, **options)
