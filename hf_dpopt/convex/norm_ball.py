"""Projection to a Euclidean ball in another norm: what AdaGrad does to weights that its step took out of the ball.

Shape legend: p = coordinates, k = directions with an eigenvalue of their own.
"""

from __future__ import annotations

import math

import torch
from scipy import optimize


def project_in_norm(
    point: torch.Tensor, radius: float, *, eigenvalues: torch.Tensor, directions: torch.Tensor, rest: float
) -> torch.Tensor:
    r"""Closest point of the ball ``|w| <= radius`` to `point` in the norm of H: ``argmin (w - y)^T H (w - y)``.

    ``H = sum_i h_i v_i v_i^T + rest (I - sum_i v_i v_i^T)`` is given by its eigenvectors, so nothing p x p exists. A
    point outside the ball goes to ``w = (H + lambda I)^{-1} H y`` on its border: directions that are cheap in the norm
    give way most. The multiplier ``lambda > 0`` is the one root of ``|w| = radius``, for ``|w|`` falls with it; it
    lies between ``h (|y| / radius - 1)`` of the smallest and of the largest eigenvalue, and is found by Brent's
    method on its logarithm. With equal eigenvalues this is the Euclidean projection.

    Args:
        point: y, float64, (p,).
        radius: radius of the ball around 0, > 0; units of weights.
        eigenvalues: h_i > 0, float64, (k,); k = 0 for a multiple of the identity.
        directions: v_i, orthonormal rows, float64, (k, p).
        rest: eigenvalue of everything orthogonal to the directions, > 0.

    Returns:
        The projection, float64, (p,); `point` itself if it lies in the ball.

    References:
        Duchi, Hazan and Singer (2011), JMLR 12, Sec. 1.1 (projection in the Mahalanobis norm). The step of Kairouz et
        al. (2021), arXiv:2008.06570, Alg. 1, on a constrained domain.
    """
    assert radius > 0 and rest > 0 and bool((eigenvalues > 0).all()), "H is positive definite, and the ball no point"
    norm = float(point.norm())
    if norm <= radius:
        return point
    inner_k = directions @ point
    outer_p = point - inner_k @ directions
    # one number stands for everything orthogonal to the directions: it shrinks by one factor
    squares = torch.cat([inner_k.square(), outer_p.square().sum().unsqueeze(0)])
    values = torch.cat([eigenvalues, eigenvalues.new_tensor([rest])])
    multiplier = _multiplier(squares, values, radius, norm)
    shares = values / (values + multiplier)
    projected_p = (shares[:-1] * inner_k) @ directions + shares[-1] * outer_p
    return projected_p * min(1.0, radius / float(projected_p.norm()))  # rounding must not lead beyond the ball


def _multiplier(squares: torch.Tensor, values: torch.Tensor, radius: float, norm: float) -> float:
    """The root lambda of ``sum_i (h_i / (h_i + lambda))^2 s_i = radius^2``; > 0."""

    def excess(log_multiplier: float) -> float:
        shares = values / (values + math.exp(log_multiplier))
        return float((shares.square() * squares).sum()) / radius**2 - 1

    gap = norm / radius - 1
    low, high = (math.log(float(value) * gap) for value in (values.min(), values.max()))
    if excess(low) <= 0:  # all eigenvalues are equal, or nothing lies in directions of larger ones
        return math.exp(low)
    if excess(high) >= 0:
        return math.exp(high)
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-15, rtol=1e-15))
