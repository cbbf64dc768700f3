"""Trial of the collator on records of the dataset: the row of a record must be the same beside others.

Nothing is refused in a step, so it is before training that a user hears of a collator that centres targets over the
batch, packs records into one row, or takes negatives from the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.framework import keep_generators, manual_seed
from hf_dpopt.records.collation import Batch, Collation, check_rows, has_choices, length_of, row_of
from hf_dpopt.records.limits import num_entries
from hf_dpopt.records.losses import IGNORED
from hf_dpopt.records.rows import SuppressRecordErrors

FIX = (
    "Use a collator that makes one row per record and looks at nothing else (DataCollatorWithPadding); what should "
    "depend on several records (centring, scaling, negatives) has to be done before training, on public data."
)

NONE_USABLE = (
    "None of the records that were read can be used: they are empty, masked as a whole, longer than the model's "
    "positions, or not mappings with the same columns. Check train_dataset[0] and the tokenizer."
)
FAILS = (
    "Mostly texts were not tokenized, labels are texts, records have unlike lengths, or nothing pads them: tokenize "
    "and number the labels before training, give the tokenizer a pad_token, and pass the collator of your task "
    "(DataCollatorWithPadding, DataCollatorForTokenClassification, DataCollatorForSeq2Seq)."
)


def try_collation(collation: Collation, records: Sequence[Any]) -> list[Any]:
    """Collate records alone, in pairs in both orders, and beside a shorter copy of themselves, and compare.

    Args:
        collation: the collation of the run.
        records: some records of the dataset, at least one.

    Returns:
        Those that can be used, as they were given.

    Raises:
        DPConfigError: if the row of a record depends on its neighbour, the collator fails, or no record can be used.
    """
    known = [(record, row) for record in records if (row := collation.fitted(record)) is not None]
    fitted = [row for _, row in known]
    with keep_generators(torch.device("cpu")):
        for a, b in itertools.pairwise(fitted if len(fitted) > 1 else fitted * 2):
            _compare(collation, a, b)
            _compare(collation, b, a)
        pair = beside_shorter(collation, fitted)
        if pair is not None:
            _compare(collation, *pair)
            _compare(collation, *reversed(pair))
    usable = [record for record, row in known if not collation.limits.empty(collation.row(row)).any()]
    if not usable:
        raise DPConfigError(NONE_USABLE)
    return usable


def beside_shorter(collation: Collation, records: Sequence[Any]) -> tuple[Any, Any] | None:
    """A record and its first half, so that padding occurs although all records have one length.

    None where there is nothing to cut, or the collator takes records of one length only.
    """
    for record in records:
        shorter = _first_tokens(record, (length_of(record) + 1) // 2)
        if shorter is not None:
            try:
                collation.collate([record, shorter])
            except Exception:
                return None
            return record, shorter
    return None


def pair_of_records(collation: Collation, records: Sequence[Any], size: int) -> tuple[Batch, list[Batch]] | None:
    """A long and a short record of the dataset in one batch of the real collator, and the rows of each alone.

    A row alone is cut out of the batch, without its padding, so that a collator that draws masks has drawn them once.
    None where no padding is met: without tokens, without a mask, or if rows are not padded at all.

    Both together, in float32, need no more memory than a physical batch in bfloat16: where that has fewer than four
    records, shorter ones are taken, or the first tokens of one.

    Args:
        collation: collation of the run.
        records: some of the dataset.
        size: most records of a physical batch.
    """
    fitted = sorted((r for record in records if (r := collation.fitted(record)) is not None), key=length_of)
    most = size * length_of(fitted[-1]) // 4 if fitted else 0
    shorter = [r for r in fitted if length_of(r) <= most]
    if not shorter:
        first = (_first_tokens(record, most) for record in fitted)
        shorter = [r for r in first if r is not None and _is_learned(collation, r)][:1]
    fitted = shorter or fitted
    is_even = not fitted or length_of(fitted[0]) == length_of(fitted[-1])
    pair = beside_shorter(collation, fitted) if is_even else (fitted[-1], fitted[0])
    parts = [] if pair is None else collation.parts(pair)
    if len(parts) != 1 or parts[0].places != (0, 1):
        return None
    batch = parts[0].batch
    alone = [collation.cut_padding(row_of(batch, b)) for b in range(2)]
    ids = batch.get("input_ids")
    is_padded = isinstance(ids, torch.Tensor) and any(row["input_ids"].shape[1:] != ids.shape[1:] for row in alone)
    return (batch, alone) if is_padded else None


def _is_learned(collation: Collation, record: Any) -> bool:
    """Whether a part of a record can be collated, and has a label: of an answer the beginning is the question."""
    with SuppressRecordErrors():  # of a collator that takes records of one length only
        labels = collation.row(record).get("labels")
        return not isinstance(labels, torch.Tensor) or bool((labels != IGNORED).any())
    return False


def _first_tokens(record: Any, num: int) -> Any:
    """The first tokens of a tokenized record, of each of its choices if it has some, or None."""
    length = length_of(record)
    if not 0 < num < length or not isinstance(record, Mapping):
        return None
    of_choices = has_choices(record.get("input_ids"))

    def cut(value: Any) -> Any:
        if of_choices:
            return [choice[:num] for choice in value] if has_choices(value) else value
        return value[:num] if num_entries(value) == length else value

    return {name: cut(value) for name, value in record.items() if not isinstance(value, str)}


def _compare(collation: Collation, a: Any, b: Any) -> None:
    """Refuse a collator whose rows of `a` and `b` together differ from those of each alone; random draws aside."""
    if collation.keeps_apart(a, b):
        return
    try:
        together, again = (_collate_seeded(collation, [a, b], seed) for seed in (1, 2))
    except DPConfigError:
        raise
    except Exception as error:
        raise DPConfigError(
            f"The collator fails on two training records ({type(error).__name__}: {str(error).rstrip('.')}). {FAILS}"
        ) from error
    _refuse_unusual(together)
    check_rows(together, 2)
    rows = [collation.row(record) for record in (a, b)]
    outside = collation.limits.first_outside(together) if collation.sees_batches else ""
    if outside and not any(collation.limits.failing(row).any() for row in rows):
        raise DPConfigError(
            "Every record that is padded would be left out of its step, for the padding token or the width does "
            f"not fit the model: {outside}"
        )
    # masks of tokens are drawn, though two draws may be alike
    masked = {"input_ids", "labels"} if getattr(collation.collate, "mlm", False) else set()
    drawn = masked | {key for key in together if not _same(together[key], again[key])}
    for place, alone in enumerate(rows):
        # decoder inputs are labels that were padded and then shifted; the labels are compared
        derived = {"decoder_input_ids"} if "labels" in alone else set()
        for key in (together.keys() | alone.keys()) - drawn - derived:
            if key not in alone or key not in together or not _is_row(together[key], alone[key], place):
                raise DPConfigError(
                    f"The collator mixes records: {key!r} of a training record changes beside a second one. {FIX}"
                )


def _refuse_unusual(batch: Batch) -> None:
    """Refuse tensors of a collator that hold no values, or not in rows."""
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
            kind = "without values (on the device 'meta')" if value.is_meta else f"of layout {value.layout}"
            raise DPConfigError(
                f"The collator returns {key!r} as a tensor {kind}, and records are rows of plain tensors. Return "
                "dense tensors; models make sparse ones themselves."
            )


def _collate_seeded(collation: Collation, records: list[Any], seed: int) -> Batch:
    """Collate a batch under a public seed."""
    random.seed(seed)
    np.random.seed(seed)
    manual_seed(seed)
    return dict(collation.collate(records))


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and repr(x) == repr(y)


def _is_row(together: Any, alone: Any, place: int) -> bool:
    """Whether a row of two is the row of one, padded before or behind it with one value."""
    if not isinstance(together, torch.Tensor) or not isinstance(alone, torch.Tensor):
        return type(together) is type(alone)
    if together.dim() == 0 or alone.dim() == 0:
        return _same(together, alone)
    row, own = together[place], alone[0]
    unlike = [dim for dim, (n, m) in enumerate(zip(row.shape, own.shape, strict=False)) if n != m]
    if row.dim() != own.dim() or len(unlike) > 1 or any(row.size(dim) < own.size(dim) for dim in unlike):
        return False
    if not unlike:
        return _same(row, own)
    missing, behind = row.size(unlike[0]) - own.size(unlike[0]), (0, 0) * (row.dim() - 1 - unlike[0])
    for end, sides in ((0, (missing, 0)), (-1, (0, missing))):
        padded = torch.nn.functional.pad(own, (*behind, *sides), value=row.flatten()[end].item())
        if _same(row, padded):
            return True
    return False
