"""Draws from very many records: frozen batches, bit for bit, without an array as long as the data."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from hf_dpopt.randomness import cipher
from hf_dpopt.randomness.cipher import random_words, word_blocks
from hf_dpopt.randomness.source import derive_key
from hf_dpopt.sampling import SAMPLERS, balls_in_bins, check, cyclic_poisson, fixed_order
from hf_dpopt.sampling.check import ParticipationCheck
from hf_dpopt.users.index import UserIndex, choose_rows
from hf_dpopt.users.training import UserData

N, BATCH = 1003, 45
CAP = 46  # about half of the batches are cut


def _all_at_once(sampler, key: bytes, step: int) -> np.ndarray:
    """Batches as releases up to 0.1.0 drew them: with the words of all records in memory."""
    n, num_bins = sampler.num_examples, sampler.steps_per_epoch
    if sampler.name == "fixed_order":
        start = (step % num_bins) * sampler.expected_batch_size
        order = np.argsort(random_words(key, 0, n), kind="stable")
        return np.sort(order[start : start + sampler.expected_batch_size])
    if sampler.name == "balls_in_bins":
        bins = random_words(derive_key(key, "balls in bins"), 0, n) % np.uint64(num_bins)
        return np.flatnonzero(bins == step % num_bins)
    words = random_words(key, step, n)
    if sampler.name == "cyclic_poisson":
        groups = random_words(derive_key(key, "cyclic groups"), 0, n) % np.uint64(sampler.num_groups)
        is_on = groups == step % sampler.num_groups
        return np.flatnonzero(is_on & (words < np.uint64(int(sampler.group_rate * 2.0**64))))
    batch = np.flatnonzero(words < np.uint64(int(sampler.sample_rate * 2.0**64)))
    if sampler.name != "truncated_poisson" or len(batch) <= sampler.max_batch_size:
        return batch
    priorities = random_words(key, step, n + len(batch))[n:]
    return np.sort(batch[np.argsort(priorities, kind="stable")[: sampler.max_batch_size]])


@pytest.mark.parametrize("is_large", [False, True], ids=["kept", "in parts"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_are_those_of_words_in_memory(monkeypatch, name, is_large):
    if is_large:
        for module, constant, value in (
            (cipher, "WORD_BLOCK", 64), (cyclic_poisson, "WORD_BLOCK", 64), (cyclic_poisson, "MOST_KEPT", 10),
            (fixed_order, "WINDOW", 100), (fixed_order, "_BITS", 5), (balls_in_bins, "MOST_KEPT", 150),
        ):  # fmt: skip
            monkeypatch.setattr(module, constant, value)
    more = {"cyclic_poisson": {"num_groups": 5}, "truncated_poisson": {"cap": CAP}}.get(name, {})
    sampler, key = SAMPLERS[name](num_examples=N, expected_batch_size=BATCH, **more), os.urandom(32)
    sizes = []
    for step in [*range(50), 10**6]:
        drawn = sampler.draw(key, step)
        assert drawn.dtype == np.int64
        np.testing.assert_array_equal(drawn, _all_at_once(sampler, key, step))
        sizes.append(len(drawn))
    assert name != "truncated_poisson" or (max(sizes) == CAP and sizes.count(CAP) > 5)


def test_equal_words_keep_their_order(monkeypatch):
    """Also where a window ends between them: records of one word are in the order of their numbers."""
    words = np.repeat(np.arange(8, dtype=np.uint64) << np.uint64(60), 25)
    monkeypatch.setattr(fixed_order, "random_words", lambda key, step, num: words)
    monkeypatch.setattr(fixed_order, "word_blocks", lambda key, step, num: [(0, words[:70]), (70, words[70:])])
    monkeypatch.setattr(fixed_order, "WINDOW", 30)
    fixed_order._counts.cache_clear()
    fixed_order._window.cache_clear()
    found = [fixed_order._window(b"key of equal words", 200, i) for i in range(7)]
    assert np.concatenate(found).tolist() == list(range(200))


@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("first", [0, 1, 2, 77])
def test_words_in_blocks_and_from_a_place_are_the_words(monkeypatch, num, first):
    monkeypatch.setattr(cipher, "WORD_BLOCK", 64)
    key = os.urandom(32)
    blocks = [(start, words.copy()) for start, words in word_blocks(key, 3, num)]
    assert [start for start, _ in blocks] == list(range(0, num, 64))
    whole = random_words(key, 3, first + num)
    np.testing.assert_array_equal(
        np.concatenate([np.zeros(0, np.uint64), *(words for _, words in blocks)]), whole[:num]
    )
    np.testing.assert_array_equal(random_words(key, 3, num, first=first), whole[first:])


LARGE = """
import resource, sys, numpy as np
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.check import ParticipationCheck
name, n = sys.argv[1], int(sys.argv[2])
more = {"num_groups": 4} if name == "cyclic_poisson" else {}
sampler = SAMPLERS[name](num_examples=n, expected_batch_size=1000, **more)
checked = ParticipationCheck(sampler, bytes(32), 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in (1, 2):
    drawn = sampler.draw(bytes(32), step)
    assert 700 < len(drawn) < 1300 and drawn[-1] > n / 2
    checked.observe(step, drawn)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_memory_does_not_grow_with_the_records(repo, name):
    """At 10^8 records, of which an array of words alone has 800 MB; the check of participations counts in it."""
    command = [sys.executable, "-c", LARGE, name, "100000000"]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    before, peak = map(int, done.stdout.split())
    assert (peak - before) / 1024 < 600, (before, peak)


def test_some_of_very_many_records_are_counted(monkeypatch):
    """A sampler that serves each record in every other step, where it promised every fourth, is found out."""
    monkeypatch.setattr(check, "MOST_COUNTED", 100)  # a batch has none of them with probability 0.75^100
    sampler = SAMPLERS["fixed_order"](num_examples=1000, expected_batch_size=250)
    key = os.urandom(32)
    checked = ParticipationCheck(sampler, key, 1)
    for step in range(1, 9):
        checked.observe(step, sampler.draw(key, step))
    with pytest.raises(check.DPConfigError, match="Step 9 was not run"):
        checked.observe(9, sampler.draw(key, 7))


def test_places_are_those_of_a_loop_over_users():
    generator = np.random.default_rng(0)
    sizes = generator.zipf(1.6, 400).clip(max=50)
    cuts = np.concatenate([[0], sizes.cumsum()])
    index = UserIndex(cuts, generator.permutation(cuts[-1]).astype(np.uint32), "any")
    key = os.urandom(32)
    for limit in (1, 3, 60):
        data = object.__new__(UserData)
        data.index, data.records_per_user = index, limit
        want = np.full((400, limit), -1)
        for user in range(400):
            rows = choose_rows(index.rows(user), limit, key, "capped", str(user))
            want[user, : len(rows)] = rows
        places = generator.permutation(400 * limit)
        for drawn in (places, np.sort(places), places[:7], places[:0]):
            found = data.records_in_places(key, drawn)
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found, want.reshape(-1)[drawn])


def test_a_million_users_above_the_limit_cost_what_a_batch_does(monkeypatch):
    """Choices are made for the users of a batch alone: no pass over all, and no table of their places."""
    num_users, limit, chosen = 10**6, 256, 0

    def counted(*arguments):
        nonlocal chosen
        chosen += 1
        return choose_rows(*arguments)

    monkeypatch.setattr("hf_dpopt.users.training.choose_rows", counted)
    cuts, many = np.arange(num_users + 1) * (limit + 1), (limit + 1) * num_users
    data = object.__new__(UserData)
    # of 257 million rows, of which none has to be in memory
    data.index, data.records_per_user = UserIndex(cuts, np.broadcast_to(np.uint32(7), (many,)), "any"), limit
    places = np.sort(np.random.default_rng(0).choice(num_users * limit, 1000, replace=False))
    tracemalloc.start()
    try:
        found = data.records_in_places(bytes(32), places)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()
    assert chosen == len(np.unique(places // limit)) > 900 and (found == 7).all()
