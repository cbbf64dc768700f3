"""Epsilon of correlated noise, whole runs and parts of them; and the pairs of noise and sampler that have a proof."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant

from hf_dpopt.accounting import accountants
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    IdentityStrategy,
    NuDPFTRL,
    Participation,
    Restarted,
)
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.sampling import (
    BallsInBinsSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
)

DELTA = 1e-5


def epsilon(strategy, sampler, stddev, num_steps, *, planned=None, adjacency="zero_out", delta=DELTA):
    planned = planned or num_steps
    event = sampler.release(strategy, stddev, num_steps, planned_steps=planned)
    return accountants.epsilon(event, delta, adjacency).epsilon


def order(steps_per_epoch):
    return FixedOrderSampler(num_examples=steps_per_epoch, expected_batch_size=1)


# epsilon after so many steps of a run calibrated to 8 at delta 1e-6, 2052 steps, 6 epochs of 342
PREFIXES = [100, 342, 343, 1026, 2052, 2400, 4104]
RUNS = {
    "nu": ({"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.001614, "num_buffers": None}}, 2.9305,
           [2.4176, 2.5317, 3.0385, 5.1052, 8.0, 9.2244, 12.4894]),
    "optimal-cc": ({"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.0, "num_buffers": None}}, 3.9825,
                   [1.7632, 1.9074, 2.2604, 4.3195, 8.0, 9.5650, 16.3349]),
    "blt": ({"noise_mechanism": "blt"}, 3.0892, [2.4835, 2.6853, 3.1263, 5.2638, 8.0, 9.1263, 12.2201]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stops_early_or_goes_on(name):
    noise, stddev, wanted = RUNS[name]
    config = PrivacyConfig(target_epsilon=8.0, target_delta=1e-6, expected_batch_size=1, **noise)
    plan = make_plan(config, num_examples=342, num_steps=2052)
    assert plan.draw_stddev == pytest.approx(stddev, rel=5e-4)
    got = [plan.epsilon(steps) for steps in PREFIXES]
    assert got == pytest.approx(wanted, rel=2e-3 if name == "blt" else 5e-4)
    assert got == sorted(got)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("target", [1e-4, 0.5, 8.0])
def test_calibration_spends_the_budget_and_no_more(adjacency, target):
    config = PrivacyConfig(
        target_epsilon=target, target_delta=DELTA, expected_batch_size=1, noise_mechanism="honaker",
        adjacency=adjacency,
    )  # fmt: skip
    plan = make_plan(config, num_examples=20, num_steps=60)
    assert target * (1 - 1e-6) <= plan.epsilon() <= target
    sensitivity = TreeAggregation().sensitivity(60, Participation(3, 20, "fixed_epoch"))
    assert plan.draw_stddev == pytest.approx(plan.noise_multiplier * sensitivity)
    by_hand = get_epsilon_gaussian(plan.draw_stddev / sensitivity, DELTA)  # noise is in units of what one record moves
    assert plan.epsilon() == pytest.approx(by_hand, rel=1e-8, abs=1e-10)


def test_a_strategy_made_for_a_run_ends_with_it():
    strategy = DenseStrategy(np.eye(8))
    whole = epsilon(strategy, order(4), 1.0, 8)
    assert epsilon(strategy, order(4), 1.0, 3, planned=8) == whole
    with pytest.raises(DPBudgetExceeded, match="made for 8 steps.*without a horizon"):
        epsilon(strategy, order(4), 1.0, 9, planned=8)
    assert epsilon(strategy, order(4), 1.0, 0, planned=8) == 0.0


def test_a_part_of_a_run_is_never_charged_less_than_its_part_of_the_matrix():
    """Copies are cut where the run ends."""
    strategy = Restarted(NuDPFTRL(0.0), 3)
    matrix = strategy.strategy_matrix(32)
    for t in (1, 2, 8, 17, 31):
        part = DenseStrategy(matrix[:t, :t]) if t < 32 else strategy
        needed = get_epsilon_gaussian(2.0 / part.sensitivity(t, Participation(1, t)), DELTA)
        assert epsilon(strategy, order(32), 2.0, t, planned=32) >= needed * (1 - 1e-9)


def test_chains_have_noise_of_their_own_and_add_up():
    """Squared sensitivities over the draws' variance; an order of its own lets each chain show a record at once."""
    strategy = NuDPFTRL(0.1)
    rho = sum((strategy.sensitivity(n, Participation(k, 4, "fixed_epoch")) / 3.0) ** 2 for n, k in ((8, 2), (5, 2)))
    assert epsilon(strategy, order(4), 3.0, (8, 5)) == pytest.approx(get_epsilon_gaussian(rho**-0.5, DELTA), rel=1e-6)


def test_bands_under_cyclic_groups_are_poisson_sampled_gaussians():
    """Design tables: noise for p columns of norm 1, T = 2000, N = 50,000, B = 500, delta 1e-5; through dp_accounting."""
    for target, bands, stddev in ((4.0, 1, 0.8226), (4.0, 16, 2.1532), (8.0, 32, 1.7355)):
        sampler = CyclicPoissonSampler(num_examples=50_000, expected_batch_size=500, num_groups=bands)
        strategy = BandedToeplitz(tuple(np.linspace(1, 0.2, bands)))
        norm = float(np.linalg.norm(strategy.coefs))
        got = epsilon(strategy, sampler, stddev * norm, 2000, adjacency="add_or_remove_one")
        assert got == pytest.approx(target, rel=1e-3)
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        event = PoissonSampledDpEvent(bands * 0.01, GaussianDpEvent(stddev))
        accountant.compose(event, math.ceil(2000 / bands))
        assert got <= accountant.get_epsilon(DELTA) * (1 + 1e-3)


FIXED, POISSON = order(8), PoissonSampler(num_examples=80, expected_batch_size=10)
TRUNCATED = TruncatedPoissonSampler(num_examples=80, expected_batch_size=10)
CYCLIC = CyclicPoissonSampler(num_examples=80, expected_batch_size=10, num_groups=4)
BINS = BallsInBinsSampler(num_examples=80, expected_batch_size=10)
STRATEGIES = {
    "identity": IdentityStrategy(), "nu": NuDPFTRL(0.1), "damped": BandedInverse((1.0, -0.9)), "tree": TreeAggregation(),
    "blt": BufferedLinearToeplitz((0.9,), (0.5,)),
    "4 bands": BandedToeplitz((1.0, 0.5, 0.3, 0.1)), "5 bands": BandedToeplitz((1.0, 0.5, 0.3, 0.1, 0.1)),
    "signs": BandedToeplitz((1.0, -0.5)),
    "inverse bands": BandedInverse((1.0, -0.5)), "dense": DenseStrategy(np.eye(16) + np.tril(np.ones((16, 16)), -1) / 4),
    "restarted bands": Restarted(BandedToeplitz((1.0, 0.5)), 5),
}  # fmt: skip
ALLOWED = {
    "fixed": (FIXED, set(STRATEGIES)),
    "poisson": (POISSON, {"identity"}),
    "truncated": (TRUNCATED, {"identity"}),
    "cyclic": (CYCLIC, {"identity", "4 bands", "signs", "restarted bands"}),
    "bins": (BINS, set(STRATEGIES) - {"tree", "signs"}),
}


@pytest.mark.parametrize("sampler", ALLOWED)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_pair_has_a_proof_or_raises_with_the_reason(sampler, name):
    law, allowed = ALLOWED[sampler]
    if name in allowed:
        assert 0 < epsilon(STRATEGIES[name], law, 3.0, 16) < 100
    else:
        with pytest.raises(DPConfigError, match="no privacy proof|dominating pair|square"):
            epsilon(STRATEGIES[name], law, 3.0, 16)


def test_plain_poisson_sampling_and_correlated_noise_is_refused_in_words():
    with pytest.raises(DPConfigError, match="may take part in any step.*Use sampling='fixed_order'"):
        POISSON.check_strategy(NuDPFTRL(0.1))
    with pytest.raises(DPConfigError, match="5 bands tie steps together that are 4 apart.*Use num_bands <= 4"):
        CYCLIC.check_strategy(STRATEGIES["5 bands"])
