"""Whether a dataset is the one a run began with, in its order: a digest of some of its records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.records.overlap import content_of

SAMPLED = 64  # records that are read


def data_mark(dataset: Any) -> str | None:
    """Digest of the number of records and of `SAMPLED` of them, at places that depend on that number alone.

    A shuffle, a reversal, or rows that were put in or left out move nearly every record and are found; two records
    that changed places are most likely not.

    Args:
        dataset: records, with a length and rows.

    Returns:
        Hexadecimal; None if a record reads differently the second time (random augmentation), or holds nothing that
        can be compared between processes.
    """
    num_records = len(dataset)
    rng = np.random.default_rng(num_records)
    places = np.unique(rng.integers(num_records, size=SAMPLED)).tolist() if num_records else []
    digests = [_digest(dataset, places, num_records) for _ in range(2)]
    return digests[0] if digests[0] == digests[1] else None


def check_same_everywhere(dataset: Any) -> None:
    """Refuse processes that have other training records than each other, as far as `data_mark` tells.

    The batch of a step is dealt out by the numbers of its records. Where they are in another order on another machine,
    one record has two numbers and may be in a batch twice, which moves the sum by twice the clipping norm.

    Args:
        dataset: records of this process, as they are trained on.

    Raises:
        DPConfigError: on every process, if two of them differ.
    """
    ranks = current_ranks()
    if ranks.size == 1:
        return
    lengths = ranks.every(lambda: len(dataset))
    marks = ranks.every(lambda: data_mark(dataset))
    for other in range(ranks.size):
        if lengths[other] != lengths[0] or None not in (marks[0], marks[other]) and marks[other] != marks[0]:
            raise DPConfigError(
                f"Process {other} has other training records than process 0, or another order, so one could be in a "
                "batch twice. Give all machines the same dataset, prepared alike (a shuffle needs a seed)."
            )


def _digest(dataset: Any, places: Iterable[int], num_records: int) -> str | None:
    digest, has_content = hashlib.blake2b(str(num_records).encode(), digest_size=16), False
    for place in places:
        for key, content in sorted(content_of(dataset[place]).items()):
            has_content = True
            digest.update(repr(key).encode() + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest() if has_content else None
