"""Every noise with every preconditioner, filter and optimizer: the noise is as loud as said.

The model sees no records (the batches are empty): what is released is noise alone, and its law is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan, private_step
from hf_dpopt.clipping import make_engine
from hf_dpopt.optim import DPAdamBC, DPAdamW, NoiseAwareOptimizer
from hf_dpopt.optim.galore import DPGaLore
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response
from hf_dpopt.run.stages import Stages

NUM_STEPS, DELAY = 20, 5
SHAPE = (160, 250)
# Of N = 40,000 coordinates the mean square has a relative stddev of sqrt(2 / N) = 0.7 %. Six of them, 4.2 %, are passed
# by chance with probability 2e-9 in one step; the 2,880 steps of all cells raise a false alarm once in 170,000 runs.
TOLERANCE = 6 * (2 / (SHAPE[0] * SHAPE[1])) ** 0.5

MECHANISMS: dict[str, dict[str, Any]] = {
    "independent": {},
    "nu_dpftrl": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.05}, "sampling": "fixed_order"},
    "blt": {"noise_mechanism": "blt", "sampling": "fixed_order"},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 3}, "sampling": "fixed_order"},
}
DP2 = {"delay": DELAY, "clipping_norm": 2.0, "learning_rate_ratio": 0.5, "eps": 1e-3}
PRECLIPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dp2": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": DP2},
    "dp2 factored": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {**DP2, "factored": True}},
}
FILTERS = ("no filter", "first_order_v1", "butterworth:2:0.2")
OPTIMIZERS = ("sgd", "adamw", "dp_adam_bc", "galore")


@pytest.fixture
def cell(mechanism: str, preclip: str, filtering: str, optimizer: str) -> tuple[str, str, str, str]:
    return mechanism, preclip, filtering, optimizer


def every_cell(test):
    """Parametrise a test by the product of the four factors."""
    factors = {"mechanism": MECHANISMS, "preclip": PRECLIPS, "filtering": FILTERS, "optimizer": OPTIMIZERS}
    for name, values in factors.items():
        test = pytest.mark.parametrize(name, list(values))(test)
    return test


def _optimizer(name: str, parameters: Any, inner: LowPassFilter | None) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.0)
        case "adamw" if inner is None:
            return torch.optim.AdamW(parameters, lr=1e-3)
        case "adamw":
            return DPAdamW(parameters, 1e-3, filter=inner)
        case "dp_adam_bc":
            return DPAdamBC(parameters, 1e-3, filter=inner)
    return DPGaLore(parameters, 1e-3, rank=4, refresh_every=7, filter=inner, inner="adam_bc")


class _Run:
    """One cell at work, on empty batches."""

    def __init__(self, tmp: Path, cell: tuple[str, str, str, str]):
        mechanism, preclip, text, optimizer = cell
        config = PrivacyConfig(
            noise_multiplier=1.5, target_delta=1e-3, expected_batch_size=4, clipping_norm=0.5,
            **MECHANISMS[mechanism], **PRECLIPS[preclip],
        )  # fmt: skip
        self.plan = make_plan(config, num_examples=80, num_steps=NUM_STEPS)
        torch.manual_seed(0)
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        self.engine = make_engine(self.model, self.plan.clipper)
        self.filter = None if text == "no filter" else LowPassFilter.parse(text)
        is_inside = optimizer != "sgd"
        self.optimizer = _optimizer(optimizer, self.model.parameters(), self.filter if is_inside else None)
        self.run = PrivateRun(self.plan, output_dir=tmp, private_state_dir=tmp.parent / "keys")
        chain = [self.filter] if self.filter is not None and not is_inside else []
        self.stages = Stages(self.run, self.engine, self.optimizer, chain)

    def step(self, t: int) -> torch.Tensor:
        losses: Any = None  # of no batch
        private_step(self.engine, losses, [], run=self.run, step=t, after_noise=self.stages.after_noise)
        grad = self.model.weight.grad.clone()
        self.optimizer.step()
        return grad


def _predicted(cell: tuple[str, str, str, str], run: _Run) -> np.ndarray:
    """Variance of a coordinate of what the optimizer sees in every step: of ``H G B z`` with the filter's H, gains G."""
    noising = run.plan.strategy.noising_matrix(NUM_STEPS)
    gains = np.ones(NUM_STEPS)
    if cell[1] != "plain":
        adaptive = np.arange(NUM_STEPS) % (2 * DELAY) >= DELAY
        gains[adaptive] = DP2["clipping_norm"] / 0.5 * DP2["learning_rate_ratio"]
    rows = gains[:, None] * noising
    if cell[3] == "sgd" and run.filter is not None:
        h = impulse_response(run.filter.b, run.filter.a, NUM_STEPS)
        response = np.array([[h[t - s] if s <= t else 0.0 for s in range(NUM_STEPS)] for t in range(NUM_STEPS)])
        rows = response @ rows / response.sum(axis=1, keepdims=True)
    return np.square(rows).sum(axis=1) * (run.plan.draw_stddev * run.plan.sensitivity / 4) ** 2


@pytest.mark.slow_but(12)
@every_cell
def test_the_noise_is_as_loud_as_said(tmp_path, cell):
    run = _Run(tmp_path / "run", cell)
    predicted = _predicted(cell, run)
    for t in range(1, NUM_STEPS + 1):
        grad = run.step(t)
        measured = grad.double().square().mean().item()
        assert abs(measured / predicted[t - 1] - 1) <= TOLERANCE, (t, measured, predicted[t - 1])
        if isinstance(run.optimizer, NoiseAwareOptimizer):  # what it is told about the gradient it is given
            assert run.optimizer.noise.variance() == pytest.approx(predicted[t - 1], rel=1e-9)
    assert run.run.charged == [NUM_STEPS] and run.model.weight.isfinite().all()
