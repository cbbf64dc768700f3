"""Per-record gradients divided coordinate by coordinate before the clip: ``clip(g_b / D)``.

The Gram trick knows no elementwise D. A full diagonal takes norms from the gradients of one layer, formed for some
records at a time, and forms them again for the sum: what rounding leaves of tokens that cancel is magnified by 1 / D,
so norm and sum have to see the same. A factored one, ``D = r c^T``, leaves an outer product an outer product, and the
ghost norm stays valid. Either way D divides the sum once, at its end: ``sum_b f_b g_b / D = (sum_b f_b g_b) / D``.

Shape legend: B = records, T = tokens, P / Q = rows / columns of a parameter, D = width of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from hf_dpopt.clipping.contributions import MAX_SQUARED, Contribution, Dense, Outer, Rows, Transposed
from hf_dpopt.clipping.products import GramCache, wide
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import is_sharded, local_of, rows_of, whole_of

MAX_ON_A_GPU = 2**26  # elements of the gradients that are formed at once; on a CPU they should stay in its cache


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """Any D; ``inverse`` is 1 / D in the shape of the parameter."""

    inverse: torch.Tensor

    def of(self, uses: Sequence[Contribution]) -> list[Contribution]:
        return [Divided(tuple(uses), whole_of(self.inverse))]  # type: ignore[list-item]

    def undivided(self, uses: Sequence[Contribution]) -> list[Contribution]:
        """The uses together, as their norm was taken, for a sum that is divided at its end."""
        return [Divided(tuple(uses), self.inverse)]  # type: ignore[list-item]

    def divide_(self, total: torch.Tensor) -> None:
        total.mul_(self.inverse.to(total.dtype))


@dataclasses.dataclass(frozen=True)
class Factored:
    """``D = r c^T``, both inverted: (P,) and (Q,), of a parameter seen as P x Q (the first dimension, the rest)."""

    inverse_P: torch.Tensor
    inverse_Q: torch.Tensor

    def of(self, uses: Sequence[Contribution]) -> list[Contribution]:
        return [self._divide(use) for use in uses]

    def _divide(self, use: Contribution) -> Contribution:
        match use:
            case Outer(left_BTP, right_BTQ):
                return Outer(wide(left_BTP) * self.inverse_P, wide(right_BTQ) * self.inverse_Q)
            case Rows(ids_BT, grad_BTD, num_rows):
                # a row number that is no row (padding below 0 or beyond) would have been refused by the layer
                return Rows(ids_BT, wide(grad_BTD) * self.inverse_Q * self.inverse_P[ids_BT].unsqueeze(-1), num_rows)
            case Transposed(rows):
                return Transposed(Factored(self.inverse_Q, self.inverse_P)._divide(rows))  # type: ignore[arg-type]
            case Dense(grad_B):
                return Dense(wide(grad_B) * self.matrix(wide(grad_B[0])))
        raise AssertionError(type(use))

    def matrix(self, like: torch.Tensor) -> torch.Tensor:
        """1 / D in the shape of the parameter, rounded once, to the dtype of `like`, as norms and sums are."""
        return torch.outer(self.inverse_P.to(like.dtype), self.inverse_Q.to(like.dtype)).view(like.shape)

    def divide_(self, total: torch.Tensor) -> None:
        first, num = rows_of(total) if is_sharded(total) else (0, len(total))
        inverse_P = self.inverse_P[first : first + num].to(total.dtype)
        matrix_PQ = local_of(total).view(num, self.inverse_Q.numel())
        matrix_PQ.mul_(inverse_P.unsqueeze(1)).mul_(self.inverse_Q.to(total.dtype))


@dataclasses.dataclass(frozen=True)
class Divided:
    """All uses of a parameter together; norms are those after division by a full diagonal, sums those before it."""

    uses: tuple[Contribution, ...]
    inverse: torch.Tensor

    @property
    def num_records(self) -> int:
        return self.uses[0].num_records

    def squares(self, grams: GramCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        squares_B = torch.cat([self._squares(part) for part in self._parts()])
        return squares_B, squares_B  # nothing cancels in a gradient that was formed

    def _parts(self) -> list[slice]:
        most = MAX_ON_A_GPU if self.inverse.is_cuda else MAX_SQUARED
        at_once = max(1, most // max(1, self.inverse.numel()))
        return [slice(first, first + at_once) for first in range(0, self.num_records, at_once)]

    def only_rows(self) -> Rows | None:
        """The embedding lookup, if the parameter has no other use."""
        return self.uses[0] if len(self.uses) == 1 and isinstance(self.uses[0], Rows) else None

    def each_formed(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the gradients of some records at a time, not divided, (b, *shape), and which records they are of."""
        for part in self._parts():
            yield part, self._form_gradients(part)

    def _squares(self, part: slice) -> torch.Tensor:
        rows = self.only_rows()
        if rows is not None:
            return _squares_of_rows(rows.select(part), self.inverse)  # type: ignore[arg-type]
        formed = self._form_gradients(part)
        divided = formed * self.inverse.to(formed.dtype)
        return torch.linalg.vector_norm(divided.flatten(1), dim=1).square()

    def _form_gradients(self, part: slice) -> torch.Tensor:
        """Form the gradients of some records, not divided, (B, *shape)."""
        grads = (_materialise(use.select(part)) for use in self.uses)  # type: ignore[arg-type]
        total = next(grads)
        for grad in grads:
            total = total + grad
        return total

    def add_weighted_sum_(self, total: torch.Tensor, factors_B: torch.Tensor, *, beta: int = 1) -> None:
        rows = self.only_rows()
        if rows is not None:
            rows_BTD, ids_BT = rows.sum_by_row()
            Rows(ids_BT, rows_BTD, rows.num_rows).add_weighted_sum_(total, factors_B, beta=beta)
            return
        for part, formed_B in self.each_formed():
            Dense(formed_B).add_weighted_sum_(total, factors_B[part], beta=beta)
            beta = 1

    def select(self, keep_B: torch.Tensor) -> Divided:
        return Divided(tuple(use.select(keep_B) for use in self.uses), self.inverse)

    def of_record(self, b: int) -> torch.Tensor:
        raise AssertionError("nothing cancels in a gradient that was formed")

    def rounding_of(self, b: int) -> torch.Tensor:
        raise AssertionError("nothing cancels in a gradient that was formed")


def _materialise(use: Contribution) -> torch.Tensor:
    """Form the gradients of the records, (B, *parameter shape)."""
    match use:
        case Outer(left_BTP, right_BTQ):
            return torch.bmm(wide(left_BTP).mT, wide(right_BTQ))
        case Dense(grad_B):
            return wide(grad_B)
    each = [use.of_record(b) for b in range(use.num_records)]
    return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)


def _squares_of_rows(use: Rows, inverse: torch.Tensor) -> torch.Tensor:
    """Squared norms of divided embedding gradients, (B,); tokens of a row add up, no table is formed per record."""
    rows_NTD, ids_BT = use.sum_by_row()
    return (rows_NTD * inverse.to(rows_NTD.dtype)[ids_BT]).square().sum(dim=(1, 2))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiplier ``factor / D`` of a record's gradient before its norm is taken.

    Args:
        parts: parameter name -> 1 / D; those left out are not divided.
        factor: one number for all coordinates, > 0: clipping norm of the rule / clipping norm of the preconditioner.
        count_weight: weight of ``1[unit within the clip] - 1/2`` in a coordinate `COUNT` of the sum; 0 for none. A
            unit without gradient is not counted.
    """

    parts: Mapping[str, Diagonal | Factored] = dataclasses.field(default_factory=dict)
    factor: float = 1.0
    count_weight: float = 0.0

    def of(self, name: str, uses: Sequence[Contribution]) -> list[Contribution]:
        """The uses of a parameter divided by D, for norms; `factor` is left to the caller."""
        return self.parts[name].of(uses) if name in self.parts else list(uses)

    def summed(self, name: str, uses: Sequence[Contribution]) -> list[Contribution]:
        """The uses of a parameter for sums, which are divided at their end."""
        part = self.parts.get(name)
        return part.undivided(uses) if isinstance(part, Diagonal) else list(uses)

    def weights(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """1 / D of a parameter, flat, for gradients of the shape and dtype of `like`."""
        match self.parts.get(name):
            case Diagonal(inverse):
                return inverse.reshape(-1).to(like.dtype)
            case Factored() as part:
                return part.matrix(like).reshape(-1)
        return like.new_ones(like.numel())

    def apply_(self, name: str, total: torch.Tensor) -> None:
        """Multiply a sum of records by the scale, in place."""
        if name in self.parts:
            self.parts[name].divide_(total)
        if self.factor != 1.0:
            total.mul_(self.factor)

    def scale_squares_(self, squares: Mapping[str, torch.Tensor]) -> None:
        """Multiply squared norms by ``factor^2``, in place."""
        if self.factor != 1.0:
            for squares_B in squares.values():
                squares_B.mul_(self.factor**2)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse a scale that does not fit the parameters, or is not finite or not positive.

        Raises:
            DPConfigError: naming the parameter.
        """
        for name, part in self.parts.items():
            if name not in parameters:
                raise DPConfigError(f"There is a scale for {name!r}, which is no trained parameter. Leave it out.")
            shape = parameters[name].shape
            if isinstance(part, Diagonal):
                values, fits = [part.inverse], part.inverse.shape == shape
            else:
                values = [part.inverse_P, part.inverse_Q]
                fits = len(part.inverse_P) == shape[0] and len(part.inverse_Q) == shape[1:].numel()
            if not fits or not all(bool((v.isfinite() & (v > 0)).all()) for v in map(local_of, values)):
                raise DPConfigError(
                    f"The scale of {name} has another shape than the parameter, or entries that are not finite and > "
                    "0. Give D in the parameter's shape, with a floor (eps) above 0."
                )


UNSCALED = Scale()
