"""Contribution of one physical batch to a clipped sum: its records or whole users, whatever the unit of privacy is."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.clipped_sum import ClippedSum, Taker
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.records.collation import trimmed
from hf_dpopt.records.losses import RecordLosses, num_records
from hf_dpopt.records.rows import is_environment


class WholeUnits(abc.ABC):
    """A batch that knows which of its rows belong together; see `hf_dpopt.users.batches`."""

    @property
    def are_users(self) -> bool:
        """Whether the units are users; False where the rows of a record stand in for those of a user."""
        return True

    @abc.abstractmethod
    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Add what the units give, each clipped once."""

    @abc.abstractmethod
    def apart(self) -> Sequence[WholeUnits]:
        """The units, each as a batch of its own."""


def add_batch(
    sums: ClippedSum,
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any] | WholeUnits,
    *,
    sums_users: bool,
    take: Taker | None = None,
) -> UnprivatizedStatistics:
    """Add the clipped gradients of the units of a batch to `sums`.

    A unit on which the model fails contributes nothing, as one whose gradient is no number: a step that stopped there
    would tell that it was drawn. The others of its batch are then taken one by one.

    Args:
        sums: made by `engine.empty_sum`.
        engine: clips.
        losses: losses of records.
        batch: collated records, or whole users.
        sums_users: whether the plan clips whole users.
        take: taker of the sums that become final in the last batch, where one backward makes them; None before.

    Raises:
        DPConfigError: for records where users are clipped, or the other way round.
    """
    if (isinstance(batch, WholeUnits) and batch.are_users) != sums_users:
        given, planned = ("single records", "whole users") if sums_users else ("whole users", "single records")
        raise DPConfigError(
            f"The plan clips {planned}, and a batch of {given} was given, whose sum moves by another amount. Pass "
            "hf_dpopt.users.UsersBatch for privacy_unit='user', collated records for privacy_unit='example'."
        )
    try:
        with sums.handing_over(None if isinstance(batch, WholeUnits) else take):
            return _add(sums, engine, _LossesWhoseFailureShows(losses), batch)
    except _ForwardFailed as failed:
        if engine.is_collective:
            raise DPConfigError(
                "The model failed on a batch, and with weights in shards the other processes wait in its next layer, "
                "so its records cannot be left out one by one. Find what it fails on (the error above), or start "
                "plain data parallel, which leaves out what cannot be computed."
            ) from failed.__cause__
        units = _take_apart(batch)
        if len(units) < 2:
            return UnprivatizedStatistics(num_records=1, num_dropped=1)
    seen = UnprivatizedStatistics()
    for unit in units:
        seen += add_batch(sums, engine, losses, unit, sums_users=sums_users)
    return seen


def _add(
    sums: ClippedSum, engine: ClippingEngine, losses: Any, batch: Mapping[str, Any] | WholeUnits
) -> UnprivatizedStatistics:
    if isinstance(batch, WholeUnits):
        return batch.add_to(sums, engine, losses)
    return engine.add_clipped_sum(sums, lambda: losses(batch), num_records(batch))


def _take_apart(batch: Mapping[str, Any] | WholeUnits) -> Sequence[Mapping[str, Any] | WholeUnits]:
    """The units of a batch, each as a batch of its own."""
    if isinstance(batch, WholeUnits):
        return batch.apart()
    return [
        trimmed({k: v[b : b + 1] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()})
        for b in range(num_records(batch))
    ]


class _ForwardFailed(Exception):
    """A forward that the model could not do; nothing was added to a sum."""


class _LossesWhoseFailureShows:
    """The losses of a run, whose failures can be told from those of the clip."""

    def __init__(self, losses: RecordLosses):
        self._losses = losses

    @property
    def model(self) -> Any:
        return self._losses.model

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        try:
            return self._losses(batch)
        except UnsupportedModuleError:
            raise
        except BaseException as error:
            if is_environment(error):
                raise
            raise _ForwardFailed from error
