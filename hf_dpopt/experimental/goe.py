"""AdaGrad's matrix of un-noised gradients, released with noise of its own: the preconditioner of arXiv:2008.06570.

Shape legend: k = rank of the subspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_dpopt.common.checks import check_count, check_noise_multiplier
from hf_dpopt.experimental.subspace_accounting import GoeRelease, goe_sensitivity
from hf_dpopt.public.subspace import retained
from hf_dpopt.randomness.source import NoiseSource

OWN_TENSOR = 2**31  # gradients number theirs from 0: under one key, no draw is shared with them


def gaussian_orthogonal_ensemble(rank: int, stddev: float, source: NoiseSource, step: int) -> torch.Tensor:
    r"""A symmetric noise matrix, float64, (k, k): ``stddev (Z + Z^T) / 2`` with independent standard normals Z.

    Diagonal entries have variance ``stddev^2``, the others ``stddev^2 / 2``, for they count twice in a Frobenius norm:
    in the coordinates ``(G_ii, sqrt(2) G_ij)``, in which that norm is the Euclidean one, the noise is isotropic. So a
    symmetric matrix of Frobenius sensitivity D is protected like a vector of L2 sensitivity D, by stddev / D.
    """
    z_kk = source.normal((rank, rank), step=step, tensor=OWN_TENSOR).double()
    return stddev * (z_kk + z_kk.T) / 2


class GoePreconditioner:
    r"""``H_t = G_t + B_t`` with ``G_t = (sum_{s<=t} u_s u_s^T)^{1/2}``, u_s un-noised sums of clipped gradients.

    For training loops of your own: it reads un-noised sums, which only the private core may see.
    **Its state is secret**: never under an output directory, never logged. `step.py`'s order with it, once per step::

        u = {"subspace": (k,)}, summed by a `ProjectingEngine` and over all ranks; `rotate` after a refresh of V
        preconditioner.accumulate(u["subspace"])
        noise.add_(u, step); preconditioner.release(step)
        update = subspace.lift(preconditioner.apply(u["subspace"]))

    Formal guarantee: if one record moves each u_s that it takes part in by at most ``clipping_norm`` (twice that under
    ``replace_one``), and takes part in at most ``max_participations(t)`` of the first t steps, `release` of step t is
    a Gaussian mechanism with ``noise_multiplier``; its releases and those of the gradients compose adaptively,
    **without amplification by sampling**: G_t depends on the batches of all earlier steps, so their random draws are
    used again. `experimental.subspace_accounting.goe_budget` adds both parts up.

    The paper's Lemma 4.1 bounds the movement of G_t by O(L sqrt(t) / n) with a proof that drops cross terms. Here:
    ``G_t = |X|`` for X the stacked u_s, a neighbour has ``X + E`` with at most p_t rows of E of norm at most C, and
    ``|| |X + E| - |X| ||_F <= sqrt(2) ||E||_F`` (Araki and Yamagami 1981), so G_t moves by at most ``sqrt(2 p_t) C``,
    and there are neighbours that do. For another basis of the subspace the u_s are rotated (`rotate`), which moves
    neighbours no further apart.

    Expect little of it on language models: a direction counts only once the root mean square of its u_s exceeds
    ``2 z C sqrt(k p_t / t)``, z the noise multiplier, and what H costs is taken from the gradients. The preconditioner
    of `SubspaceAdaGrad` is made of released gradients and costs nothing.

    Args:
        rank: k.
        clipping_norm: bound on one record's share of u_s (un-normalised), gradient units.
        noise_multiplier: noise stddev / sensitivity of every release; unitless, > 0.
        max_participations: steps t -> p_t; ``sampler.max_participations`` of a `FixedOrderSampler`, say.
        source: normals under a key of its own (``derive_key(noise_key, "preconditioner")``), never the gradients'.
        adjacency: decides whether a record is removed or replaced.
        eps: added to the retained eigenvalues of H_t; gradient units of the sum.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Sec. 4. Araki and Yamagami (1981), Comm. Math. Phys. 81, 89-96.
    """

    def __init__(
        self,
        rank: int,
        *,
        clipping_norm: float,
        noise_multiplier: float,
        max_participations: Callable[[int], int],
        source: NoiseSource,
        adjacency: str = "zero_out",
        eps: float = 0.0,
    ):
        check_count("rank", rank)
        check_noise_multiplier(noise_multiplier)
        self.rank, self.clipping_norm, self.noise_multiplier = int(rank), clipping_norm, noise_multiplier
        self.max_participations, self.adjacency, self.eps = max_participations, adjacency, eps
        self._source = source
        # Secret: R with R^T R = sum_s u_s u_s^T. The sum itself would lose half of the digits of its root, and what is
        # rounded away must stay small beside one record.
        self._factor = torch.zeros(rank, rank, dtype=torch.float64)
        self._num_steps = 0
        self._last_released = -1
        self.matrix: torch.Tensor | None = None  # H_t of the latest release, float64, (k, k); public
        self.floor = 0.0  # eigenvalues of H_t below are noise
        self.releases: list[GoeRelease] = []  # for `subspace_accounting.goe_budget`
        goe_sensitivity(1, clipping_norm, adjacency)  # refuses bad values

    def sensitivity(self) -> float:
        """Largest Frobenius change of G_t, after the steps so far, between adjacent datasets; gradient units."""
        return goe_sensitivity(self.max_participations(self._num_steps), self.clipping_norm, self.adjacency)

    def accumulate(self, clipped_sum: torch.Tensor) -> None:
        """Add ``u u^T`` for the un-noised sum u of a step, (k,), over all ranks; once per step, also an empty one."""
        u_k = clipped_sum.detach().double().cpu()
        self._factor = torch.linalg.qr(torch.cat([self._factor, u_k.unsqueeze(0)])).R
        self._num_steps += 1

    def release(self, step: int) -> torch.Tensor:
        """Draw noise, spend budget, and release ``H_t = G_t + B_t``, symmetric, float64, (k, k); public.

        Args:
            step: optimizer step; larger than in every earlier call, for its noise hides one matrix only.
        """
        assert step > self._last_released, f"the noise of step {step} was used"
        assert self._num_steps > 0, "nothing was accumulated"
        self._last_released = step
        stddev = self.noise_multiplier * self.sensitivity()
        self.releases.append(GoeRelease(self.max_participations(self._num_steps), stddev))
        noise_kk = gaussian_orthogonal_ensemble(self.rank, stddev, self._source, step)
        _, values_k, right_kk = torch.linalg.svd(self._factor)
        self.matrix = right_kk.T * values_k @ right_kk + noise_kk
        self.floor = math.sqrt(2 * self.rank) * stddev  # edge of the semicircle of B_t
        return self.matrix

    def apply(self, coordinates: torch.Tensor) -> torch.Tensor:
        """``(H_t + eps)^+ u~`` on the eigenvectors of H_t above the noise, (k,); u~ a released sum of coordinates."""
        assert self.matrix is not None, "nothing was released"
        values_K, vectors_kK = retained(self.matrix, self.floor)
        u_k = coordinates.detach().double().cpu()
        return (vectors_kK @ ((vectors_kK.T @ u_k) / (values_K + self.eps))).to(coordinates)

    def rotate(self, transition_kk: torch.Tensor) -> None:
        """Change the basis of secret and released matrices by `PublicSubspace.transition`, of norm at most 1."""
        self._factor = torch.linalg.qr(self._factor @ transition_kk.T).R
        if self.matrix is not None:
            self.matrix = transition_kk @ self.matrix @ transition_kk.T
