"""Hashes of rows: those of a table are those of what Python reads of it, and they tell rows apart."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_dpopt.records.overlap import hashes_of

RNG = np.random.default_rng(0)


def lists(low: int, high: int, num: int = 50) -> list[list[int]]:
    return [RNG.integers(-5, 60_000, size=n).tolist() for n in RNG.integers(low, high, size=num)]


CASES = {
    "lists": [{"x": v} for v in lists(0, 9)],
    "long lists": [{"x": v} for v in lists(900, 2100)],
    "texts": [{"x": "".join(map(chr, v))} for v in [np.abs(v) % 5000 for v in map(np.array, lists(1, 30))]],
    "texts with none": [{"x": None if i % 3 else f"text {i}"} for i in range(50)],
    "bytes": [{"x": bytes(np.array(v) % 256)} for v in map(np.abs, map(np.array, lists(1, 30)))],
    "floats": [{"x": (np.array(v) / 7).tolist()} for v in lists(1, 9)],
    "nested lists": [{"x": [v[:3], v[3:], []]} for v in lists(1, 9)],
    "translations": [{"x": {"en": f"a{v}", "de": f"b{v}"}, "y": i} for i, v in enumerate(lists(1, 4))],
    "conversations": [{"x": [{"role": "user", "content": str(v)}, {"role": "bot", "content": "?"}]} for v in lists(1, 4)],
    "scalars": [{"x": i * 3, "y": i / 7, "z": bool(i % 2)} for i in range(50)],
    "none in lists": [{"x": [[1, 2], None, [i]]} for i in range(50)],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_table_and_its_rows_have_the_same_hashes(case):
    rows = CASES[case]
    dataset = datasets.Dataset.from_list(rows)
    stored, served = hashes_of(dataset.data.table.to_pylist()), hashes_of(list(dataset))
    assert stored.keys() == served.keys() == hashes_of(rows).keys()
    for key in stored:
        for a, b in zip(stored[key], served[key], strict=True):
            assert np.array_equal(a, b), key


def test_slices_formats_and_types_do_not_matter():
    dataset = datasets.Dataset.from_list(CASES["lists"][1:] + [{"x": [7, 8, 9, 10]}])
    whole = hashes_of(dataset.data.table.to_pylist())["x", "ints"][0]
    assert np.array_equal(hashes_of(dataset.data.table.slice(11, 20).to_pylist())["x", "ints"][0], whole[11:31])
    small = dataset.cast(datasets.Features({"x": datasets.LargeList(datasets.Value("int32"))}))
    assert np.array_equal(hashes_of(small.data.table.to_pylist())["x", "ints"][0], whole)
    for kind in ("torch", "numpy"):
        assert np.array_equal(hashes_of(list(dataset.with_format(kind)))["x", "ints"][0], whole)
    fixed = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(range(40)), 4)})
    assert np.array_equal(
        hashes_of(fixed.slice(3, 5).to_pylist())["x", "ints"][0], hashes_of(fixed.to_pylist())["x", "ints"][0][3:8]
    )


def test_rows_that_differ_have_other_hashes():
    """Order, length, zeros at the end, one number."""
    some = [[1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [], [0], [0, 0], [-1], [2**40], [2**40 + 1]]
    assert len(np.unique(hashes_of([{"x": v} for v in some])["x", "ints"][0])) == len(some)
    long = np.zeros((4, 5000), dtype=int)
    long[1, 0] = long[2, -1] = 1
    found = hashes_of([{"x": v} for v in (*long[:3], np.zeros(5001, dtype=int))])["x", "ints"][0]
    assert len(np.unique(found)) == 4
