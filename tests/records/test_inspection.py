"""Inspection of stored columns: whole, and in little time."""

from __future__ import annotations

import datasets
import pytest

from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits, Range


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
        refuse_malformed(datasets.Dataset.from_list(rows), limits)
