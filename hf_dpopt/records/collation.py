"""Collation: from records to batches, in which the row of a record depends on that record alone.

A collator sees several records at once and may do anything with them: take the type of all from the first, centre
targets, pad on a side that the model does not expect. So:

* records that agree in columns and in the types of all values are given at once to collators of transformers and TRL
  that are known to make a row of each record;
* in every other case a collator sees one record at a time, and the rows are joined here: padded as the model expects,
  or kept apart where they cannot be;
* nothing stops a step: a record that cannot be collated, or that the model cannot look up, contributes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.limits import Limits, is_flat, num_entries
from hf_dpopt.records.losses import IGNORED, num_records
from hf_dpopt.records.rows import SuppressRecordErrors

Batch = dict[str, Any]
Collator = Callable[[list[Any]], Any]

PLAIN = {int, float, bool, str}
PAIR_TOKENS = ("chosen_ids", "rejected_ids")  # as TRL names them
TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")

# Read line by line: what each makes of a record does not depend on the others, up to padding and fresh draws. Exact
# classes only, for a subclass may do more.
KNOWN = {
    "transformers.data.data_collator": {
        "default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification", "DataCollatorForLanguageModeling",
    },
    "trl.trainer.sft_trainer": {"DataCollatorForLanguageModeling"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """A batch, and the places of its rows among the records that were given."""

    batch: Batch
    places: tuple[int, ...]


def declared(collator: Any) -> Any:
    """A known collator that pads targets with `IGNORED`, which no loss takes for a target; any other unchanged."""
    if is_known(collator) and getattr(collator, "label_pad_token_id", IGNORED) != IGNORED:
        return dataclasses.replace(collator, label_pad_token_id=IGNORED)
    return collator


def is_known(collator: Any) -> bool:
    """Whether a collator is one of those whose rows are known to be those of single records."""
    tokenizer = getattr(collator, "tokenizer", None)
    if type(collator).__name__ == "DataCollatorForSeq2Seq" and getattr(tokenizer, "padding_side", "right") == "left":
        return False  # it pads targets on the left, too, and a decoder reads them from there
    if getattr(collator, "padding_free", False) or getattr(collator, "return_position_ids", False):
        return False  # TRL counts positions over the whole batch then
    kind = collator if isinstance(collator, type) or hasattr(collator, "__name__") else type(collator)
    return getattr(kind, "__name__", None) in KNOWN.get(getattr(kind, "__module__", ""), ())


def tokenizer_of(collator: Any) -> Any:
    """The tokenizer that pads the batches of a collator, or None."""
    for name in ("tokenizer", "processing_class", "processor"):
        found = getattr(collator, name, None)
        if found is not None:
            return getattr(found, "tokenizer", found)
    return None


class Collation:
    """Collated batches of records, each row a function of its own record.

    Formal guarantee: the row of a record, padding aside, does not depend on which other records are given, provided a
    known collator does what was read, and any other keeps no memory of the records it saw before.

    Args:
        collate: a list of records -> mapping of tensors, one row for each record.
        limits: what the model can look up; None to accept everything.
        padding_id: token behind the text where rows of different lengths are joined here; models that search for it
            see it, all others see a mask over it.
        clean: removes from a record what no collator may see (user ids, unused columns).
        place: moves a batch to the device.
    """

    def __init__(
        self,
        collate: Collator,
        *,
        limits: Limits | None = None,
        padding_id: int = 0,
        clean: Callable[[Any], Any] = lambda record: record,
        place: Callable[[Batch], Batch] = lambda batch: batch,
    ):
        self.collate, self.limits = declared(collate), limits or Limits()
        self.padding_id, self.clean, self.place = padding_id, clean, place
        self.sees_batches = is_known(collate)

    @classmethod
    def of(cls, collate: Collator | Collation) -> Collation:
        """Return a collation unchanged; wrap a bare collator in one without limits."""
        return collate if isinstance(collate, Collation) else cls(collate)

    def parts(self, records: Sequence[Any]) -> list[Part]:
        """Batches that hold every usable record exactly once; mostly one batch, in the records' order.

        Args:
            records: the records of one physical batch, as the dataset gave them.
        """
        usable = [(i, row) for i, record in enumerate(records) if (row := self._fitted_or_none(record)) is not None]
        if not usable:
            return []
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for i, record in usable:
            groups.setdefault(self._alike(record), []).append((i, record))
        found: list[Part] = []
        for types, group in groups.items():
            together = self._together(group) if types is not None else None
            found += self._one_by_one(group) if together is None else [together]
        return [Part(self.place(part.batch), part.places) for part in found]

    def keeps_apart(self, a: Any, b: Any) -> bool:
        """Whether a known collator never sees two fitted records at once, because their types differ."""
        return self.sees_batches and (self._alike(a) is None or self._alike(a) != self._alike(b))

    def _alike(self, record: Any) -> Any:
        """Key of the records that a collator may see together; None for a record that has to be alone.

        Alone, a row is cut to what is attended, and so it must be cut wherever its batch is made row by row. A record
        that masks tokens of its own at either end would be another one there than beside others.
        """
        if not self.sees_batches or not isinstance(record, Mapping):
            return None
        with SuppressRecordErrors():  # collated alone, where what is wrong with it reaches no other record
            return None if self._masks_its_ends(record) else _types(record)
        return None

    def _masks_its_ends(self, record: Mapping[str, Any]) -> bool:
        """Whether a record masks its first token, or a last one that is not padding."""
        ids: Any = record.get("input_ids")
        mask: Any = record.get("attention_mask")
        if not is_flat(mask) or not len(mask) or (mask[0] and mask[-1]):
            return False
        if not mask[0] or not is_flat(ids) or len(ids) != len(mask):
            return True
        stop = max(i for i, attended in enumerate(mask) if attended) + 1
        return any(int(token) != self.padding_id for token in ids[stop:])

    def fitted(self, record: Any) -> Any:
        """A record as the collator may see it; None if it does not fit."""
        record = self.clean(record)
        return None if self.limits.misfit(record) or self.limits.is_empty(record) else record

    def _fitted_or_none(self, record: Any) -> Any:
        with SuppressRecordErrors():
            return self.fitted(record)
        return None

    def row(self, record: Any) -> Batch:
        """The row of one fitted record, on the CPU.

        Raises:
            DPConfigError: if it is not one row.
            Exception: what the collator raises.
        """
        batch = dict(self.collate([record]))
        check_rows(batch, 1)
        return batch

    def cut_padding(self, row: Batch) -> Batch:
        """The row of one record without its padding, where a mask or the targets show it."""
        if not self.limits.labels_are_targets:
            return trimmed(row)
        cut = _without_padded_targets(row)
        return cut | trimmed({key: value for key, value in cut.items() if key not in TARGETS})

    def _together(self, usable: list[tuple[int, Any]]) -> Part | None:
        """One batch of all records, made by the collator; None if it fails or the rows must be examined one by one."""
        with SuppressRecordErrors():  # of one record of the batch, which the others must not suffer from
            batch = dict(self.collate([record for _, record in usable]))
            is_whole = num_records(batch) == len(usable) and not _mixes_by_padding(batch, usable)
            if is_whole and self._fits(batch):
                return Part(batch, tuple(i for i, _ in usable))
        return None

    def _one_by_one(self, usable: list[tuple[int, Any]]) -> list[Part]:
        rows = []
        for i, record in usable:
            with SuppressRecordErrors():
                row = self.cut_padding(self.row(record))
                if not self.limits.lacks_targets(row):  # which does not show in a batch
                    rows.append((i, row))
        if (parts := self._join(rows)) is not None:
            return parts
        return list(join_rows([row for row in rows if self._join([row]) is not None], self.padding_id))

    def _join(self, rows: list[tuple[int, Batch]]) -> list[Part] | None:
        """Rows of one record each as batches; None if the model cannot look up one of them.

        Formal guarantee: where rows fit together, each fits alone. Padding adds values to a row and takes none away.
        """
        with SuppressRecordErrors():
            parts = list(join_rows(rows, self.padding_id))
            return parts if all(self._fits(part.batch) for part in parts) else None
        return None

    def _fits(self, batch: Batch) -> bool:
        return not self.limits.is_too_wide(batch) and not bool(self.limits.failing(batch).any())


def _types(record: Any) -> tuple | None:
    """All that a collator could take from one record for the others: class, columns, types and depths of values.

    None for a record that has to be alone: one with objects, empty lists, or lists of unlike elements.
    """
    if not isinstance(record, Mapping):
        return None
    found = {name: _type(value) for name, value in record.items()}
    return None if None in found.values() else (type(record), *found.items())


def _type(value: Any) -> Any:
    """The type of a value and of its elements; None if the elements differ in type, or there are none."""
    if type(value) in PLAIN:
        return type(value)
    if isinstance(value, torch.Tensor):
        return (type(value), value.dtype, value.dim()) if value.numel() else None
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value), value.dtype, value.ndim) if value.size and value.dtype.kind in "biuf" else None
    if not isinstance(value, (list, tuple)):
        return None
    kinds: set[Any] = set(map(type, value))
    if not kinds <= PLAIN:
        kinds = set(map(_type, value))
    return (type(value), kinds.pop()) if len(kinds) == 1 and None not in kinds else None


def row_of(batch: Mapping[str, Any], b: int) -> Batch:
    """Take record b of a batch, alone and as wide as the batch."""
    return rows_of(batch, b, b + 1)


def rows_of(batch: Mapping[str, Any], start: int, stop: int) -> Batch:
    """Take some records of a batch, as wide as the batch; of lists, which `join_rows` makes of values, their own."""
    num = num_records(batch)

    def is_of_rows(value: Any) -> bool:
        return value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, list) and len(value) == num

    return {key: value[start:stop] if is_of_rows(value) else value for key, value in batch.items()}


def check_rows(batch: Mapping[str, Any], num: int) -> None:
    """Refuse a collated batch of `num` records that has another number of rows."""
    if num_records(batch) != num:
        raise DPConfigError(
            f"The collator made {num_records(batch)} rows of {num} record{'s' if num > 1 else ''}, so the clip would "
            "not bound what one adds. Use a collator that makes one row per record (DataCollatorWithPadding); cut "
            "long texts into records, or pack short ones, before training."
        )


def _mixes_by_padding(batch: Mapping[str, Any], usable: list[tuple[int, Any]]) -> bool:
    """Whether records of different lengths share a batch without a mask, so that padding counts as text."""
    return "attention_mask" not in batch and len({length_of(record) for _, record in usable}) > 1


def has_choices(ids: Any) -> bool:
    """Whether the tokens of a record are those of several choices, a list of each."""
    return num_entries(ids) > 0 and num_entries(ids[0]) > 0


def length_of(record: Any) -> int:
    """Number of tokens of a record, of the longest of its choices, of both texts of a pair; 0 if it has none."""
    try:
        if "input_ids" not in record:
            return sum(num_entries(record.get("prompt_ids")) + len(record[name]) for name in PAIR_TOKENS)
        ids = record["input_ids"]
        return max(map(len, ids)) if has_choices(ids) else len(ids)
    except Exception:  # whatever a mapping of one's own raises: this only sorts
        return 0


def trimmed(row: Batch) -> Batch:
    """Remove padding from the row of one record, where a mask shows it; an unchanged row if a target is there."""
    ids, mask = row.get("input_ids"), row.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return row
    if ids.dim() not in (2, 3) or mask.shape != ids.shape or len(ids) != 1:
        return row
    if bool((mask != 0).all()) or not bool(mask.any()):
        return row
    if ids.dim() == 3:  # choices of a record, (1, C, T): padding behind the longest
        stop = int(mask[0].any(dim=0).nonzero().max()) + 1
        return {
            k: v[..., :stop] if isinstance(v, torch.Tensor) and v.shape == ids.shape else v for k, v in row.items()
        }
    places = mask[0].nonzero().flatten()
    text, width = slice(int(places[0]), int(places[-1]) + 1), ids.size(1)
    found = {}
    for key, value in row.items():
        is_token = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.size(1) == width
        is_token = is_token and not value.is_floating_point() and not key.startswith("decoder")
        if is_token and key == "labels":
            left = torch.cat([value[:, : text.start], value[:, text.stop :]], dim=1)
            if (left != IGNORED).any():
                return row
        found[key] = value[:, text] if is_token else value
    return found


def _without_padded_targets(row: Batch) -> Batch:
    """Cut the row of one record behind its last target: padding to a multiple may exceed the positions."""
    labels = row.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return row
    targets, width = (labels[0] != IGNORED).nonzero().flatten(), labels.size(1)
    stop = int(targets[-1]) + 1 if len(targets) else 1
    cut = dict(row)
    for key in TARGETS:
        value = row.get(key)
        if isinstance(value, torch.Tensor) and value.shape[1:2] == (width,):
            cut[key] = value[:, :stop]
    return cut


# --- joining rows --------------------------------------------------------------------------------------------------


def join_rows(rows: Sequence[tuple[int, Batch]], padding_id: int) -> Iterator[Part]:
    """Join rows of one record each into batches; rows that padding cannot make equal stay apart.

    Args:
        rows: pairs (place, batch of one row), on the CPU.
        padding_id: fills up the tokens; targets are filled with `IGNORED`.
    """
    groups: dict[Any, list[tuple[int, Batch]]] = {}
    for place, row in rows:
        signature = tuple(sorted((key, *_shape(key, value, row)) for key, value in row.items()))
        groups.setdefault(signature, []).append((place, row))
    fill = {"input_ids": padding_id, "decoder_input_ids": padding_id, "labels": IGNORED}
    for group in groups.values():
        batch = {}
        for key, value in group[0][1].items():
            values, dim = [row[key] for _, row in group], _padded_dim(key, value, group[0][1])
            if dim is not None:  # behind the text
                missing = [max(v.size(dim) for v in values) - v.size(dim) for v in values]
                before = (0, 0) * (value.dim() - 1 - dim)
                pairs = zip(values, missing, strict=True)
                values = [F.pad(v, (*before, 0, num), value=fill.get(key, 0)) for v, num in pairs]
            batch[key] = _stacked(values)
        yield Part(batch, tuple(place for place, _ in group))


def _padded_dim(key: str, value: Any, row: Mapping[str, Any]) -> int | None:
    """The dimension of a tensor that counts tokens, targets, or tokens of choices; None if it has none."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.is_floating_point():
        return None
    ids = row.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() == 3:  # choices of a record: (1, C, T)
        return 2 if value.dim() == 3 and value.size(2) == ids.size(2) else None
    is_token = isinstance(ids, torch.Tensor) and ids.dim() == 2 and value.size(1) == ids.size(1)
    return 1 if key in TARGETS or is_token else None


def _shape(key: str, value: Any, row: Mapping[str, Any]) -> tuple:
    """Key of a column that rows of one batch share; it includes lengths unless a mask shows the padding."""
    if isinstance(value, (list, tuple)):  # one of several values would look like those of several rows
        return ("value",) if len(value) == 1 else ("alone", id(row))
    if not isinstance(value, torch.Tensor):
        return ("value", repr(value))
    dim = _padded_dim(key, value, row)
    if dim is not None and "attention_mask" in row:
        return ("padded", str(value.dtype), dim, *value.shape[1:dim], *value.shape[dim + 1 :])
    return (
        ("tensor", str(value.dtype), *value.shape[1:]) if value.dim() else ("number", str(value.dtype), value.item())
    )


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return values[0] if values[0].dim() == 0 else torch.cat(values)
    is_list_of_one = isinstance(values[0], (list, tuple)) and len(values[0]) == 1
    return [item for value in values for item in value] if is_list_of_one else values[0]
