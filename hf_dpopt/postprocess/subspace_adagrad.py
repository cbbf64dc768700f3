"""Released gradients in a public subspace: projection, and AdaGrad with a full matrix of its coordinates.

Shape legend: k = rank of the subspace.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess.maps import Postprocess
from hf_dpopt.postprocess.noise_level import NoiseLevel
from hf_dpopt.public.subspace import COORDINATES, PublicSubspace, retained


class ProjectedGradient(Postprocess):
    r"""``V V^T g~``: what of the released gradient lies in the public subspace (projected DP-SGD).

    Takes either gradients of the parameters, which it projects (noise first, the paper's order), or the coordinates
    ``{"subspace": (k,)}`` of a `ProjectingEngine`, which were clipped and noised there. Noise outside the subspace is
    gone; so is the gradient outside of it, which no later step brings back.

    Args:
        subspace: V; a `RefreshedSubspace` is refreshed here when due, or by the engine where there is one.

    References:
        Zhou, Wu and Banerjee (2021), arXiv:2007.03813, Alg. 1.
    """

    name = "projected"

    def __init__(self, subspace: PublicSubspace):
        self.subspace = subspace

    def __call__(self, released: Released, /) -> Released:
        if released.keys() == {COORDINATES}:
            coordinates = released[COORDINATES]
        else:
            self.subspace.advance()
            coordinates = self.subspace.project(released)
        return Released(self.subspace.lift(self._precondition(coordinates)))

    def _precondition(self, coordinates: torch.Tensor) -> torch.Tensor:
        return coordinates

    def parameters(self) -> dict[str, Any]:
        """Public options, for a report."""
        return {"name": self.name, **self.subspace.parameters()}

    def state_dict(self) -> dict[str, Any]:
        """The subspace's state: k copies of the parameters."""
        return {"subspace": self.subspace.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.subspace.load_state_dict(state["subspace"])


class SubspaceAdaGrad(ProjectedGradient):
    r"""``V H_t^+ u~_t`` with ``u~_t = V^T g~_t`` and ``H_t = S_t^{1/2} + eps I``, at no privacy cost.

    ``S_t = sum_{s<=t} (u~_s u~_s^T - v_s I)`` is made of released coordinates, v_s the noise variance of one, so its
    mean is that of ``sum u_s u_s^T``. It acts on its eigenvectors with eigenvalues above the noise level, ``2 sqrt(k
    sum v_s^2) + k max v_s``: where those of S_t end when there is no gradient at all (Marchenko-Pastur). Other
    directions are dropped, negative eigenvalues with them, until they show: S_t grows with t, the level with sqrt(t).

    A refresh of V turns coordinates into others: ``S' = R S R^T`` with ``R = V_new^T V_old`` keeps what both bases
    see, and directions that are new start at zero.

    Departures from the paper: S_t of released instead of un-noised gradients (`GoePreconditioner` has the paper's, and
    its price), and no ball that weights go back to in the norm of H, for a map of gradients sees no weights; a convex
    head has it (`hf_dpopt.convex.SubspaceHeadConfig`).

    Args:
        subspace: V.
        noise: level of the noise of a coordinate.
        eps: added to the retained eigenvalues of ``S_t^{1/2}``; gradient units (of the mean), >= 0.

    Raises:
        DPConfigError: for a negative eps.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Sec. 4. Duchi, Hazan and Singer (2011), full-matrix AdaGrad.
    """

    name = "subspace_adagrad"

    def __init__(self, subspace: PublicSubspace, noise: NoiseLevel, *, eps: float = 1e-8):
        if not (math.isfinite(eps) and eps >= 0):
            raise DPConfigError(f"eps={eps} is no number >= 0. Use 1e-8, in units of the mean gradient.")
        super().__init__(subspace)
        self.noise, self.eps = noise, float(eps)
        self.second_moment = torch.zeros(subspace.rank, subspace.rank, dtype=torch.float64)  # S_t, (k, k)
        self._squared_variance = 0.0  # sum of v_s^2
        self._largest_variance = 0.0
        self._version = 0  # of the subspace whose coordinates S is in

    def set_noise(self, level: NoiseLevel) -> None:
        self.noise = level

    @property
    def noise_level(self) -> float:
        """Eigenvalues of S_t below are what noise alone gives; gradient units squared."""
        rank = self.subspace.rank
        return 2 * math.sqrt(rank * self._squared_variance) + rank * self._largest_variance

    def _precondition(self, coordinates: torch.Tensor) -> torch.Tensor:
        self._follow()
        u_k, variance = coordinates.detach().double().cpu(), self.noise.variance()
        self.second_moment += torch.outer(u_k, u_k) - variance * torch.eye(len(u_k), dtype=torch.float64)
        self._squared_variance += variance**2
        self._largest_variance = max(self._largest_variance, variance)
        values_K, vectors_kK = retained(self.second_moment, self.noise_level)
        return (vectors_kK @ ((vectors_kK.T @ u_k) / (values_K.sqrt() + self.eps))).to(coordinates)

    def _follow(self) -> None:
        """Take S to the coordinates of the subspace as it is now."""
        if self._version == self.subspace.version:
            return
        if self.subspace.version != self._version + 1 and self.second_moment.any():
            raise DPConfigError(
                f"The subspace was refreshed {self.subspace.version - self._version} times since the last step, and "
                "only the latest change of coordinates is known. Refresh it once per step at most."
            )
        self.second_moment = self.subspace.transition @ self.second_moment @ self.subspace.transition.T
        self._version = self.subspace.version

    def parameters(self) -> dict[str, Any]:
        return super().parameters() | {"eps": self.eps}

    def state_dict(self) -> dict[str, Any]:
        own = {
            "second_moment": self.second_moment,
            "squared_variance": self._squared_variance,
            "largest_variance": self._largest_variance,
            "version": self._version,
        }
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.second_moment = state["second_moment"].clone()
        self._squared_variance, self._largest_variance = state["squared_variance"], state["largest_variance"]
        self._version = state["version"]
