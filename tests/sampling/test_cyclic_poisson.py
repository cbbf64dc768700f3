"""Cyclic Poisson sampling: groups, coins, and what a run costs."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import Participation
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler
from hf_dpopt.sampling.poisson import PoissonSampler

KEY = bytes(range(32))


def _sampler(num_groups, n=2000, expected=50):
    return CyclicPoissonSampler(num_examples=n, expected_batch_size=expected, num_groups=num_groups)


def test_a_record_waits_for_its_group():
    sampler, last = _sampler(8), np.full(2000, -8)
    for step in range(64):
        drawn = sampler.draw(KEY, step)
        assert (step - last[drawn]).min(initial=8) >= 8 and (np.diff(drawn) > 0).all()
        again = drawn[last[drawn] >= 0]
        assert ((step - last[again]) % 8 == 0).all()
        last[drawn] = step
    assert sampler.participation(64) == Participation(8, 8)


def test_groups_of_a_key_do_not_change():
    """A resumed run goes on with the groups that its first part had, or a record would come back too soon."""
    everyone = CyclicPoissonSampler(num_examples=16, expected_batch_size=4, num_groups=4)
    batches = [everyone.draw(KEY, step).tolist() for step in range(4)]
    assert batches == [[2, 7, 8, 10, 13], [5, 6, 9, 14, 15], [0, 12], [1, 3, 4, 11]]


def test_batches_follow_the_law_of_the_event():
    """Sizes and inclusions over 20 keys, within 5 standard errors (false alarm below 1e-6 each)."""
    sampler, steps = _sampler(8), 40
    sizes, inclusions = [], np.zeros(2000)
    for seed in range(20):
        for step in range(steps):
            drawn = sampler.draw(bytes([seed]) * 32, step)
            sizes.append(len(drawn))
            inclusions[drawn] += 1
    total, mean = len(sizes) * 2000, 50 / 2000
    assert abs(sum(sizes) - total * mean) < 5 * np.sqrt(total * mean)
    assert abs(np.var(sizes) / (50 * (1 - mean)) - 1) < 5 * np.sqrt(2 / len(sizes))
    assert abs(inclusions.var() / (20 * steps / 8 * sampler.group_rate * (1 - sampler.group_rate)) - 1) < 0.25


def test_one_group_costs_what_poisson_sampling_costs():
    one, plain = _sampler(1), PoissonSampler(num_examples=2000, expected_batch_size=50)
    assert one.event(1.1, 300) == plain.event(1.1, 300)
    assert _sampler(8).max_participations([20, 9]) == 3 + 2  # two chains


def test_bad_input():
    with pytest.raises(DPConfigError, match="num_groups=0"):
        _sampler(0)
    with pytest.raises(DPConfigError, match="num_groups <= 40"):
        _sampler(41)
    with pytest.raises(DPConfigError, match="zero_out"):
        _sampler(4).check_adjacency("replace_one")
