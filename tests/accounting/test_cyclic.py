"""Noise of cyclic Poisson sampling and the best number of bands, beside tabulated values."""

from __future__ import annotations

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import Participation, optimize_banded
from hf_dpopt.noise.gaussian import IdentityStrategy
from hf_dpopt.plan.choose import choose_num_bands
from hf_dpopt.plan.release import Release
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler

# 2000 steps with 500 of 50000 records, delta 1e-5: epsilon, bands, noise multiplier and error of prefix sums
NUM_STEPS, DELTA = 2000, 1e-5
SAMPLER = CyclicPoissonSampler(num_examples=50_000, expected_batch_size=500)
BEST = {4.0: (16, 2.1532, 18.38), 8.0: (32, 1.7355, 11.25)}


def _sampler(num_examples: int, batch: int) -> CyclicPoissonSampler:
    return CyclicPoissonSampler(num_examples=num_examples, expected_batch_size=batch)


def noise_of(num_bands: int, epsilon: float) -> float:
    """Noise that columns of norm 1 need, of as many bands as groups."""
    sampler = SAMPLER.with_groups(num_bands)
    release = Release(sampler=sampler, strategy=IdentityStrategy(), steps=NUM_STEPS, adjacency="add_or_remove_one")
    return release.calibrate(epsilon, DELTA)[0]


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", BEST)
def test_the_best_number_of_bands(epsilon):
    num_bands, noise_multiplier, error = BEST[epsilon]
    assert choose_num_bands(SAMPLER, NUM_STEPS, epsilon, DELTA) == num_bands
    got = noise_of(num_bands, epsilon)
    assert noise_multiplier <= got <= noise_multiplier * 1.003  # a calibration ends 0.2 % above at most
    strategy = optimize_banded(NUM_STEPS, num_bands)
    assert got * strategy.mean_loss(NUM_STEPS, Participation()) == pytest.approx(error, rel=0.01)


def test_one_group_is_plain_poisson_sampling():
    got = noise_of(1, 4.0)
    assert 0.8226 <= got <= 0.8226 * 1.003
    assert got * optimize_banded(NUM_STEPS, 1).mean_loss(NUM_STEPS, Participation()) == pytest.approx(26.02, rel=0.003)


def test_a_batch_larger_than_half_of_the_data_leaves_one_band():
    assert choose_num_bands(_sampler(100, 60), 20, 4.0, DELTA) == 1


def test_no_more_bands_than_steps():
    assert (
        1 <= choose_num_bands(_sampler(40, 10), 3, 8.0, DELTA) <= 3
    )  # four groups of one batch each would be possible


def test_an_adjacency_without_a_proof():
    with pytest.raises(DPConfigError, match="replace_one"):
        choose_num_bands(_sampler(100, 10), 20, 4.0, DELTA, adjacency="replace_one")
