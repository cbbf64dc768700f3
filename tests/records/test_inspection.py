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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input_ids": [5, 100]}, "'input_ids' holds 100"),
        ({"input_ids": [5, None]}, "'input_ids' holds a missing value"),
        ({"label": None}, "'label' is missing"),
        ({"attention_mask": [1]}, "'attention_mask' has 1 values for the 2 tokens"),
    ],
)
def test_the_record_is_named_wherever_it_is(change, told):
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1], "label": 1}] * 25_000
    rows[20_001] = rows[0] | change
    limits = Limits({"input_ids": Range(100, "words")}, per_token=("attention_mask",))
    with pytest.raises(ValueError, match=f"^Training record 20001: {told}"):
        refuse_malformed(datasets.Dataset.from_list(rows), limits, None)
