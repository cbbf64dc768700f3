"""The subspace that public gradients span, and coordinates in it.

Shape legend: m = public records, k = rank, K = directions found (K <= k), N = elements of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.public.public_gradients import Gradients, PublicGradients, check_finite

COORDINATES = "subspace"  # name of the one tensor that coordinates are summed, noised and released in
CHUNK = 2**20  # numbers taken to float64 at once
RESOLUTION = 1e-7  # share of the largest singular value below which a float64 Gram matrix shows rounding alone


class PublicSubspace:
    r"""Top-k right singular vectors of the public gradients ``X`` (m x p): ``V = X^T U L^{-1/2}``, (p x k).

    U and L come from the m x m Gram matrix in float64, summed parameter by parameter, so that neither p x p nor a
    concatenated X ever exists; a second pass makes the columns of V orthonormal to rounding. **Memory**: k copies of
    the trainable parameters, in checkpoints too; a refresh has the m copies of X besides.

    If public gradients are so collinear that fewer than k directions can be told from rounding (a singular value below
    ``m eps`` of the largest), those K are kept, and the other k - K coordinates are 0 until a refresh finds more: a
    run whose records were paid for goes on. `num_directions` says how many there are.

    Formal guarantee: V is a function of public records and of weights that are released. Projection lengthens no
    vector (float32 rounding aside), so one record moves ``V^T sum`` by at most what it moves the sum.

    Args:
        rank: k, >= 1.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Sec. 4 (subspace from public gradients).
        Zhou, Wu and Banerjee (2021), arXiv:2007.03813, Alg. 1 (top-k eigenvectors of their second moment).
    """

    def __init__(self, rank: int):
        check_count("rank", rank)
        self.rank = int(rank)
        self.basis: Gradients = {}  # name -> (k, *shape): the columns of V, in the parameters' shapes
        self.num_directions = 0
        self.version = 0  # how often V was made: coordinates of two versions mean different directions
        self.transition = torch.zeros(self.rank, self.rank, dtype=torch.float64)
        """``V_new^T V_old`` of the latest refresh, (k, k): takes the last version's coordinates to this one's."""

    def advance(self) -> None:
        """Begin a step; call it once per step, before its gradients. Without a schedule it only checks that V exists.

        Raises:
            DPConfigError: if there is no V yet.
        """
        if not self.basis:
            raise DPConfigError("The subspace has no directions yet. Call refresh(public.per_record(m)) first.")

    @torch.no_grad()
    def refresh(self, per_record: Mapping[str, torch.Tensor]) -> None:
        """Compute V again.

        Args:
            per_record: public gradients of m >= k records, name -> (m, *shape); the same names in every call.

        Raises:
            DPConfigError: for fewer records than directions, other parameters than before, or gradients that are not
                finite or all zero.
        """
        self._check(per_record)
        mix_mk, num_directions = current_ranks().same(lambda: self._mix(per_record))  # unlike processors would differ
        old_mk = _inner(per_record, self.basis) if self.basis else None
        for name, grads in per_record.items():
            self.basis[name] = _combine(mix_mk, grads)
        correction_kk = current_ranks().same(lambda: _inverse_root(_inner(self.basis, self.basis), num_directions))
        for name, columns in self.basis.items():
            self.basis[name] = _combine(correction_kk, columns)
        if old_mk is not None:
            self.transition = _contraction(correction_kk.T @ mix_mk.T @ old_mk)
        self.num_directions = num_directions
        self.version += 1

    def _check(self, per_record: Mapping[str, torch.Tensor]) -> None:
        sizes = {len(g) for g in per_record.values()}
        if len(sizes) != 1 or min(sizes) < self.rank:
            raise DPConfigError(
                f"{min(sizes, default=0)} public gradients span no subspace of rank {self.rank}. Use num_public >= "
                f"{self.rank} (two to five times the rank is usual), or a smaller rank."
            )
        if self.basis and per_record.keys() != self.basis.keys():
            changed = ", ".join(sorted(per_record.keys() ^ self.basis.keys())[:5])
            raise DPConfigError(
                f"Not the parameters that the subspace was made of: {changed}. Make a new PublicSubspace after "
                "parameters were frozen or unfrozen."
            )
        check_finite(dict(per_record))

    def _mix(self, per_record: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Compute ``U L^{-1/2}``, (m, k) with zero columns after the K-th; and K."""
        values_m, vectors_mm = torch.linalg.eigh(_inner(per_record, per_record))
        values_k, vectors_mk = values_m.flip(0)[: self.rank], vectors_mm.flip(1)[:, : self.rank]
        if values_k[0] <= 0:
            raise DPConfigError(
                "All public gradients are zero, so they span nothing. Use public records that the model has not "
                "fitted perfectly, with targets, and with the task's loss."
            )
        precision = max(torch.finfo(g.dtype).eps for g in per_record.values())
        is_found_k = values_k.clamp(min=0).sqrt() > max(RESOLUTION, len(values_m) * precision) * values_k[0].sqrt()
        signs_k = vectors_mk.gather(0, vectors_mk.abs().argmax(dim=0, keepdim=True)).sign().squeeze(0)
        mix_mk = vectors_mk * torch.where(is_found_k, signs_k * values_k.clamp(min=1e-300).rsqrt(), 0.0)
        return mix_mk, int(is_found_k.sum())

    @torch.no_grad()
    def project(self, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``V^T g``, (k,), in the dtype of V."""
        parts = [_rows(self.basis[name]) @ g.to(self.basis[name].dtype).flatten() for name, g in grads.items()]
        return torch.stack([part.double() for part in parts]).sum(dim=0).to(parts[0].dtype)

    @torch.no_grad()
    def lift(self, coordinates: torch.Tensor) -> Gradients:
        """``V u``: name -> tensor of the parameter's shape, from coordinates (k,)."""
        return {
            name: (coordinates.to(columns) @ _rows(columns)).view(columns.shape[1:])
            for name, columns in self.basis.items()
        }

    def parameters(self) -> dict[str, Any]:
        """Settings of the subspace, for the report."""
        return {"rank": self.rank}

    def state_dict(self) -> dict[str, Any]:
        """State with V, which has the size of k copies of the parameters."""
        return {
            "basis": dict(self.basis),
            "num_directions": self.num_directions,
            "version": self.version,
            "transition": self.transition,
            "rank": self.rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DPConfigError: if the state is that of another rank.
        """
        if state["rank"] != self.rank:
            raise DPConfigError(
                f"The checkpoint has a subspace of rank {state['rank']}, not {self.rank}. Resume with that rank."
            )
        self.basis = {name: columns.clone() for name, columns in state["basis"].items()}
        self.num_directions, self.version = state["num_directions"], state["version"]
        self.transition = state["transition"].clone()


class RefreshedSubspace(PublicSubspace):
    """A subspace that is recomputed from public gradients at the current weights every `refresh_every` steps.

    Args:
        public: source of the public gradients.
        rank: k, >= 1.
        num_public: m, public records of a refresh, each a forward and a backward; >= k.
        refresh_every: steps between refreshes, >= 1; the first step always has one. The paper's theory has 1; a
            subspace that changes slowly is estimated as well by a few records every 10 to 100 steps.

    Raises:
        DPConfigError: for counts that do not fit together.
    """

    def __init__(self, public: PublicGradients, *, rank: int, num_public: int, refresh_every: int = 1):
        super().__init__(rank)
        check_count("refresh_every", refresh_every)
        public.check_draw(num_public)
        if num_public < rank:
            raise DPConfigError(
                f"num_public={num_public} records span no subspace of rank {rank}. Use num_public >= {rank} (two to "
                "five times the rank is usual), or a smaller rank."
            )
        self.public, self.num_public, self.refresh_every = public, int(num_public), int(refresh_every)
        self._num_steps = 0

    def advance(self) -> None:
        """Begin a step; refresh V if it is due."""
        if self._num_steps % self.refresh_every == 0:
            self.refresh(self.public.per_record(self.num_public))
        self._num_steps += 1

    def parameters(self) -> dict[str, Any]:
        schedule = {"num_public": self.num_public, "refresh_every": self.refresh_every}
        return super().parameters() | schedule | {"public": self.public.parameters()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_steps": self._num_steps, "public": self.public.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.basis = {name: columns.to(self.public.device) for name, columns in self.basis.items()}  # from the host
        self._num_steps = state["num_steps"]
        self.public.load_state_dict(state["public"])


def retained(matrix_kk: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues of a symmetric matrix that lie above `floor` (and above rounding), and their vectors (k, K)."""
    values_k, vectors_kk = torch.linalg.eigh(matrix_kk)
    is_kept_k = values_k > max(floor, 1e-12 * float(values_k[-1]))
    return values_k[is_kept_k], vectors_kk[:, is_kept_k]


def _inner(x: Mapping[str, torch.Tensor], y: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Inner products of the rows of x and y, summed over parameters; float64 on the CPU, (rows of x, rows of y)."""
    total: torch.Tensor | None = None
    for name in x:
        x_RN, y_SN = _rows(x[name]), _rows(y[name])
        at_once = max(1, CHUNK // (len(x_RN) + len(y_SN)))
        for a, b in zip(x_RN.split(at_once, dim=1), y_SN.split(at_once, dim=1), strict=True):
            product = a.double() @ b.double().T
            total = product if total is None else total + product
    assert total is not None
    return total.cpu()


def _combine(mix_RS: torch.Tensor, tensors: torch.Tensor) -> torch.Tensor:
    """Form combinations ``mix^T x`` of tensors x, (R, *shape) -> (S, *shape), in float64, returned in x's dtype."""
    x_RN, mix_SR = _rows(tensors), mix_RS.T.to(tensors.device)
    out_SN = x_RN.new_empty(len(mix_SR), x_RN.size(1))
    at_once = max(1, CHUNK // len(x_RN))
    for x, out in zip(x_RN.split(at_once, dim=1), out_SN.split(at_once, dim=1), strict=True):
        out.copy_(mix_SR @ x.double())
    return out_SN.view(-1, *tensors.shape[1:])


def _rows(tensors: torch.Tensor) -> torch.Tensor:
    return tensors.reshape(len(tensors), -1)


def _inverse_root(gram_kk: torch.Tensor, num_directions: int) -> torch.Tensor:
    """``gram^{-1/2}`` on the directions found; it makes nearly orthonormal columns orthonormal."""
    values, vectors = torch.linalg.eigh(gram_kk[:num_directions, :num_directions])
    out = torch.zeros_like(gram_kk)
    out[:num_directions, :num_directions] = vectors * values.rsqrt() @ vectors.T
    return out


def _contraction(matrix_kk: torch.Tensor) -> torch.Tensor:
    """Cut singular values at 1, where those of ``V_new^T V_old`` end but for rounding."""
    left, values, right = torch.linalg.svd(matrix_kk)
    return left * values.clamp(max=1.0) @ right
