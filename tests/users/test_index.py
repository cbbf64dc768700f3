"""The index of users: against a dict of lists, through views of a dataset."""

from __future__ import annotations

import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_dpopt import DPConfigError
from hf_dpopt.users import UserIndex, choose_rows, index

KEY = bytes(range(32))


def _slow(ids) -> list[list[int]]:
    users: dict = {}
    for row, user in enumerate(ids):
        users.setdefault(user, []).append(row)
    return list(users.values())


def _all(found: UserIndex) -> list[list[int]]:
    return [found.rows(user).tolist() for user in range(found.num_users)]


@pytest.mark.parametrize("kind", ["list", "dataset", "shuffled", "strings", "categories", "floats"])
def test_the_rows_of_a_user_are_those_of_a_dict(monkeypatch, kind):
    monkeypatch.setattr(index, "CHUNK", 64)  # users reach over many of them
    ids = np.random.default_rng(0).zipf(1.5, 1000).clip(max=300).tolist()
    if kind in ("strings", "categories"):
        ids = [f"user {u}" for u in ids]
    if kind == "floats":
        ids = [
            u - 1.0 if i % 2 else 1.0 - u for i, u in enumerate(ids)
        ]  # with 0.0 and -0.0, which a dict takes for one
    rows = [{"author": user, "text": str(i)} for i, user in enumerate(ids)]
    data = rows if kind == "list" else datasets.Dataset.from_list(rows)
    if kind == "shuffled":
        data = data.shuffle(seed=3).select(range(100, 900))
        ids = data["author"]
    if kind == "categories":
        data = data.class_encode_column("author")
    found = UserIndex.build(data, "author")
    assert _all(found) == _slow(ids)
    assert found.num_rows == len(ids) and found.sizes().tolist() == [len(rows) for rows in _slow(ids)]


def test_an_index_has_four_bytes_for_each_row(monkeypatch):
    """And as many while it is built, beside a part of the rows: 10^8 rows fit into a gigabyte."""
    monkeypatch.setattr(index, "CHUNK", 10_000)
    table = pa.table({"author": np.random.default_rng(0).integers(100, size=10**6)})
    data, before = datasets.Dataset(table), pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        found = UserIndex.build(data, "author")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_rows == 10**6 and kept < 4.1 * 10**6 and peak < 8.5 * 10**6
    assert pa.total_allocated_bytes() == before


def test_an_index_knows_its_rows():
    rows = [{"author": f"user {i % 3}", "thread": i % 3} for i in range(30)]
    found = UserIndex.build(rows, "author")
    found.check_is_of(list(rows), "author")
    for other in (rows[1:] + rows[:1], [{**r, "author": r["author"].upper()} for r in rows]):
        with pytest.raises(DPConfigError, match="not in the order"):
            found.check_is_of(other, "author")
    assert UserIndex.build(rows, "thread").digest != found.digest


def test_choices_are_uniform_of_the_user_alone_and_fresh_in_every_step():
    rows = np.arange(100, 110)
    counts = np.zeros(10)
    for step in range(4000):
        chosen = choose_rows(rows, 3, KEY, str(step), "7")
        assert len(set(chosen.tolist())) == 3 and (np.diff(chosen) > 0).all()
        counts[chosen - 100] += 1
    # 12,000 places in 10 rows: a binomial stddev of 29, and 5.3 of them is a false alarm in 10^6
    assert np.abs(counts - 1200).max() < 5.3 * np.sqrt(4000 * 0.3 * 0.7)
    assert choose_rows(rows, 3, KEY, "1", "7").tolist() == choose_rows(rows, 3, KEY, "1", "7").tolist()
    assert any(
        choose_rows(rows, 3, KEY, "1", "7").tolist() != choose_rows(rows, 3, KEY, "1", str(u)).tolist()
        for u in range(3)
    )
    assert choose_rows(rows, 10, KEY, "1", "7").tolist() == rows.tolist() == choose_rows(rows, 99, KEY, "1").tolist()
