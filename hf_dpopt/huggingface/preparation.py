"""A look at a sample of a run's records: can the collator and the model take them?"""

from __future__ import annotations

from typing import Any

import torch

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.records.collation import Batch, Collation
from hf_dpopt.records.losses import RecordLosses, base_model
from hf_dpopt.records.rows import read_one, spread
from hf_dpopt.records.trial import try_collation
from hf_dpopt.run.kept_state import changed_by_a_forward, kept_buffers
from hf_dpopt.self_check.conditions import in_mode

TRIED = 16  # records that are collated
RUN = 8  # of them, that go through the model


def look_at_records(dataset: Any, collation: Collation, losses: RecordLosses) -> list[Any]:
    """Some records of the dataset, which the collator and the model were tried on.

    Raises:
        DPConfigError: if records cannot be read, the collator mixes them, or the model fails on one.
        UnsupportedModuleError: if a forward in evaluation mode changes buffers that are saved; they are restored.
    """
    records = [row for i in spread(len(dataset), TRIED) for row in read_one(dataset, i)]
    usable = try_collation(collation, records)
    with kept_buffers(losses.model) as start, in_mode(losses.model, training=False), torch.no_grad():
        found = [_run(collation, losses, record) for record in usable[:RUN]]
        for part in collation.parts(usable[:2]):
            _losses(losses, part.batch)
        changed = start.changed(has_caches=False)
    if changed:
        raise UnsupportedModuleError(changed_by_a_forward(changed))
    num_wrong = sum(not torch.isfinite(loss).all() for loss in found)
    if num_wrong:
        raise DPConfigError(
            f"The losses of {num_wrong} of {len(found)} training records are NaN or infinite, and every step would "
            "leave such records out silently. Correct their values and labels, or leave them out before training; in "
            "bfloat16, try float32."
        )
    return usable


def _run(collation: Collation, losses: RecordLosses, record: Any) -> torch.Tensor:
    """Losses of one record, (1,), on which the model is tried."""
    row = collation.row(collation.fitted(record))
    if outside := collation.limits.first_outside(row):
        raise DPConfigError(
            f"A training record does not fit the model as the collator makes it: {outside} If the record is right, "
            "look at what the collator adds (mask and padding tokens)."
        )
    return _losses(losses, collation.place(row))


def _losses(losses: RecordLosses, batch: Batch) -> torch.Tensor:
    try:
        return losses(batch).detach()
    except DPConfigError:
        raise
    except Exception as error:
        first = f"{losses.function} or " if losses.function else ""
        model: Any = base_model(losses.model)
        fix = "Check that the columns, their shapes and types are those of the model"
        if getattr(getattr(model, "config", None), "pad_token_id", 0) is None:
            fix = "Set model.config.pad_token_id = tokenizer.pad_token_id (it is None). Else, c" + fix[1:]
        fix += ", and set remove_unused_columns=False to keep other columns." if first else "."
        raise DPConfigError(
            f"{first}{type(model).__name__} fails on training records: {type(error).__name__}: {error}. {fix}"
        ) from error
