"""What one physical batch adds to a clipped sum: its records, or whole users, whatever the unit of privacy is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hf_dpopt.errors import DPConfigError
from hf_dpopt.grads import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.grads.contributions import ClippedSum
from hf_dpopt.losses import RecordLosses, num_records


class WholeUnits(Protocol):
    """A batch that knows which of its rows belong together; see `hf_dpopt.users.batches`."""

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics: ...


def add_batch(
    sums: ClippedSum,
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any] | WholeUnits,
    *,
    sums_users: bool,
) -> UnprivatizedStatistics:
    """Adds the clipped gradients of the units of a batch to `sums`.

    Args:
        sums: made by `engine.empty_sum`.
        engine: clips.
        losses: of records.
        batch: collated records, or whole users.
        sums_users: whether the plan clips whole users.

    Raises:
        DPConfigError: for records where users are clipped, or the other way round.
    """
    if hasattr(batch, "add_to") != sums_users:
        given, planned = ("single records", "whole users") if sums_users else ("whole users", "single records")
        raise DPConfigError(
            f"The plan clips {planned}, and a batch of {given} was given, whose sum moves by another amount. Pass "
            "hf_dpopt.users.UsersBatch for privacy_unit='user', collated records for privacy_unit='example'."
        )
    if hasattr(batch, "add_to"):
        return batch.add_to(sums, engine, losses)
    return engine.add_clipped_sum(sums, lambda: losses(batch), num_records(batch))  # type: ignore[arg-type]
