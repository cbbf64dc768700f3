"""A dataset in another order has another mark; the same one has the same in every process."""

from __future__ import annotations

import subprocess
import sys

import datasets
import numpy as np
import torch

from hf_dpopt.records.data_mark import data_mark


def _rows(num=500):
    return [{"ids": [i, i * i], "label": i % 2, "text": f"row {i}", "x": torch.tensor([float(i)])} for i in range(num)]


def test_every_change_that_moves_records_is_found():
    rows = _rows()
    mark = data_mark(rows)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(500)]
    for other in (rows[::-1], shuffled, rows[1:], rows[1:] + rows[:1], [*rows[:100], *rows[:1], *rows[100:]]):
        assert data_mark(other) != mark
    assert data_mark(list(rows)) == mark == data_mark(_rows())
    changed = [{**row, "x": row["x"] + 1} for row in rows]
    assert data_mark(changed) != mark


def test_kinds_of_datasets():
    plain = [{"a": i, "b": [i, i + 1], "c": None if i % 2 else "x"} for i in range(50)]
    made = datasets.Dataset.from_list(plain)
    assert data_mark(made) == data_mark(plain) is not None
    assert data_mark(made.shuffle(seed=1)) != data_mark(made)
    assert data_mark([]) is None
    assert data_mark([(i, np.float32(i)) for i in range(9)]) is not None
    assert data_mark([{"x": torch.ones(2, dtype=torch.bfloat16)}] * 3) is not None


def test_what_cannot_be_compared_has_no_mark():
    """Objects print their addresses, and augmented records differ every time: a resume would be refused for nothing."""

    class Augmented(list):
        def __getitem__(self, i):
            return {"x": np.random.rand(3)}

    assert data_mark(Augmented(range(9))) is None
    assert data_mark([object()] * 9) is None


def test_the_mark_is_the_same_in_another_process(repo):
    code = "from tests.sampling.test_data_mark import _rows, data_mark; print(data_mark(_rows()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.strip() == data_mark(_rows())
