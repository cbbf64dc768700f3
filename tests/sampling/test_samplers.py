"""Contract of every sampler: pure draws of the claimed law, and an event for each adjacency it supports.

Keys are fresh in every run. ALPHA is the false-alarm probability of each random test, whatever the key.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from hf_dpopt.accounting import events
from hf_dpopt.accounting.accountants import epsilon
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS, NuDPFTRL
from hf_dpopt.sampling import SAMPLERS, FixedOrderSampler, PoissonSampler, TruncatedPoissonSampler, balls_in_bins
from hf_dpopt.sampling.balls_in_bins import BallsInBinsSampler

ALPHA = 1e-6


@pytest.fixture
def key():
    return os.urandom(32)


@pytest.fixture(params=SAMPLERS)
def make(request):
    return lambda num_examples, expected_batch_size: SAMPLERS[request.param](
        num_examples=num_examples, expected_batch_size=expected_batch_size
    )


def binomial_interval(num_trials, probability, alpha=ALPHA):
    low, high = stats.binom.ppf([alpha / 2, 1 - alpha / 2], num_trials, probability)
    return low, high


def counts(sampler, key, num_steps):
    """How often each record was drawn, and the batch sizes."""
    batches = [sampler.draw(key, step) for step in range(num_steps)]
    return np.bincount(np.concatenate(batches), minlength=sampler.num_examples), np.array([len(b) for b in batches])


# --- every sampler ---


def test_keys_and_steps_matter(make, key):
    """Two batches of 40 of 200 agree by chance with probability < 1e-40."""
    sampler = make(200, 40)
    assert not np.array_equal(sampler.draw(key, 0), sampler.draw(os.urandom(32), 0))
    assert not np.array_equal(sampler.draw(key, 0), sampler.draw(key, 1))


def test_every_record_is_equally_likely(make):
    """Over fresh keys, one batch each: each record's count is Binomial(2000, 0.2). Union bound over the records."""
    sampler, num_keys = make(50, 10), 2000
    drawn = np.zeros(50)
    for _ in range(num_keys):
        drawn[sampler.draw(os.urandom(32), 1)] += 1
    low, high = binomial_interval(num_keys, 0.2, ALPHA / 50)
    assert low <= drawn.min() and drawn.max() <= high


def test_full_batch(make, key):
    sampler = make(30, 30)
    assert sampler.steps_per_epoch == 1 and sampler.sample_rate == 1
    for step in range(3):
        np.testing.assert_array_equal(sampler.draw(key, step), np.arange(30))
    ten_gaussians = epsilon(events.GaussianDpEvent(2.0 / math.sqrt(10)), 1e-5, "zero_out")
    assert epsilon(sampler.event(2.0, 10), 1e-5, "zero_out").epsilon == pytest.approx(ten_gaussians.epsilon)


@pytest.mark.parametrize("num_examples, batch", [(10, 11), (10, 0), (10, -1), (0, 1)])
def test_refuses_batches_that_do_not_fit_the_dataset(make, num_examples, batch):
    with pytest.raises(DPConfigError, match="Use a (smaller batch|dataset with >= 1 record)"):
        make(num_examples, batch)


@pytest.mark.parametrize("num_examples, batch, steps", [(67349, 1024, 66), (100, 10, 10), (101, 10, 11), (5, 1, 5)])
def test_steps_per_epoch_rounds_up(make, num_examples, batch, steps):
    assert make(num_examples, batch).steps_per_epoch == steps


def test_the_default_is_registered():
    assert SAMPLERS[MECHANISMS["gaussian"].sampler] is TruncatedPoissonSampler
    assert all(name == cls.name for name, cls in SAMPLERS.items())


# --- Poisson ---


@pytest.mark.parametrize("cls", [PoissonSampler, TruncatedPoissonSampler])
def test_records_are_independent_coins(cls, key):
    """400 records, q = 0.25, 2000 steps: counts per record and the total are binomial; sizes have variance nq(1-q).

    The sum of squared deviations of the sizes is close to chi-square with 2000 degrees of freedom (excess kurtosis of
    a size: -0.002), so ALPHA is accurate to a few percent there. Power: a variance wrong by 35% or more, as for
    batches of fixed size or pairs of records that stick together, is caught with probability > 0.9999.
    """
    sampler = cls(num_examples=400, expected_batch_size=100)
    drawn, sizes = counts(sampler, key, 2000)
    low, high = binomial_interval(2000, 0.25, ALPHA / 400)
    assert low <= drawn.min() and drawn.max() <= high
    low, high = binomial_interval(2000 * 400, 0.25)
    assert low <= sizes.sum() <= high
    low, high = stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=2000)
    assert low <= np.square(sizes - 100).sum() / (400 * 0.25 * 0.75) <= high


@pytest.mark.parametrize("cls", [PoissonSampler, TruncatedPoissonSampler])
def test_empty_batches_happen_as_often_as_they_should(cls, key):
    """Expected size 1 of 50: a batch is empty with probability 0.98^50 = 0.36."""
    _, sizes = counts(cls(num_examples=50, expected_batch_size=1), key, 1000)
    low, high = binomial_interval(1000, 0.98**50)
    assert low <= (sizes == 0).sum() <= high


@pytest.mark.parametrize("num_examples, batch", [(67349, 1024), (3, 1), (7, 6), (10**9, 1), (2**52, 2**52 - 1)])
def test_the_coin_never_lands_more_often_than_the_accountant_was_told(num_examples, batch):
    """The realised probability is a multiple of 2^-64 at most q, and within 2^-52 of it."""
    sampler = PoissonSampler(num_examples=num_examples, expected_batch_size=batch)
    told = Fraction(sampler.event(1.0, 1).event.sampling_probability)
    realised = Fraction(int(sampler._threshold), 2**64)
    assert realised <= told <= Fraction(batch, num_examples) * (1 + Fraction(1, 2**52))
    assert told - realised < Fraction(1, 2**52)


def test_the_threshold_itself_is_outside(monkeypatch, key):
    """Words below the threshold are in, the threshold and the largest word are out."""
    sampler = PoissonSampler(num_examples=4, expected_batch_size=1)
    words = np.array([2**62 - 1, 2**62, 0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr("hf_dpopt.sampling.poisson.word_blocks", lambda key, step, num: [(0, words)])
    np.testing.assert_array_equal(sampler.draw(key, 0), [0, 2])


# --- truncated Poisson ---


def test_the_default_cap():
    """Mean 1024, standard deviation 31.76: seven of them, and 8 for the skewness."""
    sampler = TruncatedPoissonSampler(num_examples=67349, expected_batch_size=1024)
    assert sampler.max_batch_size == 1255
    assert sampler.parameters()["cap"] == 1255 and "1255" in sampler.describe()
    for num_examples, batch in [(67349, 1024), (10**6, 1), (10**5, 16), (5000, 2500)]:
        cap = TruncatedPoissonSampler(num_examples=num_examples, expected_batch_size=batch).max_batch_size
        assert stats.binom.sf(cap, num_examples, batch / num_examples) < 1.5e-12
    assert TruncatedPoissonSampler(num_examples=20, expected_batch_size=10).max_batch_size == 20


def test_truncated_batches_are_uniformly_random_subsets(key):
    """A cap at the mean cuts half of the batches. Each record then counts Binomial(3000, E[min(K, 20)] / 40)."""
    sampler = TruncatedPoissonSampler(num_examples=40, expected_batch_size=20, cap=20)
    drawn, sizes = counts(sampler, key, 3000)
    law = stats.binom(40, 0.5)
    assert sizes.max() == 20
    low, high = binomial_interval(3000, law.sf(19))
    assert low <= (sizes == 20).sum() <= high
    kept = sum(min(k, 20) * law.pmf(k) for k in range(41)) / 40
    low, high = binomial_interval(3000, kept, ALPHA / 40)
    assert low <= drawn.min() and drawn.max() <= high


def test_truncation_keeps_records_of_the_poisson_batch_and_cuts_only_what_is_too_large(key):
    poisson = PoissonSampler(num_examples=60, expected_batch_size=20)
    truncated = TruncatedPoissonSampler(num_examples=60, expected_batch_size=20, cap=22)
    for step in range(50):
        whole, cut = poisson.draw(key, step), truncated.draw(key, step)
        assert set(cut) <= set(whole) and len(cut) == min(len(whole), 22)


def test_truncation_is_accounted_on_the_larger_neighbour():
    """One record more makes truncation likelier; under add_or_remove_one that dataset is a neighbour of this one."""
    sampler = TruncatedPoissonSampler(num_examples=60, expected_batch_size=20, cap=30)
    step = sampler.event(1.0, 5).event
    assert (step.dataset_size, step.sampling_probability, step.truncated_batch_size) == (61, 20 / 60, 30)


def test_refuses_a_cap_below_the_mean():
    with pytest.raises(DPConfigError, match="Use a larger cap, or None"):
        TruncatedPoissonSampler(num_examples=100, expected_batch_size=10, cap=9)


# --- fixed order ---


def test_fixed_order_covers_every_record_once_per_epoch_at_a_fixed_gap(key):
    sampler = FixedOrderSampler(num_examples=23, expected_batch_size=5)
    assert sampler.steps_per_epoch == 5
    drawn, sizes = counts(sampler, key, 15)
    assert drawn.tolist() == [3] * 23
    assert sizes.tolist() == [5, 5, 5, 5, 3] * 3
    for step in range(10):
        np.testing.assert_array_equal(sampler.draw(key, step), sampler.draw(key, step + 5))


@pytest.mark.parametrize(
    "num_steps, participations",
    [(0, 0), (1, 1), (66, 1), (67, 2), (198, 3), (199, 4), ((100, 98), 4), ((5,) * 20, 20)],
)
def test_fixed_order_counts_participations(num_steps, participations):
    """Chains add up: each has an order of its own, so 20 chains of 5 steps may show one record 20 times."""
    sampler = FixedOrderSampler(num_examples=67349, expected_batch_size=1024)
    assert sampler.max_participations(num_steps) == participations
    event = sampler.event(3.0, num_steps)
    if participations:
        assert event.noise_multiplier == pytest.approx(3.0 / math.sqrt(participations))
    else:
        assert isinstance(event, events.NoOpDpEvent)


def test_a_verification_that_takes_time_is_announced(monkeypatch):
    """Too few samples for a proof, which says so by None; the line comes first."""
    said: list[str] = []
    monkeypatch.setattr(balls_in_bins.logger, "info", said.append)
    assert (
        BallsInBinsSampler(num_examples=2000, expected_batch_size=50).certify(
            NuDPFTRL(0.1), 2.0, 40, 1e-9, num_samples=10
        )
        is None
    )
    assert "verifying epsilon by 10 samples" in said[0]
