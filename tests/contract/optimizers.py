"""What every optimizer has to keep: state, filter, noise level, missing gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from tests.reference.optim import StepNoise

SHAPES, NUM_STEPS = [(6, 11), (11, 6), (9,)], 12
NEEDED: dict[str, dict[str, Any]] = {"dp_galore": {"rank": 3, "refresh_every": 3}}


def make(name: str, *, filtered: bool = False, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    weights = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    groups = [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:], "weight_decay": 0.0}]
    low_pass = LowPassFilter.parse("first_order_v1", noise=IndependentNoise()) if filtered else None
    cls: Any = OPTIMIZERS[name]
    noise = StepNoise([0.01 * (1 + t % 3) for t in range(NUM_STEPS)])
    return weights, cls(groups, lr=0.1, noise=noise, filter=low_pass, **NEEDED.get(name, {}), **options)


def steps(weights: list[nn.Parameter], optimizer: Any, first: int, end: int) -> None:
    """Steps with gradients and learning rates of their own, and a noise level that may change from step to step."""
    for t in range(first, end):
        generator = torch.Generator().manual_seed(t)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + t)
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator).to(w.dtype)
        optimizer.noise.step = t
        optimizer.step()


def check_descent(name: str) -> None:
    """Follows a constant gradient downhill.

    As a whole, not in every coordinate: a gradient of rank one leaves rounding in the other directions of a subspace,
    which an optimizer that divides by its size follows too.
    """
    for filtered in (False, True):
        weights, optimizer = make(name, filtered=filtered)
        before = [w.detach().mean() for w in weights]
        for _ in range(NUM_STEPS):
            for w in weights:
                w.grad = torch.ones_like(w)
            optimizer.step()
        assert all(torch.isfinite(w).all() and w.mean() < was for w, was in zip(weights, before, strict=True))


def goes_on(start: Callable[[], tuple[list[nn.Parameter], Any]]) -> Any:
    """An optimizer that `start` makes goes on bit for bit from a checkpoint of every step; returns the last of them."""
    whole, optimizer = start()
    checkpoints = []
    for t in range(NUM_STEPS):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        checkpoints.append(([w.detach().clone() for w in whole], file))
        steps(whole, optimizer, t, t + 1)
    for stop, (saved, file) in enumerate(checkpoints):
        file.seek(0)
        weights, resumed = start()
        for w, value in zip(weights, saved, strict=True):
            w.data.copy_(value)
        resumed.load_state_dict(resumed.state_dict())  # as accelerate does when it wraps an optimizer
        resumed.load_state_dict(torch.load(file, weights_only=True))
        steps(weights, resumed, stop, NUM_STEPS)
        assert all(torch.equal(a, b) for a, b in zip(weights, whole, strict=True)), f"resumed after {stop} steps"
    return resumed


def check_state(name: str) -> None:
    """Goes on bit for bit from a checkpoint, its filter included; and as a copy."""
    for filtered in (False, True):
        copy.deepcopy(goes_on(lambda filtered=filtered: make(name, filtered=filtered)))  # type: ignore[misc]


def check_missing_gradients(name: str) -> None:
    """A parameter without a gradient is left alone, and no step at all is no error."""
    weights, optimizer = make(name)
    optimizer.step()
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert all((w == 1).all() for w in weights[1:]) and not (weights[0] == 1).all()


def check_options(name: str) -> None:
    """Values out of range are refused before there is a step."""
    for wrong in ({"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}):
        with pytest.raises(DPConfigError):
            OPTIMIZERS[name]([nn.Parameter(torch.ones(3, 3))], **{"lr": 0.1, **NEEDED.get(name, {}), **wrong})  # type: ignore[arg-type]


CHECKS = (check_descent, check_state, check_missing_gradients, check_options)
