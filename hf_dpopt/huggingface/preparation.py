"""A look at a sample of a run's records, and at how its batches are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.huggingface.refusals.model import first_not_finite
from hf_dpopt.records.collation import TARGETS, Batch, Collation, length_of
from hf_dpopt.records.losses import RecordLosses, base_model
from hf_dpopt.records.rows import read_one, spread
from hf_dpopt.records.trial import NONE_USABLE, beside_shorter, try_collation
from hf_dpopt.run.kept_state import changed_by_a_forward, kept_buffers
from hf_dpopt.self_check.conditions import in_mode

TRIED = 16  # records that are collated
RUN = 8  # of them, that go through the model


def tokenizer_of(collator: Any) -> Any:
    """The tokenizer that pads the batches of a collator, or None."""
    for name in ("tokenizer", "processing_class", "processor"):
        found = getattr(collator, name, None)
        if found is not None:
            return getattr(found, "tokenizer", found)
    return None


def padding_of(collation: Collation, records: Sequence[Any], processing_class: Any) -> tuple[int | None, str | None]:
    """Token and side of the padding in the batches of a run; None for what cannot be told.

    It is read off a batch that the collator made of a record and a shorter copy. Where the collator draws masks, the
    tokenizer is asked that pads its batches.

    Args:
        collation: collation of the run.
        records: some of the dataset.
        processing_class: the Trainer's, which pads where no collator was given.
    """
    if not collation.is_known:
        return collation.padding_id, "right"
    pair = beside_shorter(collation, [r for record in records if (r := collation.fitted(record)) is not None])
    if pair is not None:
        rows_BT = collation.collate(list(pair)).get("input_ids")
        own_T = torch.as_tensor(pair[1]["input_ids"])
        if isinstance(rows_BT, torch.Tensor) and rows_BT.dim() == 2 and rows_BT.size(1) > len(own_T):
            row_T = rows_BT[1]
            if torch.equal(row_T[: len(own_T)], own_T):
                return int(row_T[-1]), "right"
            if torch.equal(row_T[-len(own_T) :], own_T):
                return int(row_T[0]), "left"
    tokenizer = tokenizer_of(collation.collate) or processing_class
    return getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "padding_side", None)


def pair_of_records(collation: Collation, records: Sequence[Any]) -> tuple[Batch, list[Batch]] | None:
    """A long and a short record of the dataset in one batch of the real collator, and the rows of each alone.

    A row alone is cut out of the batch, without its padding, so that a collator that draws masks has drawn them once.
    None where no padding is met: without tokens, without a mask, or if rows are not padded at all.

    Args:
        collation: collation of the run.
        records: some of the dataset.
    """
    fitted = sorted((r for record in records if (r := collation.fitted(record)) is not None), key=length_of)
    if not fitted:
        return None
    pair = (fitted[-1], fitted[0]) if length_of(fitted[0]) < length_of(fitted[-1]) else None
    pair = pair or beside_shorter(collation, fitted)
    if pair is None:
        return None
    parts = collation.parts(pair)
    if len(parts) != 1 or parts[0].places != (0, 1):
        return None
    batch = parts[0].batch
    ids_BT, mask_BT = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids_BT, torch.Tensor) or not isinstance(mask_BT, torch.Tensor):
        return None
    if ids_BT.dim() != 2 or mask_BT.shape != ids_BT.shape or not (mask_BT == 0).any():
        return None
    alone = [collation.parts([record])[0].batch for record in pair]  # of what width the rest is without the other
    per_token = {
        key for key, value in batch.items()
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and not key.startswith("decoder")
        and not (key == "labels" and collation.limits.labels_are_targets)
        and all(each[key].shape[:2] == each["input_ids"].shape for each in (batch, *alone))
    }  # fmt: skip
    return batch, [_without_padding(batch, b, mask_BT[b] != 0, per_token, alone[b]) for b in range(2)]


def _without_padding(batch: Batch, b: int, is_text_T: torch.Tensor, per_token: set[str], alone: Batch) -> Batch:
    row = {k: v[b : b + 1] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}
    row = {k: v[:, is_text_T] if k in per_token else v for k, v in row.items()}
    is_cut = {k for k in TARGETS if k in row and k not in per_token and row[k].dim() > 1}
    return {k: v[:, : alone[k].size(1)] if k in is_cut else v for k, v in row.items()}


def look_at_records(dataset: Any, collation: Collation, losses: RecordLosses) -> list[Any]:
    """Some records of the dataset, which the collator and the model were tried on.

    Raises:
        DPConfigError: if records cannot be read, the collator mixes them, or the model fails on one.
        UnsupportedModuleError: if a forward in evaluation mode changes buffers that are saved; they are restored.
    """
    records = [row for i in spread(len(dataset), TRIED) for row in read_one(dataset, i)]
    try_collation(collation, records)
    fitted = [(record, row) for record in records if (row := collation.fitted(record)) is not None]
    usable = [record for record, row in fitted if not collation.limits.empty(collation.row(row)).any()]
    if records and not usable:
        raise DPConfigError(NONE_USABLE)
    with kept_buffers(losses.model) as start, in_mode(losses.model, training=False), torch.no_grad():
        found = [_run(collation, losses, record) for record in usable[:RUN]]
        for part in collation.parts(usable[:2]):
            _losses(losses, part.batch)
        changed = start.changed(has_caches=False)
    if changed:
        raise UnsupportedModuleError(changed_by_a_forward(changed))
    num_wrong = sum(not torch.isfinite(loss).all() for loss in found)
    if found and num_wrong == len(found):
        _refuse_no_loss(losses.model, len(found))
    if num_wrong:
        raise DPConfigError(
            f"The losses of {num_wrong} of {len(found)} training records are NaN or infinite, and every step would "
            "leave such records out silently. Correct their values, or leave them out before training."
        )
    return usable


def _refuse_no_loss(model: nn.Module, num_tried: int) -> None:
    """Refuse a model all of whose losses are NaN or infinite, naming the weights that are."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    name = first_not_finite(weights)
    why = f"{name} of the model holds NaN or infinity" if name else "though the weights of the model are finite"
    raise DPConfigError(
        f"The losses of {num_tried} training records are all NaN or infinite ({why}), so every record would be "
        "dropped and the run would train on noise. "
        + ("Load the weights again, from a checkpoint before the run diverged." if name else
           "Look at the labels and at what the model makes of them; in bfloat16, try float32.")
    )  # fmt: skip


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
