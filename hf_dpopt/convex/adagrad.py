"""AdaGrad in the subspace of public gradients: what a step asks of the records, and what becomes of its release.

Shape legend: K = labels, D = features, p = K D weights, k = rank, f <= k = directions that were found.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy import optimize

from hf_dpopt.convex.softmax_gradients import gradient_sum, record_gradients
from hf_dpopt.convex.subspace_plan import CLEAN, SubspaceHeadConfig
from hf_dpopt.public.subspace import PublicSubspace

HEAD = "head"  # name of the one parameter that the subspace is one of


class SubspaceDescent:
    r"""Iterates of `SubspaceHeadConfig`, from the release of each step.

    Formal guarantee: one record moves the vector that `query` returns by at most ``sqrt(2) R`` (rounding of float64
    aside), whatever the step; V depends on public records and earlier releases alone. `move` sees releases alone.
    With ``adagrad="clean"`` the vector holds two queries. One record moves each u_s by at most ``C_s = sqrt(2) R
    s^-envelope``, so X, whose rows are u_1 to u_t, by at most ``(sum_s C_s^2)^{1/2}``, and ``G_t = (X^T X)^{1/2} =
    |X|`` by at most ``sqrt(2)`` of that, for ``|| |X + E| - |X| ||_F <= sqrt(2) ||E||_F``; a new basis moves two X no
    further apart. Both are scaled so that their squares are the shares ``1 - matrix_share`` and ``matrix_share`` of
    ``2 R^2``. **The u_s are then kept, and are as secret as the records**: so is the state.

    Args:
        config: the settings.
        num_labels: K.
        public: features of public records, (m, D), m >= `rank`, and their labels, (m,).
        noise_multiplier: stddev of the noise on a release, over ``sqrt(2) R``.

    Raises:
        DPConfigError: for fewer public records than directions, or public gradients that are all zero.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Alg. 1. Its Lemma 4.1 has a G_t that moves by the same order, with a
        proof that drops cross terms; the inequality used here is of Araki and Yamagami (1981), Comm. Math. Phys. 81.
    """

    def __init__(
        self,
        config: SubspaceHeadConfig,
        num_labels: int,
        public: tuple[torch.Tensor, torch.Tensor],
        *,
        noise_multiplier: float,
    ):
        self._config, self._public = config, public
        self._stddev = noise_multiplier * config.lipschitz
        self.weights = torch.zeros(num_labels, public[0].size(1), dtype=torch.float64)
        self._mean = torch.zeros_like(self.weights)
        self._subspace = PublicSubspace(config.rank)
        # released: S = sum_s u~_s u~_s^T. clean: a secret factor R of ``R^T R = sum_s u_s u_s^T``, for the sum itself
        # would lose half of the digits of its root, and what is rounded away must stay small beside one record
        self._moment = torch.zeros(config.rank, config.rank, dtype=torch.float64)
        self._refresh()

    @property
    def result(self) -> torch.Tensor:
        """Mean of the iterates after each step, float64, (K, D); `weights` is the latest one."""
        return self._mean

    def query(self, features: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        """``V^T g`` of a step's records, float64, (f,), and with ``adagrad="clean"`` the matrix, (f + f (f + 1) / 2,).

        Refreshes V where it is due. Call it once per step.
        """
        config = self._config
        if step > 1 and (step - 1) % config.refresh_every == 0:
            self._refresh()
            turn = self._subspace.transition
            self._moment = torch.linalg.qr(self._moment @ turn.T).R if self._is_clean else turn @ self._moment @ turn.T
        bound = config.gradient_bound(step)
        u_f = self._directions() @ gradient_sum(features, labels, self.weights, bound).flatten()
        scale, matrix_scale = config.query_scales(step)
        if not self._is_clean:
            return scale * u_f
        row_k = torch.nn.functional.pad(u_f, (0, config.rank - len(u_f)))
        self._moment = torch.linalg.qr(torch.cat([self._moment, row_k.unsqueeze(0)])).R
        _, values_k, right_kk = torch.linalg.svd(self._moment)
        root_ff = (right_kk.T * values_k @ right_kk)[: len(u_f), : len(u_f)]  # the other entries are zero
        return torch.cat([scale * u_f, matrix_scale * symmetric_to_vector(root_ff)])

    def move(self, released: torch.Tensor, step: int) -> None:
        """Take the step that a release of `query` with noise asks for."""
        config, batch = self._config, self._config.expected_batch_size
        num_found = self._subspace.num_directions
        scale, matrix_scale = config.query_scales(step)
        u_f = released[:num_found] / (scale * batch)
        rest = config.eps**0.5  # eigenvalue of H outside of the subspace, and the least one inside
        if self._is_clean:
            noisy_ff = vector_to_symmetric(released[num_found:] / (matrix_scale * batch), num_found)
            edge = math.sqrt(2 * num_found) * self._stddev / (matrix_scale * batch)  # of the spectrum of noise alone
            values_f, vectors_ff = torch.linalg.eigh(noisy_ff)
            rest = max(rest, edge)
            roots_f = values_f.clamp(min=rest)
        elif config.adagrad == "released":
            moment_ff = self._moment[:num_found, :num_found]  # the other entries are zero
            moment_ff += torch.outer(u_f, u_f)
            values_f, vectors_ff = torch.linalg.eigh(moment_ff)
            roots_f = (values_f.clamp(min=0) + config.eps).sqrt()
        else:
            rest, roots_f, vectors_ff = 1.0, torch.ones_like(u_f), torch.eye(num_found, dtype=torch.float64)
        directions_fp = vectors_ff.T @ self._directions()
        change_p = ((vectors_ff.T @ u_f) / roots_f) @ directions_fp
        self.weights = project_in_norm(
            self.weights.flatten() - config.step_size * change_p,
            config.head_radius,
            eigenvalues=roots_f,
            directions=directions_fp,
            rest=rest,
        ).view_as(self.weights)
        self._mean += (self.weights - self._mean) / step

    @property
    def _is_clean(self) -> bool:
        return self._config.adagrad == CLEAN

    def _refresh(self) -> None:
        """Compute V from the public records at the weights of now, which are released."""
        self._subspace.refresh({HEAD: record_gradients(*self._public, self.weights)})

    def _directions(self) -> torch.Tensor:
        """Rows of ``V^T`` that were found, (f, p)."""
        return self._subspace.basis[HEAD].flatten(1)[: self._subspace.num_directions]

    def state_dict(self) -> dict[str, Any]:
        """State that a killed run goes on from."""
        return {
            "weights": self.weights,
            "mean": self._mean,
            "moment": self._moment,
            "subspace": self._subspace.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self._mean, self._moment = state["weights"], state["mean"], state["moment"]
        self._subspace.load_state_dict(state["subspace"])


def symmetric_to_vector(matrix_ff: torch.Tensor) -> torch.Tensor:
    """``(G_ii, sqrt(2) G_ij)``, coordinates in which the Frobenius norm is the Euclidean one, (f (f + 1) / 2,).

    Isotropic normals added to them are a matrix of the Gaussian orthogonal ensemble added to G: its diagonal has their
    variance, the other entries half of it.
    """
    rows, columns = torch.tril_indices(len(matrix_ff), len(matrix_ff))
    return torch.where(rows == columns, 1.0, 2.0).double().sqrt() * matrix_ff[rows, columns]


def vector_to_symmetric(vector: torch.Tensor, size: int) -> torch.Tensor:
    """Inverse of `symmetric_to_vector`, (size, size)."""
    rows, columns = torch.tril_indices(size, size)
    matrix_ff = vector.new_zeros(size, size)
    matrix_ff[rows, columns] = vector / torch.where(rows == columns, 1.0, 2.0).double().sqrt()
    return matrix_ff + matrix_ff.tril(-1).T


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
