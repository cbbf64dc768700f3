"""Rows of an index: what a dataset gives for one record, read so that no other record influences it.

One index may yield several rows: a transform that cuts a document into chunks, a tokenizer that returns overflowing
tokens. They belong to one record, so their gradients add up before the clip, as those of a user do. What a dataset
makes of several indices at once may mix them, so only stored columns are read together.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# What the system says of itself; every other number (no such file, a name too long) can be a record's doing.
OF_THE_MACHINE = {
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE,
    errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENODEV, errno.ENXIO, errno.EPIPE,
}  # fmt: skip


def is_environment(error: BaseException) -> bool:
    """Whether an error is the machine's (disk, memory, an interrupt) and not a record's, so that it stops a run."""
    if isinstance(error, OSError):  # libraries raise it without a number for files they cannot make sense of
        return error.errno in OF_THE_MACHINE
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # the CPU's allocator
        return True
    kinds = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, KeyboardInterrupt, SystemExit, GeneratorExit)
    return isinstance(error, kinds)


class SuppressRecordErrors:
    """Suppress errors of records inside a `with`, so that they tell nothing; those of the machine pass.

    A record that fails is left out by what comes after the context. Panics of tokenizers are no `Exception`.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return error is not None and not is_environment(error)


def is_stored(dataset: Any) -> bool:
    """Whether rows are read from Arrow columns as they are, without a transform at reading time."""
    kind = type(dataset)
    if (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset"):
        return False
    return dataset.format.get("type") != "custom"


def read_rows(dataset: Any, indices: Sequence[int]) -> list[list[Any]]:
    """The rows of every index, in order; an index that cannot be read has none and contributes nothing.

    Raises:
        OSError: or another error that says that the machine failed, not the record.
    """
    if not indices:
        return []
    if is_stored(dataset):
        rows: list[Any] = []
        with SuppressRecordErrors():  # a picture that cannot be decoded, beside others that can
            rows = dataset.__getitems__(list(indices))
        if len(rows) == len(indices):
            return [[row] for row in rows]
    return [_read(dataset, index) for index in indices]


def read_one(dataset: Any, index: int) -> list[Any]:
    """The rows of one index.

    Raises:
        Exception: what the dataset raises.
    """
    several = getattr(dataset, "__getitems__", None)
    return list(several([index])) if callable(several) else [dataset[index]]


def _read(dataset: Any, index: int) -> list[Any]:
    with SuppressRecordErrors():  # a run that stopped here would tell that the record was drawn
        return read_one(dataset, index)
    return []


def spread(num_records: int, at_most: int) -> list[int]:
    """Places of `at_most` records or fewer, evenly spread, the first and the last included."""
    return np.unique(np.linspace(0, num_records - 1, min(at_most, num_records)).round().astype(int)).tolist()
