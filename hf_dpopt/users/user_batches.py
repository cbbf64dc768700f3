"""Physical batches of users' rows: whole users side by side, and users too large for a batch in parts.

Shape legend: B = rows, U = users.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.collation import Collation, Collator, rows_of
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.batches import LogicalBatch, StepIndices, WholeUnits

MAX_FILLED = 1.25  # rows that users are filled up to / rows they have


@dataclasses.dataclass(frozen=True)
class UsersBatch(WholeUnits):
    """Rows of several users, collated.

    Args:
        batch: the rows, those of a user side by side.
        sizes: number of rows of each user.
        weights_B: weight of each row in the gradient of its user, float64, (B,).
        are_users: False if each "user" is a record that has several rows.
    """

    batch: Mapping[str, Any]
    sizes: tuple[int, ...]
    weights_B: torch.Tensor
    are_users: bool = True

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Add the gradient of every user, each clipped once."""

        def weighted() -> torch.Tensor:
            losses_B = losses(self.batch)
            return losses_B * self.weights_B.to(losses_B)

        weights_U = Units(self.sizes).summed(self.weights_B)
        return engine.add_clipped_sum(sums, weighted, len(self.weights_B), Units(self.sizes, weights_U))

    def apart(self) -> list[UserInParts]:
        """Split into one batch per user."""
        users, begin = [], 0
        for size in self.sizes:
            batch = rows_of(self.batch, begin, begin + size)
            users.append(UserInParts([batch], float(self.weights_B[begin]), self.are_users))
            begin += size
        return users


@dataclasses.dataclass(frozen=True)
class UserInParts(WholeUnits):
    """One user whose rows do not fit into a physical batch: the gradient is summed over parts, then clipped."""

    batches: Sequence[Mapping[str, Any]]
    weight: float
    are_users: bool = True

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Add the gradient of the user, clipped once.

        Raises:
            DPConfigError: with weights in shards, for a plain backward adds up the ranks' users.
        """
        if engine.is_collective:
            raise DPConfigError(
                "A user, or record of several rows, does not fit into one physical batch, which weights in shards "
                "ask for. Set records_per_user to at most per_device_train_batch_size, or start plain data parallel."
            )
        seen: list[torch.Tensor] = []

        def weighted(batch: Mapping[str, Any]) -> torch.Tensor:
            losses_B = losses(batch)
            seen.append(losses_B.detach())
            return losses_B * self.weight

        total = engine.gradient_of([functools.partial(weighted, batch) for batch in self.batches])
        gradients = {name: gradient.unsqueeze(0) for name, gradient in total.items()}
        return engine.add_clipped(sums, gradients, torch.cat(seen).mean().view(1))

    def apart(self) -> list[UserInParts]:
        """Split into one batch per user: this one."""
        return [self]


def by_user(records: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Split a list of records into one list for each user."""
    assert sum(sizes) == len(records), (sizes, len(records))
    ends = itertools.accumulate(sizes)
    return [records[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _fit(sizes: Sequence[int], limit: int) -> bool:
    return sum(sizes) <= limit and max(sizes) * len(sizes) <= MAX_FILLED * sum(sizes)


class UserBatch(LogicalBatch):
    """The users of one step on this rank: their chosen records, user after user.

    Args:
        records: records of all users, user after user.
        step: number of the optimizer step, >= 0.
        sizes: number of records of each user, >= 1.
        weight: weight of a record in the gradient of its user; None for the mean over the records of that user.
        are_users: False if each "user" is a record that has several rows, clipped as one.
    """

    def __init__(
        self, records: list[Any], step: int, sizes: Sequence[int], weight: float | None, are_users: bool = True
    ):
        super().__init__(records, step)
        self.sizes, self.weight, self.are_users = tuple(sizes), weight, are_users

    def physical(
        self, size: int, collate: Collation | Collator, tokens: int | None = None
    ) -> Iterator[UsersBatch | UserInParts]:
        """Yield batches of at most `size` records; users of similar size come together, large ones first.

        `tokens` has no influence: users are filled up to the largest, and more of them side by side waste less.
        Users in a batch are filled up to the largest at quadratic cost, so at most `MAX_FILLED` times their rows.
        """
        collation = Collation.of(collate)
        users = sorted(by_user(self.records, self.sizes), key=len, reverse=True)
        together: list[list[Any]] = []
        for user in users:
            if len(user) > size:
                yield from self._in_parts(user, size, collation)
            elif together and not _fit([*map(len, together), len(user)], size):
                yield from self._collate(together, collation)
                together = [user]
            else:
                together.append(user)
        if together:
            yield from self._collate(together, collation)

    def _weight_of(self, user: Sequence[Any]) -> float:
        return 1 / len(user) if self.weight is None else self.weight

    def _in_parts(self, user: list[Any], size: int, collation: Collation) -> Iterator[UserInParts]:
        batches = list(LogicalBatch(user, self.step).physical(size, collation))
        if batches:
            yield UserInParts(batches, self._weight_of(user), self.are_users)

    def _collate(self, users: list[list[Any]], collation: Collation) -> Iterator[UsersBatch | UserInParts]:
        """Yield one batch of whole users, or one per user if a row cannot be used or cannot lie beside the others."""
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
    """The logical batch of records that may have several rows, which add up before the clip."""
    if all(size == 1 for size in indices.sizes):
        return LogicalBatch(rows, indices.step)
    return UserBatch(rows, indices.step, indices.sizes, None, are_users=False)
