"""Rows of a batch that belong to one unit of privacy: their gradients add up before the clip.

The gradient of a user is that of one long record, whose tokens are those of its rows one after the other. So the norm
of a user comes from the Gram trick as that of a record does, and nothing of size (users, parameters) exists.

Shape legend: B = rows, U = units, M = rows of the largest unit, T = tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hf_dpopt.clipping.contributions import Contribution, Dense, Outer, Rows, Transposed
from hf_dpopt.clipping.products import place, wide
from hf_dpopt.clipping.rules.linear import matmul_contribution


class Units:
    """Assignment of the rows of a physical batch to units: the first ``sizes[0]`` to unit 0, the next to unit 1, ...

    Units of different sizes are filled up with zeros, so batches of units of about one size cost least.

    Args:
        sizes: rows of each unit, >= 1.
        weights_U: what the losses of the rows of a unit were multiplied by, added up, (U,); None for 1.

    Attributes:
        weights_U: the same.
    """

    def __init__(self, sizes: Sequence[int], weights_U: torch.Tensor | None = None):
        assert sizes and min(sizes) >= 1, sizes
        self.sizes, self.weights_U = tuple(sizes), weights_U
        self._largest = max(sizes)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # query, key and value layers read the same input

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_rows(self) -> int:
        """B."""
        return sum(self.sizes)

    @property
    def _are_equal(self) -> bool:
        return min(self.sizes) == self._largest

    @functools.cached_property
    def _unit_B(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.sizes))

    @functools.cached_property
    def _place_B(self) -> torch.Tensor:
        """Place of each row among ``U M``, (B,)."""
        sizes = torch.tensor(self.sizes)
        within_B = torch.arange(self.num_rows) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return self._unit_B * self._largest + within_B

    def summed(self, x_B: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each unit: (B, ...) to (U, ...), float32 or wider."""
        if self._are_equal:
            return wide(x_B).unflatten(0, (len(self), self._largest)).sum(dim=1)
        return wide(x_B).new_zeros(len(self), *x_B.shape[1:]).index_add_(0, self._unit_B.to(x_B.device), wide(x_B))

    def group_by_unit(self, use: Contribution) -> Contribution:
        """Convert a use of a parameter from rows to units."""
        match use:
            case Outer(left_BTP, right_BTQ):
                return matmul_contribution(self._side_by_side(left_BTP), self._side_by_side(right_BTQ))
            case Rows(ids_BT, grad_BTD, num_rows):
                return Rows(self._side_by_side(ids_BT), self._side_by_side(grad_BTD), num_rows)
            case Dense(grad_B):
                return Dense(self.summed(grad_B))
            case Transposed(of):
                joined = self.group_by_unit(of)
                assert isinstance(joined, Rows)
                return Transposed(joined)
        raise AssertionError(type(use))

    def _side_by_side(self, x_BT: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) to (U, M T, ...), zeros behind the last row of a unit; the same tensor for the same input."""
        if self._are_equal:
            return x_BT.reshape(len(self), self._largest * x_BT.size(1), *x_BT.shape[2:])
        if self._last is not None and place(self._last[0]) == place(x_BT):
            return self._last[1]
        places = x_BT.new_zeros(len(self) * self._largest, *x_BT.shape[1:])
        places[self._place_B.to(x_BT.device)] = x_BT
        joined = places.view(len(self), self._largest * x_BT.size(1), *x_BT.shape[2:])
        self._last = (x_BT, joined)
        return joined
