"""The rows of some users as physical batches: whole users side by side, and a user who is larger than one alone.

Shape legend: B = rows, U = users.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.batches import LogicalBatch, checked_collation
from hf_dpopt.grads import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.grads.contributions import ClippedSum
from hf_dpopt.grads.units import Units
from hf_dpopt.losses import RecordLosses

MAX_FILLED = 1.25  # rows that users are filled up to / rows they have


@dataclasses.dataclass(frozen=True)
class UsersBatch:
    """Rows of several users, collated.

    Args:
        batch: the rows, those of a user side by side.
        sizes: rows of each user.
        weights_B: of the rows in the gradient of their user.
    """

    batch: Mapping[str, Any]
    sizes: tuple[int, ...]
    weights_B: torch.Tensor

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Adds what the users give, each clipped once."""

        def weighted() -> torch.Tensor:
            losses_B = losses(self.batch)
            return losses_B * self.weights_B.to(losses_B)

        return engine.add_clipped_sum(sums, weighted, len(self.weights_B), Units(self.sizes))


@dataclasses.dataclass(frozen=True)
class UserInParts:
    """One user whose rows do not fit into a physical batch: their gradient is summed first, and clipped then."""

    batches: Sequence[Mapping[str, Any]]
    weight: float

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Adds what the user gives, clipped once."""
        parts = [lambda batch=batch: losses(batch) * self.weight for batch in self.batches]
        total = engine.gradient_of(parts)
        return engine.add_clipped(sums, {name: gradient.unsqueeze(0) for name, gradient in total.items()})


def by_user(records: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """The records of each user."""
    assert sum(sizes) == len(records), (sizes, len(records))
    ends = itertools.accumulate(sizes)
    return [records[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _fit(sizes: Sequence[int], limit: int) -> bool:
    return sum(sizes) <= limit and max(sizes) * len(sizes) <= MAX_FILLED * sum(sizes)


class UserBatch(LogicalBatch):
    """The users of one step on this rank: their chosen records, user after user.

    Args:
        records: of all of them.
        step: optimizer step.
        sizes: records of each user, >= 1.
        weight: of a record in the gradient of its user; None for the mean over the records of that user.
    """

    def __init__(self, records: list[Any], step: int, sizes: Sequence[int], weight: float | None):
        super().__init__(records, step)
        self.sizes, self.weight = tuple(sizes), weight

    def physical(self, size: int, collate: Callable[[list[Any]], Any]) -> Iterator[UsersBatch | UserInParts]:
        """Batches of at most `size` records; users of about one size come together, large ones first.

        Users in a batch are filled up to the largest, which costs time with the square: so little of it is allowed.
        """
        users = sorted(by_user(self.records, self.sizes), key=len, reverse=True)
        together: list[list[Any]] = []
        for user in users:
            if len(user) > size:
                yield UserInParts(list(checked_collation(user, size, collate)), self._weight_of(user))
            elif together and not _fit([*map(len, together), len(user)], size):
                yield self._collated(together, collate)
                together = [user]
            else:
                together.append(user)
        if together:
            yield self._collated(together, collate)

    def _weight_of(self, user: Sequence[Any]) -> float:
        return 1 / len(user) if self.weight is None else self.weight

    def _collated(self, users: list[list[Any]], collate: Callable[[list[Any]], Any]) -> UsersBatch:
        records = [record for user in users for record in user]
        (batch,) = checked_collation(records, len(records), collate, by_length=False)
        weights = [self._weight_of(user) for user in users for _ in user]
        return UsersBatch(batch, tuple(map(len, users)), torch.tensor(weights))
