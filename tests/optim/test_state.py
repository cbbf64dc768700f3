"""Checkpoints, copies and the noise level: what every optimizer of the registry passes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_dpopt.optim import OPTIMIZERS, DPAdaGrad, DPAdamBC, DPAdamW, DPRMSProp, NoiseAwareOptimizer
from hf_dpopt.optim.galore import DPGaLore
from tests.contract.optimizers import NUM_STEPS, SHAPES, goes_on, steps
from tests.optim.test_adam import VARIANCES, two_groups
from tests.reference.optim import ExponentialAverage, StepNoise

CASES = {
    "dp_adamw": (DPAdamW, {}),
    "dp_adam_bc": (DPAdamBC, {}),
    "dp_adam_bc, floor": (DPAdamBC, {"variance_floor": 0.1}),
    "dp_rmsprop": (DPRMSProp, {}),
    "dp_rmsprop, unbiased": (DPRMSProp, {"unbiased": True}),
    "dp_adagrad": (DPAdaGrad, {}),
    "dp_adagrad, unbiased": (DPAdaGrad, {"unbiased": True}),
    "dp_galore": (DPGaLore, {"rank": 3, "refresh_every": 5}),
    "dp_galore, adam_bc": (DPGaLore, {"rank": 3, "refresh_every": 5, "inner": "adam_bc"}),
}
FILTERS = {"no filter": None, "filter": torch.float32, "bf16 filter": torch.bfloat16}
COMBINATIONS = [
    pytest.param(case, stored, id=f"{case}, {stored}")
    for case in CASES
    for stored in FILTERS
    if stored == "no filter" or "bias" not in case
]


def make(case, stored, weights):
    cls, options = CASES[case]
    dtype = FILTERS[stored]
    low_pass = None if dtype is None else ExponentialAverage(0.6, dtype)
    return cls(two_groups(weights), lr=0.1, noise=StepNoise(VARIANCES), filter=low_pass, **options)


def fresh(case, stored, dtype=torch.float32):
    weights = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    return weights, make(case, stored, weights)


def test_the_registry_is_covered():
    assert {cls for cls, _ in CASES.values()} == set(OPTIMIZERS.values())
    assert all(issubclass(cls, NoiseAwareOptimizer) for cls in OPTIMIZERS.values())
    assert all(case.split(",")[0] in OPTIMIZERS and CASES[case][0] is OPTIMIZERS[case.split(",")[0]] for case in CASES)


@pytest.mark.slow_but(19)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case, stored", COMBINATIONS)
def test_it_resumes_bit_for_bit_at_every_step(case, stored, dtype):
    resumed = goes_on(lambda: fresh(case, stored, dtype))
    if stored == "bf16 filter":
        assert {average.dtype for average in resumed.filter.averages.values()} == {torch.bfloat16}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("case, stored", COMBINATIONS)
def test_a_copy_goes_on_alone_and_without_the_noise_level(case, stored, copied):
    weights, optimizer = fresh(case, stored)
    steps(weights, optimizer, 0, 4)
    half_way = [w.detach().clone() for w in weights]
    again, twin = copied((weights, optimizer))
    assert twin.noise is None and optimizer.noise is not None
    twin.noise = StepNoise(VARIANCES)
    steps(again, twin, 4, NUM_STEPS)
    assert all(torch.equal(a, b) for a, b in zip(half_way, weights, strict=True))  # the original did not move
    steps(weights, optimizer, 4, NUM_STEPS)
    assert all(torch.equal(a, b) for a, b in zip(again, weights, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if any(word in case for word in ("bc", "bias", "reset"))])
def test_what_subtracts_the_noise_asks_for_it(case):
    weights, optimizer = fresh(case, "no filter")
    optimizer.noise = None
    for w in weights:
        w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match=r"Pass noise=run.noise_level\(\).*IndependentNoise\(0.0\)"):
        optimizer.step()
    assert all(torch.equal(w, torch.ones_like(w)) for w in weights) and not optimizer.state


def test_the_state_of_another_optimizer_is_refused():
    weights, optimizer = fresh("dp_adam_bc", "no filter")
    theirs = torch.optim.AdamW(weights, lr=0.1)
    with pytest.raises(
        ValueError, match="written by another optimizer, and cannot be continued by DPAdamBC. Resume with"
    ):
        optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="written by DPAdamBC, and cannot be continued by DPAdamW"):
        fresh("dp_adamw", "no filter")[1].load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "began, now, match",
    [
        ("filter", "no filter", "written with a filter, and the optimizer was made without one"),
        ("no filter", "filter", "written without a filter, and the optimizer was made with one"),
    ],
)
def test_a_filter_that_came_or_went_is_refused(began, now, match):
    with pytest.raises(ValueError, match=match):
        fresh("dp_adamw", now)[1].load_state_dict(fresh("dp_adamw", began)[1].state_dict())
