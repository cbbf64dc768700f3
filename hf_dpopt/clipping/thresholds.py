"""Clip factors from per-record norms, and the `sensitivity` that the noise is scaled to.

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_choice
from hf_dpopt.common.errors import DPConfigError


def _safety(dtype: torch.dtype) -> float:
    # The factor is rounded, and so is the product with it: a few ulps of slack keep the released norm at or below
    # the bound. Relative 1e-6 in float32, 2e-15 in float64.
    return 1.0 - 8.0 * torch.finfo(dtype).eps


def usable(squared_norms: dict[str, torch.Tensor]) -> torch.Tensor:
    """Records whose squared norms are finite and not negative in every group, (B,); the others are dropped.

    A negative square is a rounding error as large as the norm itself: nothing could be clipped by it.
    """
    squares = torch.stack(list(squared_norms.values()))
    return (squares.isfinite() & (squares >= 0)).all(dim=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping:
    clipping_norm: float
    name: ClassVar[str]
    has_one_group: ClassVar[bool] = True  # one norm and one factor for all parameters of a record

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clipping_norm) and self.clipping_norm > 0):
            raise DPConfigError(
                f"clipping_norm={self.clipping_norm} bounds nothing. Give a finite number > 0 (gradient units); "
                "0.1 to 1 is a good first value for finetuning, and smaller values only rescale the learning rate."
            )

    def sensitivity(self, adjacency: str) -> float:
        """Largest L2 change of the clipped sum between adjacent datasets, in gradient units.

        Formal guarantee: whatever the records and the order of summation, the sum of `factors`-weighted records moves
        by at most this much (up to float32 rounding of the sum itself) when one record is added or removed
        (`add_or_remove_one`), replaced by a record without gradient (`zero_out`) or by any other (`replace_one`).
        """
        return SENSITIVITY_FACTOR[adjacency] * self.clipping_norm

    def group(self, parameter_name: str) -> str:
        """The clipping group of a parameter; the factor of a record is one number per group."""
        return ""

    def factors(self, squared_norms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Clip factors of every record.

        A record without a usable norm in any group is dropped: its factor is exactly 0 in all groups. Callers must
        *select* such records out, never multiply (0 * inf is NaN).

        Args:
            squared_norms: group -> squared L2 norms of the records' gradients, float32 or wider, (B,).

        Returns:
            group -> factors in [0, 1] times the shape of the rule, (B,).
        """
        keep_B = usable(squared_norms)
        bound = self._group_bound(len(squared_norms))
        return {
            group: torch.where(keep_B, self._factor(squares_B.sqrt(), bound) * _safety(squares_B.dtype), 0.0)
            for group, squares_B in squared_norms.items()
        }

    def _group_bound(self, num_groups: int) -> float:
        return self.clipping_norm

    def _factor(self, norms_B: torch.Tensor, bound: float) -> torch.Tensor:
        # norm 0 gives bound / 0 = inf, which the clamp turns into 1: nothing to clip. Squares vanish far below the
        # smallest bound that is allowed, see `checks.check_clipping_norm`.
        return (bound / norms_B).clamp(max=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatClipping(Clipping):
    r"""One bound on a record's whole gradient: ``g * min(1, C / ||g||)`` (Abadi et al. 2016, 1607.00133)."""

    name: ClassVar[str] = "flat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerClipping(Clipping):
    r"""Clip of every layer to ``C / sqrt(L)``, so that the whole record stays within C.

    A layer is a module that owns parameters (its weight and bias share one factor); L counts the layers that are
    trained. Equal shares: McMahan et al. (2018), arXiv:1710.06963, section 2.
    """

    name: ClassVar[str] = "per_layer"
    has_one_group: ClassVar[bool] = False

    def group(self, parameter_name: str) -> str:
        return parameter_name.rpartition(".")[0]

    def _group_bound(self, num_groups: int) -> float:
        return self.clipping_norm / math.sqrt(num_groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutomaticClipping(Clipping):
    r"""Normalisation instead of clipping: ``g * C / (||g|| + gamma)`` (Bu et al. 2022, arXiv:2206.07136, Eq. 4).

    The norm of a record stays below C. ``gamma`` is in gradient units; the paper's value is 0.01.
    """

    gamma: float = 0.01
    name: ClassVar[str] = "automatic"

    def _factor(self, norms_B: torch.Tensor, bound: float) -> torch.Tensor:
        return bound / (norms_B + self.gamma)


CLIPPINGS: dict[str, type[Clipping]] = {cls.name: cls for cls in (FlatClipping, PerLayerClipping, AutomaticClipping)}


def make_clipping(name: str, clipping_norm: float) -> Clipping:
    """The registered clipping rule of that name."""
    check_choice("clipping", name, CLIPPINGS)
    return CLIPPINGS[name](clipping_norm=clipping_norm)
