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
    sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses, batch: Mapping[str, Any] | WholeUnits, unit: str
) -> UnprivatizedStatistics:
    """Adds the clipped gradients of the units of a batch to `sums`.

    Args:
        sums: made by `engine.empty_sum`.
        engine: clips.
        losses: of records.
        batch: collated records, or whole users.
        unit: of privacy, as the plan has it.

    Raises:
        DPConfigError: for records where the unit is the user: each would be clipped for itself.
    """
    if hasattr(batch, "add_to"):
        return batch.add_to(sums, engine, losses)
    if unit != "example":
        raise DPConfigError(
            f"The unit of privacy is the {unit}, and a batch of single records was given: a {unit} with many of them "
            "would be clipped many times. Pass hf_dpopt.users.UsersBatch, or plan with privacy_unit='example'."
        )
    return engine.add_clipped_sum(sums, lambda: losses(batch), num_records(batch))  # type: ignore[arg-type]
