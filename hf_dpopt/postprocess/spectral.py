"""Spectral denoising of released matrices: the level of the noise is known, so what its singular values hide is too.

Shape legend: m = shorter side, n = longer side of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.common.types import Gradients
from hf_dpopt.postprocess.base import Filter
from hf_dpopt.postprocess.buffers import (
    STORAGE,
    Shapes,
    arithmetic,
    check_same_filter,
    check_shapes,
    check_storage,
    on_host,
    storage_name,
)
from hf_dpopt.postprocess.noise_level import NoiseLevel, variance_of_momentum

Values = Literal["shrink", "restore"]


class SpectralDenoising(Filter):
    r"""Released matrices without the part of their spectrum that the noise alone would have.

    A matrix ``Y = G + s Z`` of m x n has, where G is nothing, all singular values below ``s (sqrt(m) + sqrt(n))`` (the
    edge of Marchenko and Pastur), and a singular value theta of G shows as ``y > theta``, turned away from its
    directions. With y and theta in units of ``s sqrt(n)`` and ``b = m / n``, everything at or below the edge
    ``1 + sqrt(b)`` is removed; a value above it becomes

    * ``shrink``: ``sqrt((y^2 - b - 1)^2 - 4 b) / y``, whose matrix is closest to G (mean squared error, large n);
    * ``restore``: ``theta = sqrt((y^2 - b - 1 + sqrt((y^2 - b - 1)^2 - 4 b)) / 2)``, the value that G had.

    With `average` a, the matrix is the bias-corrected average ``m_t = a m_{t-1} + (1 - a) g_t``, in which a signal
    that stays stands higher above the noise; the variance of its noise is followed, also where that is correlated. In
    the chain with ``average=0`` this is a map of the released gradient, which any optimizer takes; in an optimizer of
    `hf_dpopt.optim` it takes the place of the first moment. Tensors that are no matrices are averaged only.

    Post-processing: epsilon does not change. The level of what comes out is not one number, so optimizers that
    subtract the noise behind it in the chain are refused.

    Measured: it won against tuned DP-AdamW in no cell of docs/reproductions.md, and lost in most.

    Departures: the paper could be read in excerpts only; the shrinkage is that of Gavish and Donoho, derived from
    their model, `strength` is its "partial" restoration as we read it, and the average is ours.

    Args:
        noise: level of the noise of the released gradient; the run tells it.
        average: a, in [0, 1); 0 looks at single releases.
        values: what becomes of singular values above the edge.
        strength: share of the denoised matrix in the result, in [0, 1]; the rest is the noisy one.
        min_side: matrices with a shorter side are left as they are, >= 1. The formulas are those of large matrices.
        dtype: type of the buffers: None (that of the arithmetic), ``torch.float32`` or ``torch.bfloat16``.

    Raises:
        DPConfigError: for a value outside the ranges above.

    References:
        Dadsetan and Rudzicz (2025), arXiv:2510.01137 (denoising of released gradients).
        Gavish and Donoho (2017), IEEE Trans. Information Theory 63(4), Eq. 7 and 10.
    """

    def __init__(
        self,
        noise: NoiseLevel | None = None,
        *,
        average: float = 0.0,
        values: Values = "shrink",
        strength: float = 1.0,
        min_side: int = 2,
        dtype: torch.dtype | None = None,
    ):
        for name, number, is_open in (("average", average, True), ("strength", strength, False)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 1:
                raise DPConfigError(f"{name}={number!r} is outside [0, 1]. Use 0.9 for an average, 1 for a strength.")
            if is_open and number == 1:
                raise DPConfigError(f"{name}=1 would never move. Use a number in [0, 1): 0.9 is usual.")
        check_choice("values", values, get_args(Values))
        check_count("min_side", min_side)
        check_storage(dtype)
        self.noise, self.average, self.values, self.strength = noise, float(average), values, float(strength)
        self.min_side, self.dtype, self.num_steps = min_side, dtype, 0
        self._variance = 0.0  # of the noise in sum_i a^(t - i) g_i
        self._shapes: Shapes | None = None
        self._averages: dict[str, torch.Tensor] = {}

    @property
    def needs_noise_level(self) -> bool:
        return True

    def set_noise(self, level: NoiseLevel) -> None:
        self.noise = level

    def parameters(self) -> dict[str, Any]:
        """Public options, as JSON can hold them."""
        return {
            "name": "spectral", "average": self.average, "values": self.values, "strength": self.strength,
            "min_side": self.min_side, "dtype": storage_name(self.dtype),
        }  # fmt: skip

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], noise: NoiseLevel) -> SpectralDenoising:
        """The filter whose `parameters` these are, before its first step."""
        given = {name: value for name, value in parameters.items() if name != "name"}
        return cls(noise, **{**given, "dtype": STORAGE[given["dtype"]]})

    @torch.no_grad()
    def update(self, grads: Gradients) -> Gradients:
        """One step.

        Args:
            grads: name -> released gradient; the same names and shapes in every step. Left as they are.

        Returns:
            Name -> denoised (average of the) gradient, of the same dtype, in memory of the caller's own.

        Raises:
            DPConfigError: if names or shapes changed, or nobody told the level of the noise.
        """
        if self.noise is None:
            raise DPConfigError(
                "SpectralDenoising was not told the level of the noise. Pass noise=run.noise_level(), or "
                "IndependentNoise(0.0) where there is none."
            )
        self._shapes = check_shapes(self._shapes, grads)
        self.num_steps += 1
        a = self.average
        self._variance = variance_of_momentum(self.noise, self._variance, a, self.num_steps)
        correction = (1 - a) / (1 - a**self.num_steps)
        variance = self._variance * correction**2
        made = {}
        for name, grad in grads.items():
            matrix = self._averaged(name, grad) if a > 0 else grad.detach().to(arithmetic(grad))
            if grad.dim() == 2 and min(grad.shape) >= self.min_side:
                matrix = self._denoise(matrix, variance)
            made[name] = matrix.to(grad.dtype, copy=True)
        return made

    def _averaged(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        wide = grad.detach().to(arithmetic(grad))
        old = self._averages.get(name)
        new = wide * (1 - self.average)
        if old is not None:
            new.add_(old.to(wide.device, wide.dtype), alpha=self.average)
        self._averages[name] = new.to(self.dtype or new.dtype)
        return new / (1 - self.average**self.num_steps)

    def _denoise(self, matrix: torch.Tensor, variance: float) -> torch.Tensor:
        denoised = cut_like(matrix, denoise(whole_of(matrix), variance, self.values))
        return denoised if self.strength == 1 else self.strength * denoised + (1 - self.strength) * matrix

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, in the host's memory."""
        return {
            "parameters": self.parameters(),
            "num_steps": self.num_steps,
            "variance": self._variance,
            "shapes": None if self._shapes is None else dict(self._shapes),
            "averages": {name: on_host(average) for name, average in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, bit for bit, on the device of the next gradients.

        Raises:
            DPConfigError: for the state of another filter.
        """
        check_same_filter(state.get("parameters", {}), self.parameters())
        self.num_steps, self._variance = state["num_steps"], state["variance"]
        self._shapes = None if state["shapes"] is None else dict(state["shapes"])
        self._averages = {name: average.clone() for name, average in state["averages"].items()}


def denoise(matrix: torch.Tensor, variance: float, values: Values = "shrink") -> torch.Tensor:
    """A matrix of which singular values that noise explains are removed, and the others corrected for it.

    Args:
        matrix: either side may be the longer one.
        variance: that of the noise in a coordinate, >= 0; with 0 the matrix comes back as it is.
        values: see `SpectralDenoising`.
    """
    if variance == 0:
        return matrix
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    m, n = short.shape
    squares_m, vectors_mm = left_singular(short)
    y2, b = squares_m.double() / (variance * n), m / n
    inner = (y2 - b - 1).square() - 4 * b
    is_above = (y2 > (1 + math.sqrt(b)) ** 2) & (inner > 0)
    if not bool(is_above.any()):
        return torch.zeros_like(matrix)
    y2, root = y2[is_above], inner[is_above].sqrt()
    factors = root / y2 if values == "shrink" else ((y2 - b - 1 + root) / (2 * y2)).sqrt()
    chosen = vectors_mm[:, is_above]
    denoised = (chosen * factors.to(chosen.dtype)) @ (chosen.mT @ short)
    return denoised if short is matrix else denoised.mT


def left_singular(short: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared singular values (m,), smallest first, and left singular vectors (m, m) of a matrix (m, n), m <= n.

    From the Gram matrix of the shorter side, far cheaper than an SVD. What is made of them must not depend on values
    that are small against the largest one: those are rounding.
    """
    gram = short @ short.mT
    try:
        squares, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:  # float32 may not converge; a resumed run would come to the same matrix
        squares, vectors = (x.to(gram.dtype) for x in torch.linalg.eigh(gram.double()))
    return squares.clamp(min=0), vectors
