"""The training records of a run and the way they take: columns, loader, collation.

The Trainer shuffles, cuts and pads by itself. Here a loader item is the logical batch of one step, uncollated; it is
cut and collated inside the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.planning import PlannedRun
from hf_dpopt.huggingface.preparation import look_at_records
from hf_dpopt.records.collation import Collation
from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits, padding_id_of
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.records.rows import is_stored, read_one
from hf_dpopt.run.batches import Choose, LogicalBatch, LogicalBatchSampler, Records, keep_uncollated, take_all
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.users import UserData
from hf_dpopt.users.user_batches import of_rows


def has_columns(dataset: Any) -> bool:
    """Whether a dataset is stored by columns, of which some can be left out."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")


def without_unused(remove: Callable[..., Any], what: str, dataset: Any) -> Any:
    """A dataset without columns that the model does not read.

    Args:
        remove: the Trainer's own way.
        what: which dataset it is, for the log.
        dataset: any; None for none.
    """
    return remove(dataset, description=what) if has_columns(dataset) else dataset


@dataclasses.dataclass(frozen=True)
class TrainingRecords:
    """Training records, as the collator and the model may see them.

    Args:
        dataset: the training set, without the columns that the Trainer removes from a stored one.
        collator: the Trainer's.
        columns: names that the collator may see of a record; None for all of them.
        users: users whose rows the records are; None where records are protected.
        public: public records, likewise; None for none.
        place: moves a batch to the device.
    """

    dataset: Any
    collator: Any
    columns: Collection[str] | None
    users: UserData | None
    public: Any
    place: Callable[[Any], Any]

    @classmethod
    def of(
        cls,
        inputs: TrainerInputs,
        planned: PlannedRun,
        columns: Collection[str],
        *,
        remove: Callable[..., Any],
        place: Callable[[Any], Any],
    ) -> TrainingRecords:
        """Take out of the records what the Trainer would take out.

        Args:
            inputs: what the trainer was given, and made of it.
            planned: plan of the run.
            columns: that the model reads.
            remove: takes the others from a stored dataset.
            place: moves a batch to the device.
        """
        dataset = without_unused(remove, "training", inputs.train_dataset)
        public = without_unused(remove, "public", inputs.public_dataset)
        sees_all = has_columns(dataset) or not inputs.args.remove_unused_columns
        return cls(dataset, inputs.data_collator, None if sees_all else columns, planned.users, public, place)

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
