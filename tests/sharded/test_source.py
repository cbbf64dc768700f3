"""Noise of shards: bit-equal to the whole stream, counted, and refused where an element lies nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness import sharded
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.sharded import FINGERPRINT_ROWS, Place, ShardedSource

KEY = bytes(range(32))
SHAPES = {"a": (7, 3), "b": (5,), "c": (1, 4), "d": (64, 1000)}


class Given(Ranks):
    """Ranks whose places are known beforehand."""

    def __init__(self, places: list[tuple[Place, ...]], rank: int):
        super().__init__(len(places), rank)
        self._places = places

    def every(self, compute: Any) -> list[Any]:
        assert compute() == self._places[self.rank]
        return self._places

    sum = same = largest = gather = None  # type: ignore[assignment]


def rows(num: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows, as torch.chunk deals them."""
    starts = [0, *torch.cumsum(torch.tensor([len(c) for c in torch.arange(num).chunk(size)]), 0).tolist()]
    return (starts[rank], starts[rank + 1] - starts[rank]) if rank < len(starts) - 1 else (num, 0)


def places(size: int) -> list[tuple[Place, ...]]:
    return [
        tuple(
            Place(shape, first * row, num * row, True)
            for shape in SHAPES.values()
            for (first, num), row in [(rows(shape[0], rank, size), torch.Size(shape[1:]).numel())]
        )
        for rank in range(size)
    ]


def shard_source(monkeypatch, whole, everyone, rank) -> ShardedSource:
    """A source that was placed, with tensors that stand for shards."""
    source = ShardedSource(whole, Given(everyone, rank))
    mine = dict(zip(SHAPES, everyone[rank], strict=True))
    tensors = {name: torch.empty(SHAPES[name]) for name in SHAPES}
    names = {id(tensor): name for name, tensor in tensors.items()}
    monkeypatch.setattr(sharded, "elements_of", lambda t: mine[names[id(t)]][1:3])
    monkeypatch.setattr(sharded, "is_sharded", lambda t: mine[names[id(t)]].is_sharded)
    source.place(tensors)
    return source


@pytest.mark.parametrize("size", [2, 3, 8])
def test_shards_are_parts_of_the_whole_to_the_last_bit(monkeypatch, size):
    whole = ChaCha20Gaussian(KEY)
    everyone = places(size)
    for tensor, shape in enumerate(SHAPES.values()):
        got, added = [], []
        for rank in range(size):
            source = shard_source(monkeypatch, ChaCha20Gaussian(KEY), everyone, rank)
            num = everyone[rank][tensor].num
            got.append(source.normal((num,), step=5, tensor=tensor))
            total = torch.ones(num)
            source.add_to({tensor: total}, stddev=3.0, step=6)
            added.append(total)
        want = whole.normal(shape, step=5, tensor=tensor).flatten()
        assert torch.equal(torch.cat(got), want)
        total = torch.ones(shape)
        whole.add_to({tensor: total}, stddev=3.0, step=6)
        assert torch.equal(torch.cat(added), total.flatten())


def test_no_two_ranks_share_noise(monkeypatch):
    everyone = places(2)
    one, two = (shard_source(monkeypatch, ChaCha20Gaussian(KEY), everyone, rank) for rank in (0, 1))
    assert not torch.equal(one.normal((32000,), step=1, tensor=3), two.normal((32000,), step=1, tensor=3))


def test_the_fingerprint_of_a_key_is_the_same_on_all(monkeypatch):
    source = ShardedSource(ChaCha20Gaussian(KEY), Given(places(2), 1))
    want = ChaCha20Gaussian(KEY).normal((2,), step=FINGERPRINT_ROWS, tensor=0)
    assert torch.equal(source.normal((2,), step=FINGERPRINT_ROWS, tensor=0), want)


def test_nothing_is_drawn_before_the_places_are_known():
    source = ShardedSource(ChaCha20Gaussian(KEY), Given(places(2), 0))
    with pytest.raises(DPConfigError, match="released without noise"):
        source.normal((4,), step=1, tensor=0)


def test_another_number_of_elements_is_refused(monkeypatch):
    source = shard_source(monkeypatch, ChaCha20Gaussian(KEY), places(2), 0)
    with pytest.raises(DPConfigError, match="released without noise"):
        source.add_to({0: torch.zeros(11)}, stddev=1.0, step=1)


@pytest.mark.parametrize("fault", ["gap", "overlap", "whole on one", "other shape"])
def test_an_element_that_lies_nowhere_or_twice_is_refused(monkeypatch, fault):
    everyone = places(2)
    last = everyone[1][3]
    wrong = {
        "gap": last._replace(first=last.first + 1, num=last.num - 1),
        "overlap": last._replace(first=last.first - 1, num=last.num + 1),
        "whole on one": Place(last.whole, 0, 64000, False),
        "other shape": last._replace(whole=(1000, 64)),
    }[fault]
    everyone[1] = (*everyone[1][:3], wrong)
    with pytest.raises(DPConfigError, match="do not hold each of its elements once"):
        shard_source(monkeypatch, ChaCha20Gaussian(KEY), everyone, 0)
