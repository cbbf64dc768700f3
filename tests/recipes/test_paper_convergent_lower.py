"""The lower bound of the last iterate: closed forms, grids that bracket it, the upper bound, the paper's scaling."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import optimize

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig, make_head_plan
from hf_dpopt.convex.last_iterate import ProjectedSGD, last_iterate_epsilon
from recipes.paper.convergent import lower_bound as module
from recipes.paper.convergent.lower_bound import (
    ERROR,
    HEAD,
    head_bounds,
    last_iterate_lower_epsilon,
    last_iterate_lower_epsilons,
)
from tests.reference import random_walk
from tests.reference.gaussian_mixtures import gaussian_delta

pytestmark = pytest.mark.slow

DELTA = 1e-5


def run(noise=1.0, diameter=1.0, step_size=1.0, num_steps=1000, **other):
    setting = {"num_examples": 10_000, "expected_batch_size": 100, "lipschitz": 1.0, "smoothness": 0.5} | other
    return ProjectedSGD(noise_multiplier=noise, diameter=diameter, step_size=step_size, num_steps=num_steps, **setting)


def laws(setting, num_steps):
    """Places, and the distribution functions without the record and with it."""
    walk = module._walk_of(setting, num_steps)
    alone = dataclasses.replace(walk, drift=0.0)
    y = module._nodes(module._edges(walk))
    return walk, y, *(module._laws(one, [num_steps], walk)[num_steps] for one in (alone, walk))


# --- the distribution functions --------------------------------------------------------------------------------------


BRACKETED = [
    {"diameter": 0.1}, {"diameter": 0.1, "l2": 0.2}, {"noise": 0.4, "diameter": 0.05},
    {"noise": 3.0, "diameter": 0.6, "num_examples": 300},
]  # fmt: skip


@pytest.mark.parametrize("change", BRACKETED)
@pytest.mark.parametrize("num_steps", [3, 40, 300])
def test_they_lie_between_grids_that_bracket_the_walks(change, num_steps):
    setting = run(**change)
    walk, y, *found = laws(setting, num_steps)
    for drift, law in zip((0.0, walk.drift), found, strict=True):
        places, low, high = random_walk.bracketed(
            half=walk.half, contraction=walk.contraction, drift=drift, sample_rate=walk.sample_rate,
            num_steps=num_steps, cells=800,
        )  # fmt: skip
        edges = module._edges(walk)
        at = module._interpolation(places[:-1], edges, len(y)) @ law
        assert np.all(low[:-1] - ERROR <= at) and np.all(at <= high[:-1] + ERROR)
        assert np.max(high - low) < 0.5 and (num_steps > 3 or np.max(high - low) < 0.05), "it says something"


# --- epsilon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 10, 100, 1000])
def test_is_attained_by_the_exact_walk(num_steps):
    """The walk of the tests of the upper bound: all events together show what thresholds do, within 0.1 %."""
    setting = run(diameter=6.0, num_steps=num_steps, num_examples=100, expected_batch_size=10, smoothness=0.01)
    without, with_it = random_walk.laws(
        diameter=6.0, step_size=1.0, noise=0.1, drift=0.1, sample_rate=0.1, num_steps=num_steps, cells=1201
    )
    assert last_iterate_lower_epsilon(setting, DELTA) == pytest.approx(
        random_walk.epsilon(without, with_it, DELTA), rel=1.5e-3
    )


def test_one_step_of_everyone_is_the_gaussian_mechanism():
    """The exact profile of a Gaussian mechanism, whose best events are thresholds."""
    setting = run(noise=1.5, diameter=1e6, num_steps=1, num_examples=50, expected_batch_size=50, smoothness=0.1)

    exact = optimize.brentq(lambda epsilon: gaussian_delta(1 / 1.5, epsilon) - DELTA, 0, 20)
    found = last_iterate_lower_epsilon(setting, DELTA)
    assert found <= exact and found == pytest.approx(exact, rel=1e-3)


GRID = [
    run(noise=noise, diameter=diameter, step_size=step_size, l2=l2)
    for noise in (0.7, 1.0, 4.0)
    for diameter in (0.01, 0.3, 3.0)
    for step_size, l2 in ((1.0, 0.0), (0.1, 0.0), (1.0, 0.05))
]


@pytest.mark.parametrize("setting", GRID, ids=lambda s: f"{s.noise_multiplier}-{s.diameter}-{s.step_size}-{s.l2}")
def test_is_never_above_the_upper_bound(setting):
    steps = [1, 1000, 10**6]
    lower = last_iterate_lower_epsilons(setting, steps, DELTA)
    for num_steps, found in zip(steps, lower, strict=True):
        upper = last_iterate_epsilon(dataclasses.replace(setting, num_steps=num_steps), DELTA, form="rdp").epsilon
        assert found <= upper


def test_refusals():
    with pytest.raises(DPConfigError, match="Use decay=0"):
        last_iterate_lower_epsilon(run(decay=0.5), DELTA)
    with pytest.raises(DPConfigError, match="outside"):
        last_iterate_lower_epsilon(run(), 1.0)
    with pytest.raises(DPConfigError, match="steps"):
        last_iterate_lower_epsilons(run(), [0], DELTA)
    assert last_iterate_lower_epsilon(run(noise=0.0), DELTA) == math.inf


# --- a head ----------------------------------------------------------------------------------------------------------


def test_both_bounds_of_a_head_are_given_up_to_its_steps() -> None:
    plan = make_head_plan(
        HeadConfig(**{**HEAD, "target_epsilon": None, "noise_multiplier": 4.0, "num_steps": 20_000}),
        num_examples=67_349,
    )
    found = head_bounds(plan)
    assert found["steps"][-1] == 20_000 and found["upper"][-1] == pytest.approx(plan.epsilon())
    assert all(up >= low > 0 for up, low in zip(found["upper"], found["lower"], strict=True))
