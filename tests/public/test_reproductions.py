"""The reproductions of recipes/paper/subspace: what theory says exactly, on runs of a second."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hf_dpopt.convex import SubspaceHeadConfig, make_subspace_plan
from recipes.paper.subspace import risk


def _excess(method, p, in_ball, rate, num_steps=12, seed=3):
    problem = risk.make_data(p, risk.RANK, seed, risk.NUM_RECORDS, risk.SCALE)
    noise = risk.noise_of(num_steps, risk.NUM_RECORDS, risk.EPSILON)
    return risk.excess(method, problem, problem.radius if in_ball else risk.WIDE, num_steps, noise, rate, seed)


def test_noise_outside_of_the_data_does_not_matter_to_a_linear_model():
    """Theorem 5.1: on data of rank 4, DP-GD has one risk in 64 and in 1,024 dimensions, about that of projected DP-GD."""
    few, many = (_excess(risk.GD, p, False, 4.0) for p in (64, 1024))
    assert 0.3 < few / many < 3 and 0.3 < few / _excess(risk.PROJECTED, 64, False, 4.0) < 3


def test_in_a_ball_it_does_and_projection_mends_it():
    """Noise of 1,024 dimensions fills the radius; noise of 4 does not."""
    assert _excess(risk.PROJECTED, 1024, True, 32.0) < _excess(risk.GD, 1024, True, 32.0) / 10


def test_without_noise_every_method_finds_the_least_risk():
    """The least risk is one, the step is one in the weights of a logistic model, and no ball is in the way."""
    for method, rate in ((risk.GD, 20.0), (risk.PROJECTED, 20.0), (risk.RELEASED, 5.0), (risk.ALGORITHM_1, 5.0)):
        problem = risk.make_data(8, risk.RANK, 0, 200, risk.SCALE)
        assert 0 < risk.excess(method, problem, risk.WIDE, 2000, 0.0, rate, 0) < 0.01, method
    inside = risk.make_data(8, risk.RANK, 0, 200, None, 5.0)
    assert inside.radius == pytest.approx(5.0, rel=1e-6)
    assert 0 < risk.excess(risk.ALGORITHM_1, inside, 5.0, 500, 0.0, 5.0, 0) < 0.01


def test_noise_is_that_of_the_budget():
    config = SubspaceHeadConfig(
        head_radius=1.0, feature_norm=1.0, expected_batch_size=100, num_steps=7, target_delta=risk.DELTA,
        noise_multiplier=risk.noise_of(7, 100, 0.5), adagrad="clean", envelope=0.5,
    )  # fmt: skip
    assert make_subspace_plan(config, num_examples=100).epsilon() == pytest.approx(0.5, rel=1e-6)


def test_the_fewest_steps_that_are_enough():
    line = [
        {"steps": t, "excess": list(mean + 0.01 * np.arange(3) * (i + 1)), "mean": mean}
        for i, (t, mean) in enumerate([(1, 0.5), (4, 0.2), (16, 0.19), (64, 0.3)])
    ]
    assert risk._enough(line) == {"best": 16, "best_mean": 0.19, "enough": 4}


def test_the_numbers_in_the_documentation_are_those_of_the_runs(pytestconfig):
    """All files name their command and its seeds, and hold no folder of the machine that they come from."""
    folder = pytestconfig.rootpath / "docs"
    shown = (folder / "reproductions.md").read_text(encoding="utf-8")
    for name, module in (("risk", "risk"), ("features", "task"), ("head", "head"), ("task", "task")):
        path = folder / "reproductions" / f"subspace_{name}.json"
        numbers = json.loads(path.read_text(encoding="utf-8"))
        assert numbers["command"].startswith(f"python -m recipes.paper.subspace.{module}")
        parts = [numbers[part] for part in ("dimension", "steps") if part in numbers] or [numbers]
        assert "/" not in numbers["command"] and all(len(part["seeds"]) >= 3 for part in parts)
        assert path.with_suffix(".png").exists()
        for row in numbers.get("rows", ()):
            assert f"{100 * row['mean']:.1f}" in shown, row["row"]
