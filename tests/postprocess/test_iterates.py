"""Averages against stored iterates; hooks and resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess.iterates import IterateAverage, decay_over


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    return model


def _train(model, optimizer, num_steps) -> list[dict[str, torch.Tensor]]:
    """Random gradients; the weights after every step."""
    out = []
    for _ in range(num_steps):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
        out.append({n: p.detach().double().clone() for n, p in model.named_parameters() if p.requires_grad})
    return out


def _optimizer(model, kind=torch.optim.SGD):
    return kind([p for p in model.parameters() if p.requires_grad], lr=0.3)


@pytest.mark.parametrize("kind", ["uniform", "tail", "exponential"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_average_is_that_of_the_iterates(kind, optimizer):
    model = _model()
    options = {"uniform": {}, "tail": {"start": 4}, "exponential": {"kind": "exponential", "decay": 0.8}}[kind]
    average, stepper = IterateAverage(model, **options), _optimizer(model, optimizer)
    average.attach(stepper)
    iterates = _train(model, stepper, 11)
    weights = {
        "uniform": [1.0] * 11,
        "tail": [0.0] * 4 + [1.0] * 7,
        "exponential": [0.8 ** (10 - s) for s in range(11)],
    }
    w = torch.tensor(weights[kind], dtype=torch.float64)
    for name, got in average.average().items():
        want = torch.stack([it[name] for it in iterates]).mul(w.view(-1, *[1] * got.dim())).sum(dim=0) / w.sum()
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 10, 11, 198, 10**5])
def test_the_exponential_average_is_over_the_last_tenth_of_any_run(num_steps):
    decay = decay_over(num_steps)
    weights = [decay ** (num_steps - s) for s in range(1, num_steps + 1)]
    mean_age = sum(w * (num_steps - s) for s, w in enumerate(weights, start=1)) / sum(weights)
    assert 0 <= decay < 1 and mean_age <= 0.1 * num_steps
    assert num_steps <= 10 or mean_age >= 0.099 * num_steps - 1.01


def test_a_run_ends_with_the_average():
    model = _model()
    average, optimizer = IterateAverage(model), _optimizer(model)
    average.attach(optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    _train(model, optimizer, 5)
    want = average.average()
    average.finish()
    assert all(torch.equal(p, want.get(n, before[n])) for n, p in model.named_parameters())
    want["0.weight"].zero_()  # the average handed out is a copy
    assert average.average()["0.weight"].any()


def test_bfloat16_weights_are_averaged_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = IterateAverage(model)
    for value in [1.0] * 999 + [2.0]:
        nn.init.constant_(model.weight, value)
        average.update()
    assert average.average()["weight"].item() == pytest.approx(1.001, rel=1e-5)  # bfloat16 has steps of 1/128 here


@pytest.mark.parametrize("kind", ["uniform", "exponential"])
def test_resume_is_bit_exact(kind):
    one, two = _model(), _model()
    two.load_state_dict(one.state_dict())
    whole, first = IterateAverage(one, kind, start=2), IterateAverage(two, kind, start=2)
    torch.manual_seed(1), whole.attach(opt_one := _optimizer(one)), _train(one, opt_one, 4)
    torch.manual_seed(1), (handle := first.attach(opt_two := _optimizer(two))), _train(two, opt_two, 4)
    handle.remove()
    second = IterateAverage(two, kind, start=2)
    second.load_state_dict(first.state_dict())
    second.attach(opt_two)
    torch.manual_seed(2), _train(one, opt_one, 3)
    torch.manual_seed(2), _train(two, opt_two, 3)
    want, got = whole.average(), second.average()
    assert all(torch.equal(want[n], got[n]) for n in want)
    assert any(not torch.equal(first.average()[n], got[n]) for n in want)  # the detached one stayed behind


def test_refusals():
    model = _model()
    with pytest.raises(DPConfigError, match="optimizer.optimizer"):
        IterateAverage(model).attach(torch.optim.SGD(model[1].parameters(), lr=0.1))
    with pytest.raises(DPConfigError, match="'uniform'"):
        IterateAverage(model, "median")
    with pytest.raises(DPConfigError, match="start=-1"):
        IterateAverage(model, start=-1)
    with pytest.raises(DPConfigError, match="decay=1"):
        IterateAverage(model, "exponential", decay=1.0)
