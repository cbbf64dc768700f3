"""Accountants: known values, independent implementations, and pairs that must be refused."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.accountants import ACCOUNTANTS, epsilon
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.sampling import PoissonSampler, TruncatedPoissonSampler
from tests.reference import gaussian_mixtures

# A real run: three epochs of SST-2 in batches of 1024.
NUM_EXAMPLES, BATCH, STEPS = 67349, 1024, 198
RATE, DELTA = BATCH / NUM_EXAMPLES, 1 / (2 * NUM_EXAMPLES)
ADJACENCIES = tuple(events.RELATIONS)


def dpsgd(noise, *, rate=RATE, steps=STEPS):
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)


@pytest.mark.parametrize(
    "noise, add_remove, replace_one",
    [(0.5, 10.3136, 11.0615), (0.6, 6.0650, 6.6496), (0.7, 3.8773, 4.3888), (1.0, 1.4348, 1.9563)],
)
def test_known_values(noise, add_remove, replace_one):
    """Values computed with dp_accounting at a fixed grid of 1e-4; `noise` is over one clip, also for replace_one."""
    assert epsilon(dpsgd(noise), DELTA, "add_or_remove_one").epsilon == pytest.approx(add_remove, rel=2e-4)
    assert epsilon(dpsgd(noise), DELTA, "zero_out").epsilon == pytest.approx(add_remove, rel=2e-4)
    assert epsilon(dpsgd(noise), DELTA, "replace_one").epsilon == pytest.approx(replace_one, rel=2e-4)


def test_parts_of_a_run_add_up_to_the_run():
    parts = ComposedDpEvent([dpsgd(0.7, steps=99), NoOpDpEvent(), dpsgd(0.7, steps=98), dpsgd(0.7, steps=1)])
    whole = epsilon(dpsgd(0.7), DELTA, "add_or_remove_one")
    assert epsilon(parts, DELTA, "add_or_remove_one") == whole
    assert epsilon(ComposedDpEvent([]), DELTA, "add_or_remove_one").epsilon == 0.0


@pytest.mark.parametrize("noise", [0.5, 0.7, 1.0])
def test_agrees_with_opacus(noise):
    """PRV is another algorithm (its own bound on the error: 0.01); RDP is the same theory in other code."""
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(noise, RATE, STEPS)]
    upper = prv.get_epsilon(delta=DELTA)
    assert upper - 0.025 <= epsilon(dpsgd(noise), DELTA, "add_or_remove_one").epsilon <= upper

    rdp = pytest.importorskip("opacus.accountants").RDPAccountant()
    rdp.history = [(noise, RATE, STEPS)]
    ours = accountants.rdp_epsilon(events.flatten(dpsgd(noise)), DELTA, "add_or_remove_one")
    assert ours == pytest.approx(rdp.get_epsilon(delta=DELTA), rel=1e-3)


@pytest.mark.parametrize("rate, noise", [(0.01, 0.5), (0.2, 0.8), (0.6, 2.0)])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_one_step_equals_the_exact_integral(rate, noise, adjacency):
    """The worst case of one Poisson step on a line, integrated numerically."""
    delta = 1e-4
    with_record = {0.0: 1 - rate, 1.0: rate}
    neighbour = {0.0: 1 - rate, -1.0: rate} if adjacency == "replace_one" else {0.0: 1.0}
    exact = gaussian_mixtures.epsilon_at(delta, with_record, neighbour, noise)
    ours = epsilon(dpsgd(noise, rate=rate, steps=1), delta, adjacency).epsilon
    assert exact * (1 - 1e-5) <= ours <= exact * 1.002


def test_rdp_is_not_used_where_it_forgets_the_factor_two():
    """dp_accounting's RDP accountant returns 2.17 for replace_one, half of the truth (4.38)."""
    wrong = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    assert wrong.compose(GaussianDpEvent(2.0)).get_epsilon(1e-5) < 2.2
    assert accountants.rdp_epsilon(events.flatten(GaussianDpEvent(2.0)), 1e-5, "replace_one") is None


def test_small_epsilon_and_many_steps_are_not_lost_to_the_grid():
    """A fixed grid of 1e-3 gives 0.0893 for the first and one of 1e-4 gives 0.0825 for the second (0.0718)."""
    users = dpsgd(1.0, rate=100 / 342477, steps=2052)
    assert epsilon(users, 1e-6, "add_or_remove_one").epsilon == pytest.approx(0.0676, abs=1e-4)
    long = dpsgd(200.0, rate=0.0152, steps=100_000)
    fine = PLDAccountant(value_discretization_interval=5e-7).compose(long).get_epsilon(1e-5)
    assert epsilon(long, 1e-5, "add_or_remove_one").epsilon == pytest.approx(fine, rel=5e-4)


@pytest.mark.parametrize("noise, rate, steps", [(0.6, 0.05, 50), (1.2, 0.01, 2000), (20.0, 0.5, 300), (0.8, 0.3, 3)])
@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_discretisation_error_is_as_promised_and_on_the_safe_side(noise, rate, steps, adjacency):
    event = dpsgd(noise, rate=rate, steps=steps)
    reported = epsilon(event, 1e-5, adjacency).epsilon
    interval = accountants.grid_interval(reported, steps, accountants.FINE) / 8
    reference = PLDAccountant(events.relation(adjacency), interval).compose(event).get_epsilon(1e-5)
    assert reference * (1 - 1e-6) <= reported <= reference * (1 + accountants.FINE)
    for relative_error in (1e-3, 1e-2, 1e-1):
        coarse = epsilon(event, 1e-5, adjacency, relative_error=relative_error).epsilon
        assert reference * (1 - 1e-6) <= coarse <= reference * (1 + 2 * relative_error)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_more_noise_fewer_steps_or_a_lower_rate_never_cost_more(adjacency):
    def eps(noise=0.8, rate=0.02, steps=100, delta=1e-5):
        return epsilon(dpsgd(noise, rate=rate, steps=steps), delta, adjacency, relative_error=1e-3).epsilon

    for values in (
        [eps(noise=noise) for noise in (0.6, 0.7, 0.8, 1.0, 1.5, 3.0)],
        [eps(steps=steps) for steps in (400, 200, 100, 99, 50, 10, 1)],
        [eps(rate=rate) for rate in (0.2, 0.05, 0.02, 0.01, 0.001)],
        [eps(delta=delta) for delta in (1e-9, 1e-7, 1e-5, 1e-3)],
    ):
        assert all(larger > smaller >= 0 for larger, smaller in zip(values, values[1:], strict=False)), values


# --- truncated batches ---


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("cap", [None, 1248])
@pytest.mark.parametrize(
    "adjacency, value", [("add_or_remove_one", 3.877), ("zero_out", 3.877), ("replace_one", 4.389)]
)
def test_a_cap_seven_deviations_up_is_free(cap, adjacency, value):
    sampler = TruncatedPoissonSampler(num_examples=NUM_EXAMPLES, expected_batch_size=BATCH, cap=cap)
    ours = epsilon(sampler.event(0.7, STEPS), DELTA, adjacency).epsilon
    poisson = PoissonSampler(num_examples=NUM_EXAMPLES, expected_batch_size=BATCH)
    assert round(ours, 3) == value
    assert ours == pytest.approx(epsilon(poisson.event(0.7, STEPS), DELTA, adjacency).epsilon, rel=1e-5)
    exact_analysis = PLDAccountant(events.relation(adjacency), 1e-3).compose(sampler.event(0.7, STEPS))
    assert ours == pytest.approx(exact_analysis.get_epsilon(DELTA), rel=1e-3)


def exact_epsilon(delta: float, adjacency: str, noise: float, num_others: int, rate: float, cap: int) -> float:
    """All batches enumerated. The record pulls one way, and the others, which it displaces, the other."""
    others = [-1.0] * num_others
    neighbours = {"add_or_remove_one": others, "zero_out": [*others, 0.0], "replace_one": [*others, -1.0]}
    sums = [gaussian_mixtures.poisson_sum(values, rate, cap) for values in ([*others, 1.0], neighbours[adjacency])]
    return gaussian_mixtures.epsilon_at(delta, *sums, noise)


@pytest.mark.slow_but(8)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("noise", [0.5, 1.5])
@pytest.mark.parametrize("num_others, rate, cap", [(4, 0.5, 2), (4, 0.5, 3), (3, 0.9, 3), (1, 0.95, 1)])
def test_truncation_is_charged(adjacency, noise, num_others, rate, cap):
    delta = 0.01
    exact = exact_epsilon(delta, adjacency, noise, num_others, rate, cap)
    ours = epsilon(TruncatedSubsampledGaussianDpEvent(num_others + 1, rate, cap, noise), delta, adjacency).epsilon
    assert ours >= exact
    if num_others == 1 and adjacency == "add_or_remove_one":  # here forgetting the truncation would be wrong
        assert epsilon(dpsgd(noise, rate=rate, steps=1), delta, adjacency).epsilon < exact


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("noise", [0.3, 0.5, 1.5])
def test_the_short_cut_for_truncation_is_a_bound(adjacency, noise):
    """Poisson at delta minus the cost, against all batches of eight records."""
    rate, cap, delta = 0.25, 5, 0.02
    composition = events.flatten(TruncatedSubsampledGaussianDpEvent(8, rate, cap, noise))
    poisson, cost = events.split_truncation(composition)
    assert 1e-3 < cost < delta
    assert accountants.pld_epsilon(poisson, delta - cost, adjacency) >= exact_epsilon(
        delta, adjacency, noise, 7, rate, cap
    )


def test_the_cost_of_truncation_is_the_probability_of_being_kept_in_a_cut_batch():
    """Counted over all batches of six records: the sum of cut batches that hold the first record."""
    rate, cap, size = 0.4, 2, 6
    counted = 0.0
    for bits in range(2**size):
        sampled = [i for i in range(size) if bits >> i & 1]
        if 0 in sampled and len(sampled) > cap:
            counted += rate ** len(sampled) * (1 - rate) ** (size - len(sampled)) * cap / len(sampled)
    event = SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(size, rate, cap, 1.0), 7)
    _, cost = events.split_truncation(events.flatten(event))
    assert cost == pytest.approx(7 * counted)


# --- nothing without a proof ---


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.NonPrivateDpEvent(),
        GaussianDpEvent(0.0),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(0.0)),
        TruncatedSubsampledGaussianDpEvent(100, 0.1, 30, 0.0),
        ComposedDpEvent([dpsgd(1.0), dp_accounting.NonPrivateDpEvent()]),
    ],
)
def test_no_noise_is_no_privacy(event, adjacency):
    assert epsilon(event, 1e-5, adjacency).epsilon == math.inf


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_no_steps_cost_nothing(adjacency):
    assert epsilon(NoOpDpEvent(), 1e-5, adjacency).epsilon == 0.0
    assert epsilon(SelfComposedDpEvent(GaussianDpEvent(1.0), 0), 1e-5, adjacency).epsilon == 0.0


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.UnsupportedDpEvent(),
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(1.0)),
        PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0)),
        dp_accounting.SingleEpochTreeAggregationDpEvent(1.0, [8]),
    ],
)
def test_refuses_events_it_does_not_know(event, adjacency):
    with pytest.raises(DPConfigError, match="Use the events that the samplers"):
        epsilon(ComposedDpEvent([dpsgd(1.0), event]), 1e-5, adjacency)


def test_refuses_what_no_accountant_can_prove():
    with pytest.raises(DPConfigError, match="Use delta >= 1e-10"):
        epsilon(dpsgd(1.0), 1e-12, "replace_one")
    assert epsilon(dpsgd(1.0), 1e-12, "add_or_remove_one").accountant == "rdp"
    with pytest.raises(DPConfigError, match="Use at most 1 / number of records"):
        epsilon(dpsgd(1.0), 1.0, "zero_out")
    with pytest.raises(DPConfigError, match="'zero_out'"):
        epsilon(dpsgd(1.0), 1e-5, "replace_special")


@pytest.mark.parametrize("noise", [1e-4, 0.01, 0.05, 1e3])
def test_extreme_noise_neither_hangs_nor_lies(noise):
    """Far outside the useful range the answer may be infinite, and it never falls with more steps."""
    one = epsilon(dpsgd(noise, rate=0.3, steps=1), 1e-5, "replace_one").epsilon
    many = epsilon(dpsgd(noise, rate=0.3, steps=50), 1e-5, "replace_one").epsilon
    assert 0 <= one <= many
    assert (one < 0.01) == (noise == 1e3)


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_contract_of_every_accountant(name, adjacency):
    """None, or an upper bound on the exact value: a plain Gaussian and a Poisson step on a line."""
    for rate in (1.0, 0.3):
        noise, delta = 1.3, 1e-5
        p = {0.0: 1 - rate, 1.0: rate}
        q = {0.0: 1 - rate, -1.0: rate} if adjacency == "replace_one" else {0.0: 1.0}
        exact = gaussian_mixtures.epsilon_at(delta, p, q, noise)
        event = GaussianDpEvent(noise) if rate == 1 else PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
        value = ACCOUNTANTS[name](events.flatten(event), delta, adjacency, accountants.FINE)
        assert value is None or value >= exact * (1 - 1e-6)


@pytest.mark.parametrize(
    "rate, noise, steps, delta",
    [
        (0.0256, 0.82, 100, 1e-5),  # between two integers
        (0.39040147433589095, 24.333200560769793, 7455, 0.0031),  # fractional orders above both neighbours
        (0.00024134145851554672, 3.915989146472569, 2344, 0.00277),  # an epsilon of 0, by an order near 1
        (1e-4, 40.0, 10, 1e-9),  # beyond the last integer
        (1.0, 30.0, 3, 1e-12),
        (0.01, 0.35, 20000, 1e-6),  # below order 2
    ],
)
def test_the_least_over_all_orders_is_found_among_few(rate, noise, steps, delta):
    leaf = GaussianDpEvent(noise) if rate == 1 else PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    every = RdpAccountant()
    with accountants.quiet_absl():
        every.compose(leaf, steps)
        least = every.get_epsilon(delta)
    assert accountants.rdp_epsilon(((leaf, steps),), delta, "add_or_remove_one") == least
