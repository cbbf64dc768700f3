"""Balls in bins: where records land, and what a run costs.

Keys are fresh in every run. ALPHA is the false-alarm probability of each random test, whatever the key.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, NoOpDpEvent
from scipy import stats

from hf_dpopt.accounting.random_allocation import BallsInBinsDpEvent
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import IdentityStrategy, Participation
from hf_dpopt.sampling.balls_in_bins import BallsInBinsSampler

ALPHA = 1e-6


@pytest.fixture
def key():
    return os.urandom(32)


def _sampler(n=2000, expected=50):
    return BallsInBinsSampler(num_examples=n, expected_batch_size=expected)


def _bins(sampler, key):
    """The bin of every record."""
    found = np.full(sampler.num_examples, -1)
    for step in range(sampler.steps_per_epoch):
        found[sampler.draw(key, step)] = step
    return found


@pytest.mark.parametrize("n, expected", [(2000, 50), (101, 10), (3, 1), (5, 5)])
def test_every_epoch_serves_every_record_once_in_the_same_batches(key, n, expected):
    sampler = _sampler(n, expected)
    epochs = [
        [sampler.draw(key, step) for step in range(e * sampler.steps_per_epoch, (e + 1) * sampler.steps_per_epoch)]
        for e in range(3)
    ]
    for batches in epochs:
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))
        for batch, first in zip(batches, epochs[0], strict=True):
            assert batch.dtype == np.int64 and (np.diff(batch) > 0).all()
            np.testing.assert_array_equal(batch, first)


def test_batches_cannot_be_changed(key):
    batch = _sampler().draw(key, 0)
    with pytest.raises(ValueError, match="read-only"):
        batch[:] = 0


def test_records_are_spread_evenly_and_independently():
    """Chi-square of 20 runs: of the bins, and of pairs of neighbouring records, each at level ALPHA.

    Power: a bin that is 10% too likely, or records that stay together once in 20 times, are caught almost surely.
    """
    sampler = _sampler(20_000, 2000)  # 10 bins
    bins = np.stack([_bins(sampler, os.urandom(32)) for _ in range(20)])
    for observed in (bins, 10 * bins[:, ::2] + bins[:, 1::2]):
        counts = np.bincount(observed.ravel(), minlength=10 if observed is bins else 100)
        assert stats.chisquare(counts).pvalue > ALPHA


def test_one_record_less_moves_no_other(key):
    """The last record leaves: the bins of the others are what they were."""
    more, less = _sampler(1999, 50), _sampler(1998, 50)
    assert more.steps_per_epoch == less.steps_per_epoch == 40
    np.testing.assert_array_equal(_bins(more, key)[:-1], _bins(less, key))


def test_batch_sizes_are_random(key):
    """A fixed size would be another mechanism: here it is binomial, and 40 sizes agree with probability < 1e-30."""
    assert len({len(_sampler().draw(key, step)) for step in range(40)}) > 1


def test_what_a_strategy_and_an_accountant_can_rely_on():
    sampler = _sampler()
    assert sampler.participation(81) == Participation(3, 40, "fixed_epoch")
    assert sampler.max_participations([20, 81]) == 1 + 3  # two chains
    assert sampler.event(1.5, 81) == BallsInBinsDpEvent(IdentityStrategy(), 1.5, 81, 40)
    assert isinstance(sampler.event(1.5, [0, 0]), NoOpDpEvent)
    assert sampler.event(1.5, [0, 81]) == sampler.event(1.5, 81)
    two = sampler.event(1.5, [81, 7])
    assert isinstance(two, ComposedDpEvent) and [event.num_steps for event in two.events] == [81, 7]
    assert hash(sampler.event(1.5, 81)) == hash(sampler.event(1.5, 81))


def test_refusals():
    for allowed in ("add_or_remove_one", "zero_out"):
        _sampler().check_adjacency(allowed)
    with pytest.raises(DPConfigError, match="zero_out"):
        _sampler().check_adjacency("replace_one")
    with pytest.raises(DPConfigError, match="smaller batch"):
        _sampler(10, 11)
    with pytest.raises(DPConfigError, match="noise_multiplier"):
        _sampler().event(0.0, 10)
    with pytest.raises(DPConfigError, match="num_bins=100000000 is more than 100,000"):
        _sampler(10**8, 1).event(1.0, 10)
    assert "40 batches" in _sampler().describe()


@pytest.mark.parametrize(
    "num_steps, planned, counted",
    [(1, 100, 40), (40, 100, 40), (41, 100, 80), (81, 100, 100), (100, 100, 100), (101, 100, 101), (130, 100, 130)],
)
def test_the_epsilon_in_a_log_is_never_that_of_fewer_steps(num_steps, planned, counted):
    """Whole epochs of 40 steps up to the planned number, and beyond it every step: more than planned is not hidden."""
    assert _sampler().steps_for_log(num_steps, planned) == counted


@pytest.mark.parametrize(
    "chains, excess", [((130,), 30), ((100,), 0), ((60,), -40), ((60, 70), None), ((50, 50), None)]
)
def test_steps_beyond_the_plan_are_counted_in_one_chain(chains, excess):
    """Two chains have bins of their own, so their steps do not add up to those of one."""
    assert _sampler().excess(IdentityStrategy(), chains, 100) == excess
