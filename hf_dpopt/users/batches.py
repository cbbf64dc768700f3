"""The rows of some users as physical batches: whole users side by side, and a user who is larger than one alone.

Shape legend: B = rows, U = users.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.contributions import ClippedSum
from hf_dpopt.clipping.units import Units
from hf_dpopt.records.collation import Collation, Collator
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.batches import LogicalBatch, StepIndices, physical_parts
from hf_dpopt.run.units import WholeUnits

MAX_FILLED = 1.25  # rows that users are filled up to / rows they have


@dataclasses.dataclass(frozen=True)
class UsersBatch(WholeUnits):
    """Rows of several users, collated.

    Args:
        batch: the rows, those of a user side by side.
        sizes: rows of each user.
        weights_B: of the rows in the gradient of their user.
        are_users: False where the rows of a record stand in for those of a user.
    """

    batch: Mapping[str, Any]
    sizes: tuple[int, ...]
    weights_B: torch.Tensor
    are_users: bool = True

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Adds what the users give, each clipped once."""

        def weighted() -> torch.Tensor:
            losses_B = losses(self.batch)
            return losses_B * self.weights_B.to(losses_B)

        return engine.add_clipped_sum(sums, weighted, len(self.weights_B), Units(self.sizes))

    def apart(self) -> list[UserInParts]:
        """The users, each as a batch of its own."""
        users, begin = [], 0
        for size in self.sizes:
            rows = slice(begin, begin + size)
            batch = {k: v[rows] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in self.batch.items()}
            users.append(UserInParts([batch], float(self.weights_B[begin]), self.are_users))
            begin += size
        return users


@dataclasses.dataclass(frozen=True)
class UserInParts(WholeUnits):
    """One user whose rows do not fit into a physical batch: their gradient is summed first, and clipped then."""

    batches: Sequence[Mapping[str, Any]]
    weight: float
    are_users: bool = True

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Adds what the user gives, clipped once."""
        parts = [lambda batch=batch: losses(batch) * self.weight for batch in self.batches]
        total = engine.gradient_of(parts)
        return engine.add_clipped(sums, {name: gradient.unsqueeze(0) for name, gradient in total.items()})

    def apart(self) -> list[UserInParts]:
        """The user."""
        return [self]


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
        are_users: False for records of several rows each, which are clipped as one like a user's.
    """

    def __init__(
        self, records: list[Any], step: int, sizes: Sequence[int], weight: float | None, are_users: bool = True
    ):
        super().__init__(records, step)
        self.sizes, self.weight, self.are_users = tuple(sizes), weight, are_users

    def physical(self, size: int, collate: Collation | Collator) -> Iterator[UsersBatch | UserInParts]:
        """Batches of at most `size` records; users of about one size come together, large ones first.

        Users in a batch are filled up to the largest, which costs time with the square: so little of it is allowed.
        """
        collation = Collation.of(collate)
        users = sorted(by_user(self.records, self.sizes), key=len, reverse=True)
        together: list[list[Any]] = []
        for user in users:
            if len(user) > size:
                yield from self._in_parts(user, size, collation)
            elif together and not _fit([*map(len, together), len(user)], size):
                yield from self._collated(together, collation)
                together = [user]
            else:
                together.append(user)
        if together:
            yield from self._collated(together, collation)

    def _weight_of(self, user: Sequence[Any]) -> float:
        return 1 / len(user) if self.weight is None else self.weight

    def _in_parts(self, user: list[Any], size: int, collation: Collation) -> Iterator[UserInParts]:
        batches = [part.batch for parts in physical_parts(user, size, collation) for part in parts]
        if batches:
            yield UserInParts(batches, self._weight_of(user), self.are_users)

    def _collated(self, users: list[list[Any]], collation: Collation) -> Iterator[UsersBatch | UserInParts]:
        """One batch of whole users; where a row cannot be used, or not beside the others, user after user."""
        records = [record for user in users for record in user]
        parts = collation.parts(records)
        if len(parts) == 1 and parts[0].places == tuple(range(len(records))):
            weights = [self._weight_of(user) for user in users for _ in user]
            yield UsersBatch(
                parts[0].batch, tuple(map(len, users)), torch.tensor(weights, dtype=torch.float64), self.are_users
            )
        else:
            for user in users:
                yield from self._in_parts(user, len(user), collation)


def of_rows(rows: list[Any], indices: StepIndices) -> LogicalBatch:
    """The logical batch of records that may have several rows: those of a record add up before the clip."""
    if all(size == 1 for size in indices.sizes):
        return LogicalBatch(rows, indices.step)
    return UserBatch(rows, indices.step, indices.sizes, None, are_users=False)
