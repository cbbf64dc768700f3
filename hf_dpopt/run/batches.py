"""One loader item = one logical batch = one optimizer step, whatever its size.

The Trainer groups a fixed number of loader items per update, and accelerate deals items round-robin to ranks and pads
the last round with repeated records. Neither is compatible with sampled batches, so each item is the whole logical
batch (this rank's share of it), it may be empty, and it is cut into physical batches only inside the step.
"""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.clipped_sum import ClippedSum, Taker
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.records.collation import Collation, Collator, length_of, row_of, rows_of, trimmed
from hf_dpopt.records.losses import RecordLosses, num_records
from hf_dpopt.records.rows import is_environment, read_rows
from hf_dpopt.run.run import PrivateRun


class StepIndices(list):
    """Record indices of one step on this rank, and the number of the step.

    Args:
        indices: indices of the records, user after user if users are summed.
        step: optimizer step.
        sizes: records of each user.
        seeds: secret, of what each user draws in the step (local shuffling and dropout).
    """

    def __init__(self, indices: Sequence[int], step: int, sizes: Sequence[int] = (), seeds: Sequence[int] = ()):
        super().__init__(indices)
        self.step, self.sizes, self.seeds = step, sizes, seeds

    def of_rows(self, counts: Sequence[int]) -> StepIndices:
        """The same step, with `sizes` in rows of the dataset; units without a row are left out.

        Args:
            counts: rows of each index.
        """
        ends = np.cumsum(self.sizes if self.sizes else np.ones(len(self), int)).tolist()
        each = [sum(counts[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
        seeds = [seed for seed, size in zip(self.seeds, each, strict=False) if size]
        return StepIndices(self, self.step, [size for size in each if size], seeds)

    def __reduce__(self) -> tuple:  # a list subclass loses its attributes on the way to a loader worker otherwise
        return StepIndices, (list(self), self.step, self.sizes, self.seeds)


class LogicalBatch:
    """The records of one step on this rank, not yet collated. Not a Mapping: `pin_memory` would rebuild it."""

    def __init__(self, records: list[Any], step: int):
        self.records, self.step = records, step

    def physical(self, size: int, collate: Collation | Collator, tokens: int | None = None) -> Iterator[Any]:
        """Yield collated batches of records of similar length: the sum does not care about the order.

        The longest come first: what does not fit is found at once, and shorter batches reuse the memory of longer
        ones.

        Args:
            size: most records of a batch; >= 1.
            collate: the collation of the run, or a collator.
            tokens: most tokens of a batch of several records, padding included; it may then hold more than `size`
                records, but no larger tensor than that of `size` records before. None for no limit.
        """
        collation = Collation.of(collate)
        ordered = sorted(self.records, key=length_of, reverse=True)
        start, most = 0, size * length_of(ordered[0]) if ordered else 0  # tokens that fit into memory
        largest = 0  # values of a row in its largest tensor
        while start < len(ordered):
            longest = length_of(ordered[start])
            num = size if tokens is None or not longest else max(1, min(tokens, most) // longest)
            for part in collation.parts(ordered[start : start + num]):
                values = max(v[0].numel() for v in part.batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
                yield from _pieces(part.batch, max(size, size * largest // max(1, values)))
                largest = max(largest, values)
            start += num


def _pieces(batch: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """Yield a batch of at most so many records, or pieces of it.

    A record may be more than its tokens: targets of a decoder, a picture, what its collator cuts off.
    """
    num = num_records(batch)
    for start in range(0, num, most):
        yield batch if num <= most else rows_of(batch, start, start + most)


def fastest_tokens(num_weights: int, device: torch.device) -> int:
    """Tokens of a physical batch that a device computes fastest.

    On a CPU the layers' inputs should stay in the caches (512 tokens for encoders of 20 million weights: full steps
    took 0.88, with LoRA 0.8 times the time of batches of 64 records; 768 are as fast, with LoRA 2 % faster), unless a
    model is so small that the calls themselves take the time. A GPU takes as many as fit: it waits for launches, which
    take as long for short records. It depends on public numbers alone, so that a resumed run adds in the same order.

    Args:
        num_weights: weights of the model, frozen ones included.
        device: where it is.
    """
    return max(768, 10**10 // num_weights) if device.type == "cpu" else sys.maxsize


@contextlib.contextmanager
def explain_out_of_memory(physical_batch_size: int, step: int) -> Iterator[None]:
    """Add to an out-of-memory error what a private run can do about it, and what became of the step."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises it plainly
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        smaller = (
            f"--per_device_train_batch_size {physical_batch_size // 2} (it changes memory and speed, not the result), "
            if physical_batch_size > 1
            else ""
        )
        raise type(error)(
            f"Out of memory in step {step}, with physical batches of {physical_batch_size} records. Nothing of the "
            f"step was released; it stays charged, once. Try {smaller}--gradient_checkpointing, shorter records or "
            "LoRA, and go on from the last checkpoint with resume_from_checkpoint."
        ) from error


class Records(torch.utils.data.Dataset):
    """A map-style dataset that hands out logical batches, the empty one included.

    Args:
        dataset: the records.
        make: (rows, the step and how many rows each unit has) -> the logical batch.
    """

    def __init__(self, dataset: Any, make: Callable[[list[Any], StepIndices], LogicalBatch]):
        self.dataset, self._make = dataset, make

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: StepIndices) -> LogicalBatch:
        rows = read_rows(self.dataset, indices)
        return self._make([row for of_index in rows for row in of_index], indices.of_rows([len(r) for r in rows]))


Choose = Callable[[PrivateRun, int, np.ndarray], StepIndices]


def take_all(run: PrivateRun, step: int, drawn: np.ndarray) -> StepIndices:
    """The records that were drawn, which are units of their own."""
    return StepIndices(drawn.tolist(), step)


class LogicalBatchSampler:
    """This rank's share of each step's indices: a pure function of (key, step), so resuming skips ahead exactly.

    Args:
        steps_per_epoch: items per epoch; only the Trainer's bookkeeping (epochs, warm-up, progress bar) depends on it.
        run: gives the run in progress; called when iteration starts, for the key is not known earlier.
        choose: what of the units that were drawn takes part in a step: (run, step, units on this rank) -> records.
    """

    def __init__(self, steps_per_epoch: int, run: Callable[[], PrivateRun], choose: Choose = take_all):
        self.steps_per_epoch, self.run, self.epoch, self._choose = steps_per_epoch, run, 0, choose

    @property
    def batch_sampler(self) -> LogicalBatchSampler:
        # Trainer calls `loader.batch_sampler.batch_sampler.set_epoch`: directly on a fresh loader, and through
        # accelerate's SkipBatchSampler after a resume; both paths end here.
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[StepIndices]:
        run = self.run()
        first = self.epoch * self.steps_per_epoch + 1
        for step in range(first, min(first + self.steps_per_epoch, run.plan.num_steps + 1)):
            if run.recovery is not None and run.recovery.covers(step):
                yield StepIndices([], step)  # taken again from what it released: no record is read
                continue
            drawn = run.draw(step)
            yield self._choose(run, step, drawn[run.ranks.rank :: run.ranks.size])


def keep_uncollated(batch: LogicalBatch) -> LogicalBatch:
    """The loader's collate function: collation happens inside the step, physical batch by physical batch."""
    return batch


# --- what a physical batch adds to a clipped sum: records or whole users, whatever the unit of privacy is ---


class WholeUnits(abc.ABC):
    """A batch that knows which of its rows belong together; see `hf_dpopt.users.user_batches`."""

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
                "The model failed on a batch, and with weights in shards its records cannot be left out one by one. "
                "Find what it fails on (the error above), or start plain data parallel."
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
    return [trimmed(row_of(batch, b)) for b in range(num_records(batch))]


class _ForwardFailed(Exception):
    """A forward that gave no loss for each record; nothing was added to a sum."""


class _LossesWhoseFailureShows:
    """The losses of a run, whose failures can be told from those of the clip."""

    def __init__(self, losses: RecordLosses):
        self._losses = losses

    @property
    def model(self) -> Any:
        return self._losses.model

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        try:
            losses_B = self._losses(batch)
        except UnsupportedModuleError:
            raise
        except BaseException as error:
            if is_environment(error):
                raise
            raise _ForwardFailed from error
        if getattr(losses_B, "shape", None) != (num_records(batch),):  # a function of the user left one out
            raise _ForwardFailed
        return losses_B
