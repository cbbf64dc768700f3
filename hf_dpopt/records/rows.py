"""Rows of an index: what a dataset gives for one record, read so that no other record has a part in it.

One index may yield several rows: a transform that cuts a document into chunks, a tokenizer that returns overflowing
tokens. They belong to one record, so their gradients add up before the clip, as those of a user do. What a dataset
makes of several indices at once may mix them, so only stored columns are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# What a record can be to blame for although it comes from the system: a path that it names, a damaged picture.
OF_A_RECORD = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_environment(error: BaseException) -> bool:
    """Whether an error is the machine's (disk, memory, a library), so that it stops a run whatever a step holds."""
    if isinstance(error, OSError):  # libraries raise it without a number for files they cannot make sense of
        return error.errno is not None and not isinstance(error, OF_A_RECORD)
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # the CPU's allocator
        return True
    return isinstance(error, (MemoryError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError))


def is_stored(dataset: Any) -> bool:
    """Whether rows are read from Arrow columns as they are, without a transform that runs when they are asked for."""
    kind = type(dataset)
    if (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset"):
        return False
    return dataset.format.get("type") != "custom"


def read_rows(dataset: Any, indices: Sequence[int]) -> list[list[Any]]:
    """The rows of every index, in order; an index that cannot be read has none, and so contributes nothing.

    Raises:
        OSError: and what else says that the machine failed, not the record.
    """
    if not indices:
        return []
    if is_stored(dataset):
        try:
            rows = dataset.__getitems__(list(indices))
        except Exception as error:  # a picture that cannot be decoded, beside others that can
            if is_environment(error):
                raise
            rows = []
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
    try:
        return read_one(dataset, index)
    except Exception as error:
        if is_environment(error):
            raise
        return []  # a run that stopped here would tell that the record was drawn


def spread(num_records: int, at_most: int) -> list[int]:
    """At most so many places among the records, the first and the last among them, evenly spread."""
    return np.unique(np.linspace(0, num_records - 1, min(at_most, num_records)).round().astype(int)).tolist()
