"""Padding of the batches of a run, and a pair of its records in one batch, for the self-check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_dpopt.records.collation import TARGETS, Batch, Collation, length_of
from hf_dpopt.records.trial import beside_shorter


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
