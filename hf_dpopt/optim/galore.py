"""Adam in the subspace of the strongest directions of released gradients."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from hf_dpopt.common.checks import check_choice, check_count, check_range
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.optim.adam import DPAdamBC
from hf_dpopt.optim.noise_aware import Group, NoiseAwareOptimizer, Tensors
from hf_dpopt.postprocess import Filter, NoiseLevel

Inner = Literal["adamw", "adam_bc"]
GRAM_CHUNK = 4096  # columns that are widened to float64 at a time


class DPGaLore(DPAdamBC):
    r"""Gradient low-rank projection of released gradients: filter, moments and update live in r dimensions.

    For a weight (m x n) with ``min(m, n) > rank``, every `refresh_every` steps P becomes the top-r left singular
    vectors of the gradient G_t for m < n, the right ones otherwise. Adam runs on ``P^T G_t`` (on ``G_t P``) and its
    update d moves the weight by ``w -= lr scale P d`` (``lr scale d P^T``). Moments, and the memory of a filter, are
    kept when P changes, in what are then other coordinates. Other tensors get the inner optimizer itself.

    All averages are float32 or wider. P comes from float64 arithmetic, and the entry of largest magnitude of each
    column is positive: the same gradients give the same bits on every rank with the same kind of device (on CPUs, the
    same number of threads too: matrix products depend on it).

    Noise: P has orthonormal columns, so noise of variance s^2 per coordinate that is independent of P has variance
    s^2 per projected coordinate, and ``inner="adam_bc"`` subtracts just that. In a refresh step it is too little: P
    is chosen from the same noise, whose largest directions it selects; for noise alone, up to
    ``s^2 (1 + sqrt(min / max))^2`` (sides of the weight) is left in a coordinate. Correlated noise carries this on to
    later steps, times the squared correlation with the refresh step.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        rank: r, >= 1.
        refresh_every: steps that share one P, >= 1.
        scale: factor of the projected update, >= 0.
        inner: ``adamw``, or ``adam_bc`` to subtract the noise; `variance_floor` is for the latter.
        noise: needed by `step` with ``inner="adam_bc"``.
        betas, eps, weight_decay, variance_floor, filter: the arguments of `DPAdamBC`.

    Raises:
        DPConfigError: for a value outside the ranges above.

    References:
        Zhao et al. (2024), arXiv:2403.03507, Alg. 2; here weights decay before the update, as in AdamW.
        Zhang et al. (2024), arXiv:2408.13460, Section C.2 (on released gradients, with a filter).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        rank: int,
        *,
        refresh_every: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        inner: Inner = "adamw",
        variance_floor: float | None = None,
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(
            lr=lr,
            rank=rank,
            refresh_every=refresh_every,
            scale=scale,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            inner=inner,
            variance_floor=variance_floor,
        )
        NoiseAwareOptimizer.__init__(self, params, defaults, noise=noise, filter=filter)

    def _check(self, group: Group) -> None:
        super()._check(group)
        check_count("rank", group["rank"])
        check_count("refresh_every", group["refresh_every"])
        check_range("scale", group["scale"], 0, float("inf"))
        check_choice("inner", group["inner"], get_args(Inner))

    def _subtracts_noise(self, group: Group) -> bool:
        return group["inner"] == "adam_bc"

    def _gradient(self, group: Group, p: torch.Tensor) -> torch.Tensor:
        """The projected gradient of a large matrix; this is where P is refreshed."""
        assert p.grad is not None
        wide = p.grad.to(torch.promote_types(p.dtype, torch.float32))
        if p.dim() != 2 or min(p.shape) <= group["rank"]:
            return wide
        wide = whole_of(wide)  # the projected gradient is small, and the same on every rank
        state = self.state[p]
        age = state.get("projector_age", 0)
        if age % group["refresh_every"] == 0:
            state["projector"] = projector(wide, group["rank"])
        state["projector_age"] = age % group["refresh_every"] + 1
        return _project(wide, state["projector"])

    def _move(
        self, group: Group, params: Tensors, numerators: Tensors, denominators: Tensors, step_sizes: list[float]
    ) -> None:
        plain = []
        for i, p in enumerate(params):
            if "projector" in self.state[p]:
                update = _lift(numerators[i] / denominators[i], self.state[p]["projector"], p)
                p.add_(cut_like(p, update), alpha=step_sizes[i] * group["scale"])
            else:
                plain.append(i)
        if plain:
            super()._move(
                group,
                [params[i] for i in plain],
                [numerators[i] for i in plain],
                [denominators[i] for i in plain],
                [step_sizes[i] for i in plain],
            )


def _is_wide(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] < matrix.shape[1]


def _project(gradient: torch.Tensor, projector: torch.Tensor) -> torch.Tensor:
    return projector.mT @ gradient if _is_wide(gradient) else gradient @ projector


def _lift(update: torch.Tensor, projector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return projector @ update if _is_wide(weight) else update @ projector.mT


def projector(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """The top singular vectors on the shorter side (the right ones of a square), largest first.

    From the Gram matrix of that side, in float64: as exact as the float32 gradient, and far cheaper than an SVD of
    768 x 50,257.

    Returns:
        (shorter side, rank), orthonormal columns, each with its entry of largest magnitude positive.
    """
    short = gradient if _is_wide(gradient) else gradient.mT
    gram = torch.zeros(short.shape[0], short.shape[0], dtype=torch.float64, device=short.device)
    for chunk in short.split(GRAM_CHUNK, dim=1):
        chunk = chunk.double()
        gram.addmm_(chunk, chunk.mT)
    top = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)
    peaks = top.gather(0, top.abs().argmax(dim=0, keepdim=True))
    return (top * peaks.sign()).to(gradient.dtype).contiguous()


OPTIMIZERS["dp_galore"] = DPGaLore
