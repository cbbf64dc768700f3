"""The lower bound of the last iterate: closed forms, grids that bracket it, the upper bound, the paper's scaling."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig, make_head_plan
from hf_dpopt.convex.last_iterate import ProjectedSGD, last_iterate_epsilon, plateau
from recipes.paper.convergent import lower_bound as module
from recipes.paper.convergent.lower_bound import (
    ERROR,
    last_iterate_lower_epsilon,
    last_iterate_lower_epsilons,
)
from recipes.paper.convergent.lower_bound_plot import HEAD, head_bounds, plot
from tests.reference import random_walk

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


@pytest.mark.parametrize("num_steps", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_far_from_the_ends_they_are_those_of_gaussians(num_steps, rate):
    """A sum of normal steps, and as many drifts as a binomial says."""
    setting = run(noise=2.0, diameter=1e9, num_examples=1000, expected_batch_size=round(1000 * rate))
    walk, y, without, with_it = laws(setting, num_steps)
    count = np.arange(num_steps + 1)
    chances = stats.binom.pmf(count, num_steps, rate)
    wanted = (stats.norm.cdf((y[:, None] + count * walk.drift) / num_steps**0.5) * chances).sum(axis=1)
    inside = slice(1, -1)
    assert np.abs(without - stats.norm.cdf(y / num_steps**0.5))[inside].max() < ERROR
    assert np.abs(with_it - wanted)[inside].max() < ERROR
    assert walk.drift == 0.5 or (rate * num_steps > 20 and 0.05 < walk.drift < 0.5)


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

    def excess(epsilon):
        mean = 1 / 1.5
        return (
            stats.norm.cdf(mean / 2 - epsilon / mean)
            - math.exp(epsilon) * stats.norm.cdf(-mean / 2 - epsilon / mean)
            - DELTA
        )

    exact = optimize.brentq(excess, 0, 20)
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


@pytest.mark.parametrize("num_steps", [1, 100, 3000])
def test_is_never_above_the_tighter_upper_bound(num_steps):
    for setting in (run(num_steps=num_steps), run(num_examples=100, expected_batch_size=10, diameter=6.0)):
        setting = dataclasses.replace(setting, num_steps=num_steps, smoothness=0.01)
        assert last_iterate_lower_epsilon(setting, DELTA) <= last_iterate_epsilon(setting, DELTA).epsilon * (1 + 1e-6)


def test_grows_with_the_steps_up_to_the_plateau_of_the_paper():
    """T_bar = n D / (eta L) is 600 steps: up to it the bound grows, after ten times as many it does not.

    A domain of twice the size takes twice as long, and the upper bound stops growing after 1 to 7 times T_bar, too.
    """
    for diameter in (6.0, 12.0):
        setting = run(diameter=diameter, num_examples=100, expected_batch_size=10, smoothness=0.01)
        mark = round(100 * diameter)
        early, at, late, end = last_iterate_lower_epsilons(setting, [mark // 10, mark, 10 * mark, 1000 * mark], DELTA)
        assert early < 0.6 * at and 0.5 * end < at < 0.95 * end and late > 0.999 * end
        assert plateau(setting, DELTA) == pytest.approx(4 * mark, rel=0.75)


def test_never_claims_more_than_the_error_lets_it_see():
    found = last_iterate_lower_epsilon(run(noise=0.05, diameter=100.0, num_examples=100, num_steps=5000), DELTA)
    assert 20 < found <= -math.log(ERROR)


def test_refusals():
    with pytest.raises(DPConfigError, match="Use decay=0"):
        last_iterate_lower_epsilon(run(decay=0.5), DELTA)
    with pytest.raises(DPConfigError, match="outside"):
        last_iterate_lower_epsilon(run(), 1.0)
    with pytest.raises(DPConfigError, match="steps"):
        last_iterate_lower_epsilons(run(), [0], DELTA)
    assert last_iterate_lower_epsilon(run(noise=0.0), DELTA) == math.inf


# --- the plot --------------------------------------------------------------------------------------------------------


def test_both_bounds_of_a_head_are_drawn(tmp_path: Path) -> None:
    plan = make_head_plan(
        HeadConfig(**{**HEAD, "target_epsilon": None, "noise_multiplier": 4.0, "num_steps": 20_000}),
        num_examples=67_349,
    )
    found = head_bounds(plan)
    assert 20_000 in found["steps"] and found["free_after"] < found["steps"][-1]
    assert all(up >= low for up, low in zip(found["upper"], found["lower"], strict=True))
    plot(found, tmp_path / "head.png")
    assert (tmp_path / "head.png").stat().st_size > 10_000
