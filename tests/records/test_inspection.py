"""Inspection of stored columns: whole, and in little time."""

from __future__ import annotations

import time

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits, Range


def test_a_million_stored_rows_take_seconds():
    num, width = 1_000_000, 8
    ids = np.random.default_rng(0).integers(0, 100, (num, width))
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), width).cast(pa.list_(pa.int64())),
                      "label": pa.array(ids[:, 0] % 2)})  # fmt: skip
    data = datasets.Dataset(table)
    limits = Limits({"input_ids": Range(100, "words"), "labels": Range(2, "labels")})
    begin = time.process_time()
    refuse_malformed(data, limits, None)
    assert time.process_time() - begin < 5
    with pytest.raises(ValueError, match=r"'input_ids' holds 99, which is outside 0 to 98"):
        refuse_malformed(data, Limits({"input_ids": Range(99, "words")}), None)
