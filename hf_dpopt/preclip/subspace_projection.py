"""Training in the subspace of public gradients: clipped and noised there, or projected after the noise.

Before the clip a record is its coordinates, ``clip(V^T g_b)``, and noise has k dimensions instead of p. After the
noise, released gradients are projected, with AdaGrad on their coordinates if that is asked for.

Shape legend: B = records, T = tokens, P / Q = rows / columns of a weight, D = width of a table, N = P Q, k = rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import Contribution, Dense, Outer, Rows, Transposed
from hf_dpopt.clipping.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.thresholds import Clipping, usable
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.checks import check_choice, check_count, check_range
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess.maps import NoiseLevel, Postprocess
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.preclip.preconditioner import Preclip, Preconditioning, ScaleChanges
from hf_dpopt.public.public_gradients import PublicGradients
from hf_dpopt.public.subspace import COORDINATES, PublicSubspace, RefreshedSubspace, retained

MAX_FORMED = 2**22  # numbers of per-record gradients that exist at once


class ProjectingEngine(ClippingEngine):
    r"""``sum_b clip(u_b)`` with ``u_b = V^T g_b``: the per-record norm is that of k coordinates.

    What of a gradient lies outside the subspace neither takes part in the clip nor needs noise, so the same noise
    multiplier protects more signal than projection after the noise. One backward; each contribution is turned into
    coordinates and let go, so that at most one layer's gradient of a few records exists at a time.

    The sums are ``{"subspace": (k,)}``, and the noise is added to that tensor alone; `ProjectedGradient` or
    `SubspaceAdaGrad`, first in the chain, take it back to the parameters. In a loop of one's own::

        sums = engine.empty_sum()                                # once per logical batch; refreshes V when due
        engine.add_clipped_sum(sums, losses, num_records)        # per physical batch
        coordinates = sums.result()                              # {"subspace": (k,)}: sum over ranks, add noise
        gradients = subspace.lift(coordinates["subspace"])       # name -> tensor

    Formal guarantee: what one record adds to the sum has L2 norm at most `clipping.clipping_norm` in these coordinates
    (rounding of the sum aside), whatever V is; V may depend on public records and released weights alone. A record
    without finite coordinates or loss adds exactly nothing.

    Correlated noise is taken back within one V only: coordinates of two bases are different queries.

    Args:
        model: the model whose records are clipped.
        clipping: "flat" or "automatic".
        subspace: V; its `advance` is called by `empty_sum`.

    Raises:
        DPConfigError: for per-layer clipping, which knows layers and not coordinates.

    References:
        Zhou, Wu and Banerjee (2021), arXiv:2007.03813, project after the noise; the order here is that of Yu et al.
        (2021), arXiv:2102.12677 (GEP, its embedding), which clips and noises coordinates too.
    """

    name = "projecting"

    def __init__(self, model: nn.Module, clipping: Clipping, subspace: PublicSubspace):
        if not clipping.has_one_group:
            raise DPConfigError(
                "clipping='per_layer' bounds layers, and coordinates of a subspace belong to none. Use "
                "clipping='flat' or 'automatic' with project='before_clip'."
            )
        super().__init__(model, clipping)
        self.subspace = subspace

    def empty_sum(self, scale: Scale | None = None) -> ClippedSum:
        """A sum for the clipped coordinates of one logical batch. Begins the subspace's step."""
        if scale is not None:
            raise DPConfigError(
                "A per-record scale and a projection before the clip exclude each other: the subspace is that of "
                "plain gradients. Use project='after_noise', or no scaling."
            )
        self.subspace.advance()
        if self.subspace.basis.keys() != self.parameters.keys():
            others = ", ".join(sorted(self.subspace.basis.keys() ^ self.parameters.keys())[:5])
            raise DPConfigError(
                f"The subspace is not one of the trained parameters: {others}. Make PublicGradients and the engine of "
                "the same model, after parameters were frozen or unfrozen."
            )
        first = next(iter(self.subspace.basis.values()))
        return ClippedSum({COORDINATES: first.new_empty(1).expand(self.subspace.rank)})

    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int, units: Units | None = None
    ) -> UnprivatizedStatistics:
        found: list[torch.Tensor] = []

        def receive(name: str, use: Contribution) -> None:
            basis = self.subspace.basis[name]
            with torch.no_grad(), full_precision(basis.device.type):
                found.append(coordinates(use, basis))

        with self.capture.recording(num_records, receive, units):
            losses_B = self._forward(record_losses, num_records, units)
            self._backward(losses_B)
        with torch.no_grad(), full_precision(losses_B.device.type):
            ((group, squares_B),) = self._no_squares(losses_B).items()
            u_Bk = squares_B.unsqueeze(1).repeat(1, self.subspace.rank)  # zeros; not a number for a loss that is none
            for part in found:
                u_Bk += part
            squares = {group: squares_B + u_Bk.square().sum(dim=1)}
            factors, keep_B = self.clipping.factors(squares), usable(squares)
            sums.add(COORDINATES, Dense(u_Bk[keep_B]), factors[group][keep_B])
        return self._statistics(sums, losses_B, squares, factors, keep_B)

    def add_clipped(
        self, sums: ClippedSum, gradients: Mapping[str, torch.Tensor], losses_U: torch.Tensor | None = None
    ) -> UnprivatizedStatistics:
        assert gradients.keys() == self.parameters.keys(), gradients.keys() ^ self.parameters.keys()
        with torch.no_grad(), full_precision(next(iter(gradients.values())).device.type):
            parts = [coordinates(Dense(g_U), self.subspace.basis[name]) for name, g_U in gradients.items()]
            u_Uk = torch.stack(parts).sum(dim=0)
            squares = {group: u_Uk.square().sum(dim=1) for group in self._no_squares(u_Uk[:, 0])}
            factors, keep_U = self.clipping.factors(squares), usable(squares)
            for factors_U in factors.values():
                sums.add(COORDINATES, Dense(u_Uk[keep_U]), factors_U[keep_U])
        self._weights_U = None
        losses_U = torch.zeros(len(u_Uk)) if losses_U is None else losses_U
        return self._statistics(sums, losses_U, squares, factors, keep_U)


def coordinates(use: Contribution, basis: torch.Tensor) -> torch.Tensor:
    """``V^T g_b`` of one use of a parameter, (B, k), float32 or wider; `basis` is (k, *shape) of that parameter."""
    match use:
        case Transposed(of):
            return coordinates(of, basis.mT)
        case Rows(ids_BT, grad_BTD):
            grad_ND, ids_N = wide(grad_BTD).flatten(0, 1), ids_BT.flatten()
            # a gather for each direction: never a table per record
            inner = [(grad_ND * direction_VD.index_select(0, ids_N)).view(len(ids_BT), -1) for direction_VD in basis]
            return torch.stack([values.sum(dim=1) for values in inner], dim=1)
    basis_kN = basis.reshape(len(basis), -1)
    at_once = max(1, MAX_FORMED // max(1, basis_kN.size(1)))
    parts = [slice(first, first + at_once) for first in range(0, use.num_records, at_once)]
    return torch.cat([_form(use, part).reshape(-1, basis_kN.size(1)) @ basis_kN.T for part in parts])


def _form(use: Contribution, part: slice) -> torch.Tensor:
    """Gradients of some records, (b, *shape)."""
    match use:
        case Outer(left_BTP, right_BTQ):
            return torch.bmm(wide(left_BTP[part]).mT, wide(right_BTQ[part]))
        case Dense(grad_B):
            return wide(grad_B[part])
    raise AssertionError(type(use))


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

    Departures from the paper: S_t of released instead of un-noised gradients, and no ball that weights go back to in
    the norm of H, for a map of gradients sees no weights. `hf_dpopt.convex.SubspaceHeadConfig` has both.

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
        check_range("eps", eps, 0, math.inf)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicSubspaceProjection(Preclip):
    r"""``V V^T`` with V the top singular vectors of public gradients, and AdaGrad with a full matrix in between.

    Formal guarantee: as without it, for V depends on public records and released weights alone. Before the clip, a
    record is its k coordinates ``V^T g_b``: those are clipped, summed and noised, in k dimensions instead of all.

    Args:
        rank: k; >= 1. V takes k copies of the trained parameters.
        num_public: public records of a refresh, >= k; None for twice the rank.
        refresh_every: steps between two of them.
        project: "before_clip" (more signal per unit of sensitivity) or "after_noise" (the papers' order).
        adagrad: "none" for the projection alone, or "released" for `SubspaceAdaGrad`.
        eps: number added to AdaGrad's root; gradient units.

    Raises:
        DPConfigError: for values out of range, and an unknown ``adagrad``; "clean" keeps un-noised state.

    References:
        Kairouz et al. (2021), arXiv:2008.06570; Zhou, Wu and Banerjee (2021), arXiv:2007.03813.
    """

    rank: int = 16
    num_public: int | None = None
    refresh_every: int = 20
    project: str = "before_clip"
    adagrad: str = "none"
    eps: float = 1e-8
    name: ClassVar[str] = "subspace"
    needs_public_records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("refresh_every", self.refresh_every)
        if self.num_public is not None:
            check_count("num_public", self.num_public)
            if self.num_public < self.rank:
                raise DPConfigError(
                    f"rank={self.rank} is more than num_public={self.num_public}: m gradients span m directions at "
                    "most. Use num_public >= rank (two to five times the rank is usual), or a smaller rank."
                )
        check_choice("project", self.project, ("before_clip", "after_noise"))
        if self.adagrad not in ("none", "released"):
            raise DPConfigError(
                f"adagrad={self.adagrad!r} cannot be used here. Use 'none' or 'released'; a 'clean' matrix is made of "
                "un-noised gradients and costs budget of its own: recipes/linear_probe.py trains linear heads with it."
            )
        check_range("eps", self.eps, 0, math.inf)

    @property
    def num_public_records(self) -> int:
        """Public records of a refresh."""
        return self.num_public or 2 * self.rank

    @property
    def keeps_one_noise_level(self) -> bool:
        return False

    def changes(self, clipping_norm: float) -> ScaleChanges | None:
        if self.project == "after_noise":  # the noise is in the coordinates of the parameters
            return None
        return ScaleChanges((self.refresh_every,), (1.0,), is_taken_back=False)

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0


class SubspaceProjection(Preconditioning):
    """`PublicSubspaceProjection` at work. The noise lies in the subspace: no one gain, for coordinates differ."""

    _spec: PublicSubspaceProjection

    def __init__(self, spec: PublicSubspaceProjection, *of_run: Any):
        super().__init__(spec, *of_run)
        if not isinstance(self._public, PublicGradients):
            raise DPConfigError(
                "preconditioner='subspace' takes its directions from public records. Pass public_dataset to the "
                "trainer, or public=PublicGradients(..) to start."
            )
        subspace = RefreshedSubspace(
            self._public, rank=spec.rank, num_public=spec.num_public_records, refresh_every=spec.refresh_every
        )
        self._projected = ProjectedGradient(subspace)
        if spec.adagrad == "released":
            self._projected = SubspaceAdaGrad(subspace, self._noise, eps=spec.eps)

    def engine(self, engine: ClippingEngine) -> ClippingEngine:
        if self._spec.project == "after_noise":
            return engine
        return ProjectingEngine(engine.model, engine.clipping, self._projected.subspace)

    def scales(self) -> tuple[Scale | None, ...]:
        return (None,)

    def receive(self, released: Released) -> Released:
        return self._projected(released)

    def state_dict(self) -> dict[str, Any]:
        return self._projected.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._projected.load_state_dict(state)


PublicSubspaceProjection.at_work = SubspaceProjection


PRECLIPS[PublicSubspaceProjection.name] = (PublicSubspaceProjection, {})
