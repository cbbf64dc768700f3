"""Noise of cyclic Poisson sampling and the best number of bands, beside tabulated values."""

from __future__ import annotations

import os

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import Participation, optimize_banded
from hf_dpopt.plan.cyclic import choose_num_bands, cyclic_noise_multiplier

# 2000 steps with 500 of 50000 records, delta 1e-5: epsilon, bands, noise multiplier and error of prefix sums
RUN, DELTA = (2000, 50_000, 500), 1e-5
BEST = {4.0: (16, 2.1532, 18.38), 8.0: (32, 1.7355, 11.25)}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("HF_DPOPT_CACHE_DIR", os.devnull)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", BEST)
def test_the_best_number_of_bands(epsilon):
    num_bands, noise_multiplier, error = BEST[epsilon]
    assert choose_num_bands(*RUN, epsilon, DELTA) == num_bands
    got = cyclic_noise_multiplier(*RUN, num_bands, epsilon, DELTA)
    assert noise_multiplier <= got <= noise_multiplier * 1.003  # a calibration ends 0.2 % above at most
    strategy = optimize_banded(RUN[0], num_bands)
    assert got * strategy.mean_loss(RUN[0], Participation()) == pytest.approx(error, rel=0.01)


def test_one_group_is_plain_poisson_sampling():
    got = cyclic_noise_multiplier(*RUN, 1, 4.0, DELTA)
    assert 0.8226 <= got <= 0.8226 * 1.003
    assert got * optimize_banded(RUN[0], 1).mean_loss(RUN[0], Participation()) == pytest.approx(26.02, rel=0.003)


def test_a_batch_larger_than_half_of_the_data_leaves_one_band():
    assert choose_num_bands(20, 100, 60, 4.0, DELTA) == 1


def test_no_more_bands_than_steps():
    assert 1 <= choose_num_bands(3, 40, 10, 8.0, DELTA) <= 3  # four groups of one batch each would be possible


def test_an_adjacency_without_a_proof():
    with pytest.raises(DPConfigError, match="replace_one"):
        choose_num_bands(20, 100, 10, 4.0, DELTA, adjacency="replace_one")
