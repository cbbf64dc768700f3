"""Recognition of datasets of the library `datasets`, which is optional: whoever holds one has imported it."""

from __future__ import annotations

import sys
from typing import Any


def is_arrow(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, whose rows lie in an Arrow table."""
    return _is_a(dataset, "Dataset")


def is_stream(dataset: Any) -> bool:
    """Whether this is a `datasets.IterableDataset`, which starts anew at each reading."""
    return _is_a(dataset, "IterableDataset")


def _is_a(dataset: Any, name: str) -> bool:
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, getattr(module, name, ()))
