"""Advice on the delay against brute force: a DP^2 of numpy on the same quadratic, with noise and rates of its own."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from hf_dpopt import DPConfigError
from hf_dpopt.preclip import DelayedPreconditioner, advise_delay
from tests.reference.dp2 import trajectory

STEPS, DIM, CLIP, EPS, BETA = 240, 20, 50.0, 1e-3, 0.9
CURVATURE = np.logspace(0, -3, DIM)
DELAYS = (1, 2, 4, 8, 15, 30, 60, 120)


def clip(g: np.ndarray) -> np.ndarray:
    return g * np.minimum(1.0, CLIP / np.linalg.norm(g, axis=-1, keepdims=True))


def brute_force(distance: np.ndarray, s: int, noise: float, rng: np.random.Generator, num_runs: int = 100) -> float:
    """Loss after the last step relative to the first, of the best pair of a fine grid of rates."""
    grid = list(itertools.product((0.02, 0.05, 0.1, 0.2, 0.5, 1.0), np.logspace(-3.5, 0, 15)))
    typical = np.sqrt((distance**2).mean())
    sgd, adaptive = (np.array(rates)[:, None, None] for rates in zip(*grid, strict=True))
    x = np.tile(distance, (len(grid), num_runs, 1))
    v, total, d = np.zeros_like(x), np.zeros_like(x), None
    for t in range(STEPS):
        position = t % (2 * s)
        if position == 0:
            total, d = np.zeros_like(x), None
        if position == s:
            v = BETA * v + (1 - BETA) * (total / s) ** 2
            d = np.sqrt(v) + EPS
        g = CURVATURE * x
        z = noise * rng.standard_normal((1, *x.shape[1:]))
        if d is None:
            released = clip(g) + z
            total = total + released
            x = x - sgd * released
        else:
            x = x - adaptive * typical * (clip(g / d) + z)
    losses = (CURVATURE * x**2).sum(axis=2).mean(axis=1) / (CURVATURE * distance**2).sum()
    return float(np.nanmin(losses))


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(("power", "noise", "is_long"), [(0.0, 0.05, True), (0.75, 0.05, False)])
def test_the_advised_delay_is_as_good_as_the_best_by_brute_force(power, noise, is_long):
    """One quadratic wants the longest delay, one a short or middle one: the advice has to tell them apart."""
    distance = CURVATURE**-power
    rng = np.random.default_rng()
    losses = {s: brute_force(distance, s, noise, rng) for s in DELAYS}
    best, worst = min(losses.values()), max(losses.values())
    assert worst > 5 * best, "any delay would do, so the test sees nothing"
    assert (min(losses, key=losses.__getitem__) >= 60) == is_long
    outcomes = advise_delay(
        torch.tensor(CURVATURE * distance), torch.tensor(CURVATURE), num_steps=STEPS, noise_stddev=noise,
        clipping_norm=CLIP, spec=DelayedPreconditioner(eps=EPS, beta=BETA), delays=DELAYS, num_runs=64,
    )  # fmt: skip
    assert [o.loss for o in outcomes] == sorted(o.loss for o in outcomes)
    assert {o.delay for o in outcomes} == set(DELAYS)
    assert losses[outcomes[0].delay] <= 2 * best, (losses, outcomes)


@pytest.mark.parametrize("options", [
    {}, {"adaptive_steps": 1}, {"clipping_norm": 0.7}, {"second_moment": "yogi"}, {"second_moment": "adagrad"},
])  # fmt: skip
def test_without_noise_its_runs_are_the_references(options):
    """The reported loss is that of the slow reference with the rates that are reported."""
    curvature, start, steps, delay = torch.tensor([1.0, 0.01], dtype=torch.float64), torch.ones(2).double(), 7, 2
    spec = DelayedPreconditioner(delay=delay, eps=0.1, **options)
    (outcome,) = advise_delay(
        curvature * start, curvature, num_steps=steps, noise_stddev=0.0, clipping_norm=3.0, spec=spec, delays=[delay]
    )
    zeros, visited = [[torch.zeros(2).double()]] * 2, [[start]]
    for t in range(steps):
        after = trajectory(
            visited, lambda w, b: [curvature * w[0]], [[0]] * (t + 1), [zeros] * (t + 1),
            expected=1, s1=delay, s2=spec.adaptive_steps or delay, clip_sgd=3.0,
            clip_adaptive=spec.clipping_norm or 3.0, rate=outcome.learning_rate,
            rate_adaptive=outcome.learning_rate * outcome.learning_rate_ratio, rule=spec.second_moment, beta=0.9, eps=0.1,
        )  # fmt: skip
        visited.append(after[-1])
    weights = visited[-1]
    loss = (curvature * weights[0] ** 2).sum() / (curvature * start**2).sum()
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(("changes", "match"), [
    ({"curvature": torch.tensor([1.0, 0.0])}, "no minimum"), ({"curvature": torch.ones(3)}, "as many numbers"),
    ({"gradient": torch.zeros(2)}, "nothing to descend"), ({"noise_stddev": math.nan}, "noise_stddev"),
    ({"noise_stddev": -1.0}, "noise_stddev"), ({"delays": [20]}, "leaves no step"), ({"num_runs": 0}, "num_runs"),
    ({"spec": DelayedPreconditioner(factored=True)}, "factored=False"),
    ({"spec": DelayedPreconditioner(variant="algorithm2")}, "variant='dp2' for"), ({"clipping_norm": 0.0}, "> 0"),
])  # fmt: skip
def test_what_it_cannot_compare_is_refused(changes, match):
    values = dict(
        gradient=torch.ones(2), curvature=torch.ones(2), num_steps=20, noise_stddev=0.1, clipping_norm=1.0, num_runs=2
    )
    with pytest.raises(DPConfigError, match=match):
        advise_delay(**(values | changes))


def test_the_same_seed_gives_the_same_advice_and_delays_are_chosen():
    values = dict(
        gradient=torch.ones(3),
        curvature=torch.tensor([1.0, 0.1, 0.01]),
        num_steps=20,
        noise_stddev=0.1,
        clipping_norm=9.0,
    )
    first = advise_delay(**values)
    assert first == advise_delay(**values) != advise_delay(**values, seed=1)
    assert {o.delay for o in first} == {1, 2, 3, 4, 6, 7, 10}
