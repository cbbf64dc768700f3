"""The projection in the norm of H: against a general solver, by what it has to satisfy, and where it is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

from hf_dpopt.convex.adagrad import project_in_norm


def problem(p, k, seed, spread=3.0):
    """A point, and H by its eigenvectors: k of them, and the same value for all others."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.standard_normal((p, p)))[0][:, :k].T
    values, rest = np.exp(spread * rng.standard_normal(k)), float(np.exp(spread * rng.standard_normal()))
    return rng.standard_normal(p), directions, values, rest


def matrix(directions, values, rest):
    inner = directions.T @ directions
    return directions.T @ np.diag(values) @ directions + rest * (np.eye(directions.shape[1]) - inner)


def projected(point, directions, values, rest, radius):
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (point, values, directions)]
    found = project_in_norm(tensors[0], radius, eigenvalues=tensors[1], directions=tensors[2], rest=rest)
    assert found.dtype == torch.float64 and found.shape == tensors[0].shape
    return found.numpy()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_it_is_what_a_general_solver_finds(k, seed):
    point, directions, values, rest = problem(6, k, seed, spread=1.0)
    radius, h = 0.4 * np.linalg.norm(point), matrix(directions, values, rest)
    slow = optimize.minimize(
        lambda w: (w - point) @ h @ (w - point), np.zeros(6), jac=lambda w: 2 * h @ (w - point), method="SLSQP",
        constraints={"type": "ineq", "fun": lambda w: radius**2 - w @ w, "jac": lambda w: -2 * w},
        options={"ftol": 1e-15, "maxiter": 500},
    )  # fmt: skip
    found = projected(point, directions, values, rest, radius)
    np.testing.assert_allclose(found, slow.x, atol=3e-6 * radius)
    assert (found - point) @ h @ (found - point) <= slow.fun * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_no_point_of_the_ball_is_closer(k, seed):
    """Its first-order condition, which is enough: ``H (y - w) = lambda w`` with lambda > 0, on the border.

    Eigenvalues differ by up to 1e9 and more, radii from a millionth of the point's norm to nearly all of it.
    """
    point, directions, values, rest = problem(40, k, seed, spread=5.0)
    h = matrix(directions, values, rest)
    for share in (1e-6, 0.1, 0.9, 1 - 1e-9):
        radius = share * np.linalg.norm(point)
        found = projected(point, directions, values, rest, radius)
        assert radius * (1 - 1e-12) <= np.linalg.norm(found) <= radius * (1 + 1e-15)
        force = h @ (point - found)
        multiplier = force @ found / (found @ found)
        scale = np.abs(h).sum(axis=1).max() * np.linalg.norm(point)  # that rounding is relative to
        assert multiplier > -1e-12 * scale / radius and np.linalg.norm(force - multiplier * found) <= 1e-12 * scale
        np.testing.assert_allclose(projected(found, directions, values, rest, radius), found, rtol=1e-12)


def test_points_of_the_ball_stay():
    point, directions, values, rest = problem(6, 2, 0)
    for radius in (np.linalg.norm(point), 1e9):
        assert (projected(point, directions, values, rest, radius) == point).all()
    assert not projected(np.zeros(6), directions, values, rest, 1.0).any()


def test_a_matrix_that_is_not_positive_definite_is_none():
    point, directions, values, rest = problem(6, 2, 0)
    with pytest.raises(AssertionError, match="positive definite"):
        projected(point, directions, np.array([0.0, 1.0]), rest, 0.1)
    with pytest.raises(AssertionError, match="positive definite"):
        projected(point, directions, values, 0.0, 0.1)
