"""The table of scales before correlated noise: its methods learn, and its climb ends where it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from hf_dpopt.common.types import Released
from hf_dpopt.preclip import OneQuery
from recipes.paper import steps
from recipes.paper.linear import TwoClasses, with_bias
from recipes.paper.one_query import words

pytestmark = pytest.mark.slow

NUM, WORDS = 60, 7


def _records(seed: int = 0) -> TwoClasses:
    rng = np.random.default_rng(seed)
    x_NW = (rng.random((NUM, WORDS)) < 0.4).astype(float)
    truth = rng.standard_normal(WORDS)
    return TwoClasses(with_bias(csr_matrix(x_NW)), (x_NW @ truth + rng.standard_normal(NUM) > 0).astype(int))


def test_the_scale_is_that_of_the_preconditioner():
    moment_W = np.abs(np.random.default_rng(2).standard_normal(WORDS)) - 0.2
    made = OneQuery(floor=1.5, by_rows=False).start({"w": torch.zeros(WORDS)}, clipping_norm=1.0)
    made.receive_opening({"w": torch.tensor(moment_W)})
    expected = steps.inverse_scale({"w": torch.tensor(moment_W)}, 1.5)["w"]
    np.testing.assert_allclose(made.inverse()["w"].inverse.numpy(), expected.numpy(), rtol=1e-6)


def test_an_average_of_releases_makes_the_scale():
    releases, generator = steps.FromReleases(floor=2.0), torch.Generator().manual_seed(0)
    average = torch.zeros(5)
    for _ in range(steps.FIRST_DIVIDED):
        assert releases.scales() == (None,)
        value = torch.randn(5, generator=generator)
        releases.receive(Released({"w": value}))
        average = 0.95 * average + 0.05 * value.square()
    for num in (steps.FIRST_DIVIDED, steps.FIRST_DIVIDED + 1):
        want = steps.inverse_scale({"w": average / (1 - 0.95**num)}, 2.0)["w"]
        torch.testing.assert_close(releases.inverse["w"].float(), want, rtol=1e-5, atol=0)
        releases.receive(Released({"w": releases.inverse["w"].clone()}))  # a gradient of ones, divided by D
        average = 0.95 * average + 0.05


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
