"""Steps of orthogonalised momentum for matrices, with the bias that noise leaves after that map taken off.

Shape legend: m = shorter side, n = longer side of a matrix.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.optim.adam import DPAdamBC, Form
from hf_dpopt.optim.base import Group, NoiseAwareOptimizer, Tensors, check_range
from hf_dpopt.postprocess import Filter, NoiseLevel
from hf_dpopt.postprocess.noise_level import variance_of_momentum
from hf_dpopt.postprocess.spectral import left_singular

Inner = Literal["adamw", "adam_bc"]
POLYNOMIALS = {1: (1.5, -0.5, 0.0), 2: (1.875, -1.25, 0.375)}  # of x, by degree: 1 / sqrt(x) around x = 1
MAX_ITERATIONS = 30
MAX_CORRECTED = 10  # at 15 the corrected step of 384 x 384 entries of noise is 38 times the plain one, at 10 it is 3.9


class DPMuon(DPAdamBC):
    r"""Muon on released gradients: the momentum of a matrix, with its singular values drawn towards 1 (DP-Muon).

    ``M_t = momentum M_{t-1} + g_t``, ``w -= lr scale sqrt(max side) O(M_t)``, where O is `iterations` times
    ``X <- p(X X^T) X`` from ``X = M / |M|_F`` (Newton-Schulz): on the singular values an odd function f with slope
    ``p(0)^iterations`` at 0 that goes to 1, on the singular vectors nothing. With all singular values at 1 an entry of
    the step has the root mean square ``lr scale``, so one learning rate serves the tensors that are no matrices, too:
    those get the inner optimizer, as do matrices with a side below `min_side` (heads of a few classes) or above
    `max_side` (vocabularies), and groups with ``"orthogonalize": False``.

    ``bias_correction=True`` (DP-MuonBC): noise of variance v per entry of M moves the mean of O(M) by
    ``v / 2 Laplacian(O)`` and higher orders, the smoothing of O by heat. That term is taken off, evaluated at the
    noisy M as everything private must be: ``O(M) - v/2 Laplacian(O)(M)``. It has the singular vectors of M, and with
    ``x = (singular value / |M|_F)^2``, ``f = sqrt(x) P(x)``, ``H = x P`` and divided differences H[..]

    .. math::
        \tfrac v2 \Delta f_i = \frac{v \sqrt{x_i}}{|M|_F^2}
        \Big( (n - m - 1) P'(x_i) + 2 H[x_i, x_i, x_i] + 2 \sum_j H[x_i, x_i, x_j] \Big) .

    v is that of the momentum of the noise that was really added, correlated noise included. Directions that the noise
    fills are enlarged by it, those of strong signals hardly: less bias, more variance. The series is one in
    ``v n / |M|_F^2`` times the curvature of f, which is no small number where the noise is all there is.

    Post-processing: epsilon does not change.

    Departures from the paper, which could be read in excerpts only: records are clipped as the run says (flat, or per
    layer), where the paper clips each matrix to a norm of its own; M is divided by its norm also where that is below
    1, so that the map has no scale; the formula of the correction is derived here (|M|_F taken as given, which leaves
    out a term of relative order 1 / (m n)); the factor ``scale sqrt(max side)`` is that of Liu et al.

    Args:
        params: parameters or groups of them; a group may set `orthogonalize`.
        lr: learning rate, >= 0.
        momentum: decay of M, in [0, 1). A filter takes the place of M, bias-corrected as it is.
        bias_correction: takes the leading bias off; not with a filter, whose noise has no level of its own. It costs
            an eigendecomposition of the shorter side in the place of the iterations.
        scale: root mean square of an entry of a full step over lr, >= 0.
        iterations: steps of Newton-Schulz, 1 to 30; to 10 with `bias_correction`.
        degree: that of the polynomial p, 1 or 2.
        min_side: a matrix has a shorter side of so much at least, >= 1.
        max_side: and a longer side of so much at most.
        orthogonalize: default of the groups.
        inner: ``adamw``, or ``adam_bc`` to subtract the noise; `variance_floor` and `form` are for the latter.
        noise: needed by `step` with `bias_correction` and ``inner="adam_bc"``.
        betas, eps, weight_decay, variance_floor, form, filter: the arguments of `DPAdamBC`; `betas` and `eps` are
            for the inner optimizer alone.

    Raises:
        DPConfigError: for a value outside the ranges above, or a filter with `bias_correction`.

    References:
        Kim and Fan (2026), arXiv:2605.12994 (DP-Muon and DP-MuonBC).
        Jordan et al. (2024), Muon. Liu et al. (2025), arXiv:2502.16982 (the factor, and decoupled weight decay).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.95,
        bias_correction: bool = False,
        scale: float = 0.2,
        iterations: int = 5,
        degree: int = 2,
        min_side: int = 4,
        max_side: int = 16384,
        orthogonalize: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        inner: Inner = "adamw",
        variance_floor: float | None = None,
        form: Form = "clamped_variance",
        noise: NoiseLevel | None = None,
        filter: Filter | None = None,
    ):
        defaults = dict(
            lr=lr,
            momentum=momentum,
            bias_correction=bias_correction,
            scale=scale,
            iterations=iterations,
            degree=degree,
            min_side=min_side,
            max_side=max_side,
            orthogonalize=orthogonalize,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            inner=inner,
            variance_floor=variance_floor,
            form=form,
        )
        NoiseAwareOptimizer.__init__(self, params, defaults, noise=noise, filter=filter)

    def _check(self, group: Group) -> None:
        super()._check(group)
        check_range("momentum", group["momentum"], 0, 1)
        check_range("scale", group["scale"], 0, math.inf)
        for name in ("iterations", "min_side", "max_side"):
            check_count(name, group[name])
        if group["iterations"] > MAX_ITERATIONS:
            raise DPConfigError(f"iterations={group['iterations']} is above {MAX_ITERATIONS}. Use 5.")
        if group["bias_correction"] and group["iterations"] > MAX_CORRECTED:
            raise DPConfigError(
                f"iterations={group['iterations']} with bias_correction=True is above {MAX_CORRECTED}: the correction "
                "of so steep a map is larger than the step. Use 5."
            )
        if group["degree"] not in POLYNOMIALS:
            raise DPConfigError(
                f"degree={group['degree']!r} is unknown. Use one of: {', '.join(map(str, POLYNOMIALS))}."
            )
        if group["inner"] not in get_args(Inner):
            raise DPConfigError(f"inner={group['inner']!r} is unknown. Use one of: {', '.join(get_args(Inner))}.")
        if group["bias_correction"] and self.filter is not None:
            raise DPConfigError(
                "bias_correction=True needs the level of the noise in the momentum, and with a filter in its place "
                "there is none. Leave out one of the two."
            )

    def _subtracts_noise(self, group: Group) -> bool:
        return group["bias_correction"] or group["inner"] == "adam_bc"

    def _gradient(self, group: Group, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad.to(torch.promote_types(p.dtype, torch.float32))

    def _update(
        self, group: Group, params: Tensors, grads: Tensors, filtered: Tensors | None, variance: float
    ) -> None:
        plain = []
        for i, p in enumerate(params):
            if _is_turned(group, p):
                self._turn(group, p, grads[i], None if filtered is None else filtered[i])
            else:
                plain.append(i)
        if plain:
            chosen = None if filtered is None else [filtered[i] for i in plain]
            super()._update(group, [params[i] for i in plain], [grads[i] for i in plain], chosen, variance)

    def _denominators(self, group: Group, states: list[dict[str, Any]], variance: float) -> Tensors:
        if group["inner"] == "adam_bc":
            return super()._denominators(group, states, variance)
        return super(DPAdamBC, self)._denominators(group, states, variance)

    def _turn(self, group: Group, p: torch.Tensor, gradient: torch.Tensor, filtered: torch.Tensor | None) -> None:
        """One step of a matrix; where it lies in shards, so does its momentum, and every rank turns the whole."""
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if filtered is None:
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].mul_(group["momentum"]).add_(gradient)
        whole = whole_of(state["momentum"] if filtered is None else filtered)
        if group["bias_correction"]:
            assert self.noise is not None  # `step` has asked it
            before = state.get("noise_in_momentum", 0.0)
            noise = variance_of_momentum(self.noise, before, group["momentum"], state["step"])
            state["noise_in_momentum"] = noise
            turned = without_bias(whole, noise, iterations=group["iterations"], degree=group["degree"])
        else:
            turned = newton_schulz(whole, iterations=group["iterations"], degree=group["degree"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(cut_like(p, turned), alpha=-group["lr"] * group["scale"] * math.sqrt(max(p.shape)))


def _is_turned(group: Group, p: torch.Tensor) -> bool:
    return (
        group["orthogonalize"]
        and p.dim() == 2
        and min(p.shape) >= group["min_side"]
        and max(p.shape) <= group["max_side"]
    )


def newton_schulz(matrix: torch.Tensor, *, iterations: int, degree: int) -> torch.Tensor:
    """The matrix with its singular values drawn towards 1; zero stays zero."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    c0, c1, c2 = POLYNOMIALS[degree]
    unit = short * _scale(short)
    x = unit / torch.linalg.matrix_norm(unit).clamp(min=torch.finfo(short.dtype).tiny)
    for _ in range(iterations):
        gram = x @ x.mT
        x = c0 * x + torch.addmm(gram, gram, gram, beta=c1, alpha=c2) @ x
    return x if short is matrix else x.mT


def _scale(matrix: torch.Tensor) -> torch.Tensor:
    """Power of two that makes the largest entry about 1: squares of what remains of old gradients would be 0."""
    exponent = torch.frexp(matrix.abs().amax()).exponent.clamp(-125, 125)
    return torch.ldexp(matrix.new_ones(()), -exponent)


def without_bias(matrix: torch.Tensor, variance: float, *, iterations: int, degree: int) -> torch.Tensor:
    """`newton_schulz` less the leading term of what noise adds to its mean: ``variance / 2`` times its Laplacian.

    Args:
        matrix: what the noise is in.
        variance: that of the noise in an entry, >= 0; without noise this is `newton_schulz` but for rounding.
        iterations, degree: those of `newton_schulz`.
    """
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    m, n = short.shape
    scale = _scale(short)
    short, variance = short * scale, variance * float(scale) ** 2
    norm = float(torch.linalg.matrix_norm(short))
    if norm == 0:
        return torch.zeros_like(matrix)
    squares_m, vectors_mm = left_singular(short)
    x_m = squares_m.double() / norm**2
    p_m, slope_m, h_mm = _differences(x_m, iterations, POLYNOMIALS[degree])
    laplacian_m = (n - m - 1) * slope_m + 2 * h_mm.diagonal() + 2 * h_mm.sum(dim=1)
    gains_m = (p_m - variance / norm**2 * laplacian_m) / norm
    turned = (vectors_mm * gains_m.to(vectors_mm.dtype)) @ (vectors_mm.mT @ short)
    return turned if matrix.shape[0] <= matrix.shape[1] else turned.mT


def _differences(
    x_m: torch.Tensor, iterations: int, polynomial: tuple[float, float, float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""``P(x_i)``, ``P'(x_i)`` and ``H[x_i, x_i, x_j]`` of ``H = x P``, where ``sqrt(x) P(x)`` is what the steps make.

    Divided differences of products and compositions follow rules like those of derivatives, so nothing is divided, and
    equal values need no case of their own. In every step: y = what x has become, p = the polynomial at y; ``of_pairs``
    are divided differences over [x_i, x_j], ``d_`` derivatives by x_i.
    """
    c0, c1, c2 = polynomial
    y, d_y = x_m, torch.ones_like(x_m)
    big_p, d_big_p = torch.ones_like(x_m), torch.zeros_like(x_m)
    y_pairs, d_y_pairs = torch.ones_like(x_m.outer(x_m)), torch.zeros_like(x_m.outer(x_m))
    p_pairs, d_p_pairs = torch.zeros_like(y_pairs), torch.zeros_like(y_pairs)
    for _ in range(iterations):
        p, d_p = c0 + y * (c1 + c2 * y), (c1 + 2 * c2 * y) * d_y
        p_i, p_j, d_p_i = p[:, None], p[None, :], d_p[:, None]
        secant = c1 + c2 * (y[:, None] + y[None, :])
        step = secant * y_pairs  # p[x_i, x_j]
        d_step = c2 * d_y[:, None] * y_pairs + secant * d_y_pairs
        d_p_pairs = d_big_p[:, None] * step + big_p[:, None] * d_step + d_p_pairs * p_j
        p_pairs = big_p[:, None] * step + p_pairs * p_j
        big_p, d_big_p = big_p * p, d_big_p * p + big_p * d_p
        squared, d_squared = step * (p_i + p_j), d_step * (p_i + p_j) + step * d_p_i  # p^2[x_i, x_j]
        d_y_pairs = d_y[:, None] * squared + y[:, None] * d_squared + d_y_pairs * p_j.square()
        y_pairs = y[:, None] * squared + y_pairs * p_j.square()
        y, d_y = y * p * p, d_y * p * p + 2 * y * p * d_p
    return big_p, d_big_p, p_pairs + x_m[:, None] * d_p_pairs
