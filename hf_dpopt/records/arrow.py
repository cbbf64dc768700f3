"""What is a dataset of the library `datasets`: it is optional, and whoever holds one has imported it."""

from __future__ import annotations

import sys
from typing import Any


def is_arrow(dataset: Any) -> bool:
    """Whether its rows lie in an Arrow table: a `datasets.Dataset`."""
    return _is_a(dataset, "Dataset")


def is_stream(dataset: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`, which starts anew at each reading."""
    return _is_a(dataset, "IterableDataset")


def _is_a(dataset: Any, name: str) -> bool:
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, getattr(module, name, ()))
