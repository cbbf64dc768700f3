"""The training records of a run and the way they take: columns, loader, collation.

The Trainer shuffles, cuts and pads by itself. Here a loader item is the logical batch of one step, uncollated; it is
cut and collated inside the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.planning import PlannedRun
from hf_dpopt.records.collation import Batch, Collation
from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits, padding_id_of
from hf_dpopt.records.losses import RecordLosses, base_model, num_records
from hf_dpopt.records.rows import is_stored, read_one, spread
from hf_dpopt.records.trial import try_collation
from hf_dpopt.run.batches import Choose, LogicalBatch, LogicalBatchSampler, Records, keep_uncollated, take_all
from hf_dpopt.run.kept_state import changed_by_a_forward, kept_buffers
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.self_check.conditions import in_mode
from hf_dpopt.users.user_batches import of_rows

Remove = Callable[..., Any]  # the Trainer's own way to take columns that a model does not read from a stored dataset
Place = Callable[[Any], Any]  # moves a batch to the device

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
        rows = [_row(collation, record) for record in usable[:RUN]]
        _losses(losses, collation.place(rows[0]))  # alone, and below beside another one
        pairs = [usable[:RUN][i : i + 2] for i in range(0, len(rows), 2)]
        found = [_losses(losses, part.batch) for pair in pairs for part in collation.parts(pair)]
        changed = start.changed(has_caches=False)
    if changed:
        raise UnsupportedModuleError(changed_by_a_forward(changed))
    if num_wrong := sum(int((~torch.isfinite(loss_B)).sum()) for loss_B in found):
        raise DPConfigError(
            f"The losses of {num_wrong} of {len(rows)} training records are NaN or infinite, and steps would leave "
            "such records out silently. Correct or remove them before training; in bfloat16, try float32."
        )
    return usable


def _row(collation: Collation, record: Any) -> Batch:
    """The row of one record, with which the model is tried."""
    row = collation.row(collation.fitted(record))
    if outside := collation.limits.first_outside(row):
        raise DPConfigError(
            f"A training record does not fit the model as the collator makes it: {outside} If the record is right, "
            "look at what the collator adds (mask and padding tokens)."
        )
    return row


def _losses(losses: RecordLosses, batch: Batch) -> torch.Tensor:
    try:
        found, num = losses(batch).detach(), num_records(batch)
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
    if found.shape != (num,):
        raise DPConfigError(
            f"{losses.function}: its losses of {num} record{'s' if num > 1 else ''} have shape {tuple(found.shape)}; "
            f"expected ({num},). A loss that mixes records, or leaves some out, cannot be private: return the "
            "per-record losses, without a mean or a squeeze()."
        )
    return found


def has_columns(dataset: Any) -> bool:
    """Whether a dataset is stored by columns, of which some can be left out."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")


def without_unused(remove: Remove, what: str, dataset: Any) -> Any:
    """A dataset without columns that the model does not read.

    Args:
        remove: the Trainer's own way.
        what: which dataset it is, for the log.
        dataset: any; None for none.
    """
    return remove(dataset, description=what) if has_columns(dataset) else dataset


def prepared_as_training(trainer: Any, dataset: Any) -> Any:
    """Public records as a trainer of TRL prepared its training records; those of other trainers as they are.

    Raises:
        DPConfigError: for records that it cannot prepare.
    """
    prepare, skips = getattr(trainer, "_prepare_dataset", None), ("_skip_prepare_dataset", "_is_vision_dataset")
    if prepare is None or any(getattr(trainer, name, False) for name in skips):
        return dataset
    formatting = getattr(trainer, "_formatting_func", None)
    known = {"processing_class": trainer.processing_class, "args": trainer.args, "packing": False}
    known |= {"formatting_func": formatting, "dataset_name": "public"}
    takes = inspect.signature(prepare).parameters  # those of SFTTrainer are more
    try:
        return prepare(dataset, **{name: value for name, value in known.items() if name in takes})
    except Exception as error:
        raise DPConfigError(
            f"The public_dataset cannot be prepared as the training set is: {type(error).__name__}: {error}. Give a "
            "datasets.Dataset with the columns of train_dataset."
        ) from error


class TrainingRecords:
    """Training records, as the collator and the model may see them: without what the Trainer would take out.

    Args:
        inputs: what the trainer was given, and made of it.
        planned: plan of the run.
        columns: that the model reads.
        remove: takes the others from a stored dataset.
        place: moves a batch to the device.

    Attributes:
        dataset: the training set, without the columns that are removed from a stored one.
        collator: the Trainer's.
        columns: names that the collator may see of a record; None for all of them.
        users: users whose rows the records are; None where records are protected.
        public: public records, likewise; None for none.
    """

    def __init__(
        self, inputs: TrainerInputs, planned: PlannedRun, columns: Collection[str], *, remove: Remove, place: Place
    ):
        self.dataset = without_unused(remove, "training", inputs.train_dataset)
        self.public = without_unused(remove, "public", inputs.public_dataset)
        sees_all = has_columns(self.dataset) or not inputs.args.remove_unused_columns
        self.columns = None if sees_all else columns
        self.collator, self.users, self.place = inputs.data_collator, planned.users, place

    def loader(self, args: TrainingArguments, steps_per_epoch: int, run: Callable[[], PrivateRun]) -> DataLoader:
        """A loader of logical batches; the run that draws them is there when it is asked for the first."""
        records, choose = self._units()
        workers = args.dataloader_num_workers
        # Not passed to accelerator.prepare: it would deal whole batches to ranks and repeat records to even them out.
        return DataLoader(
            records,
            batch_sampler=LogicalBatchSampler(steps_per_epoch, run, choose),  # type: ignore[arg-type]
            collate_fn=keep_uncollated,  # type: ignore[arg-type]
            num_workers=workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=(lambda i: seed_worker(i, workers, args.process_index)) if workers else None,
        )

    def everything(self, run: PrivateRun, at_once: int) -> Iterator[LogicalBatch]:
        """Yield all units of this rank, some at a time; of a user as many records as take part in a step.

        Args:
            run: the run in progress.
            at_once: units that are read together.
        """
        records, choose = self._units()
        num_ranks = run.ranks.size
        for first in range(run.ranks.rank, run.plan.num_examples, at_once * num_ranks):
            mine = np.arange(first, min(first + at_once * num_ranks, run.plan.num_examples), num_ranks)
            # step 0, which no batch has: the choice of a user's records is one of its own
            yield records.__getitems__(choose(run, 0, mine))

    def _units(self) -> tuple[Records, Choose]:
        """The records that a loader reads, and the choice of rows for the units that are drawn."""
        if self.users is None:
            return Records(self.dataset, of_rows), take_all
        return Records(self.dataset, self.users.batch), self.users.choose

    def collation(self, model: nn.Module, losses: RecordLosses) -> tuple[Collation, list[Any]]:
        """Collation of the records, and the sample it was tried on: what would fail in a step is found here.

        Raises:
            DPConfigError: for records that are unlike each other, naming the first.
        """
        limits = Limits.of(model, losses.kind)
        rows = [self.clean(row) for row in self.dataset] if isinstance(self.dataset, (list, tuple)) else self
        refuse_malformed(self.dataset if is_stored(self.dataset) else rows, limits)
        padding_id = padding_id_of(model)
        made = Collation(self.collator, limits=limits, padding_id=padding_id, clean=self.clean, place=self.place)
        return made, look_at_records(self.dataset, made, losses)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Records as the collator and the model may see them."""
        return [self.clean(row) for i in indices for row in read_one(self.dataset, i)]

    def clean(self, record: Any) -> Any:
        """The fields of a record that the collator and the model may see."""
        if self.users is not None:
            record = self.users.without_id(record)
        if self.columns is None or not isinstance(record, Mapping):
            return record
        return {name: value for name, value in record.items() if name in self.columns}

    def collate(self, records: list[Any]) -> Any:
        """A batch of public records, on the device."""
        return self.place(self.collator([self.clean(record) for record in records]))
