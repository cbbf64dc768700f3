"""Clipping in the coordinates of a public subspace: ``clip(V^T g_b)``, and noise in k dimensions instead of p.

Shape legend: B = records, T = tokens, P / Q = rows / columns of a weight, D = width of a table, N = P Q, k = rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import Contribution, Dense, Outer, Rows, Transposed
from hf_dpopt.clipping.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.thresholds import Clipping, usable
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.public.subspace import COORDINATES, PublicSubspace

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
