"""The table of scales before correlated noise: its methods learn, and its climb ends where it should."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from recipes.paper.linear import TwoClasses, with_bias
from recipes.paper.one_query import words

pytestmark = pytest.mark.slow

NUM, WORDS = 60, 7


def _records(seed: int = 0) -> TwoClasses:
    rng = np.random.default_rng(seed)
    x_NW = (rng.random((NUM, WORDS)) < 0.4).astype(float)
    truth = rng.standard_normal(WORDS)
    return TwoClasses(with_bias(csr_matrix(x_NW)), (x_NW @ truth + rng.standard_normal(NUM) > 0).astype(int))


@pytest.mark.parametrize("method", words.METHODS)
def test_every_method_learns_without_much_noise(method, monkeypatch):
    monkeypatch.setattr(words, "DELAY", 5)
    monkeypatch.setattr(words, "DELTA", 1e-3)
    records = _records()
    task = words.Task(records, records, records, batch=20, num_steps=30)
    made = words.METHODS[method]
    run = words.Run("made up", method, 500.0, 0.1 if made.adam else 1.0, 1.0, made.floors[0], 0)
    results = words.train(lambda name: task, run)
    assert results == words.train(lambda name: task, run)  # seeds say all
    assert results["tuning"] > max(records.labels_N.mean(), 1 - records.labels_N.mean()) + 0.03
