"""Privacy profiles: against closed forms, brute force, other accountants and simulations; always on the safe side."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism, from_mixture_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy import stats
from scipy.special import ndtr, ndtri

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.profile import Profile, gaussian_fit, meaning, pair_alone, privacy_profile, round_up
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.privacy_profile import _replaced, _swapped, meaning_of_plan, profile_of_plan

RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9])
ADD = "add_or_remove_one"


def sampled(rate: float, noise: float, steps: int) -> SelfComposedDpEvent:
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_gaussian_mechanism(mu: float) -> None:
    """The exact curve is Phi(Phi^-1(a) + mu), that of groups the same with k mu."""
    event = SelfComposedDpEvent(GaussianDpEvent(2 / mu), 4)
    profile = privacy_profile(event, 1e-5, ADD)
    for size, group in enumerate(profile.groups(3), start=1):
        exact = ndtr(ndtri(RATES) + size * mu)
        found = group.true_positives(RATES)
        assert (found >= exact).all() and np.allclose(found, exact, rtol=3e-3)
        epsilon = accountants.epsilon(GaussianDpEvent(1 / (size * mu)), 1e-5, ADD).epsilon
        assert epsilon * (1 - 1e-6) <= group.epsilon(1e-5) <= epsilon * (1 + 1e-3)
    swapped = privacy_profile(event, 1e-5, "replace_one")
    assert np.allclose(swapped.true_positives(RATES), ndtr(ndtri(RATES) + 2 * mu), rtol=3e-3)
    fit = gaussian_fit(profile, 1e-5)
    assert fit["fits"] and mu <= fit["mu"] < mu + 0.02 and 0 <= fit["largest_gap"] < 0.005


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.5, 0.7), (0.01, 0.5)])
def test_one_sampled_step(rate: float, noise: float) -> None:
    """Exact: the likelihood ratio is monotone, so every best test is a threshold on the output."""
    profile = privacy_profile(sampled(rate, noise, 1), 1e-5, ADD)
    out = noise * ndtri(1 - RATES)  # thresholds against N(0, s^2)
    with_record = (1 - rate) * RATES + rate * stats.norm.sf((out - 1) / noise)
    below = np.array([_quantile(rate, noise, a) for a in RATES])  # the other order: reject where the output is small
    without_record = stats.norm.cdf(below / noise)
    exact = np.maximum(with_record, without_record)
    found = profile.true_positives(RATES)
    assert (found >= exact * (1 - 1e-9)).all() and np.allclose(found, exact, rtol=0.02), (found, exact)


def _quantile(rate: float, noise: float, level: float) -> float:
    low, high = -50.0, 50.0
    while high - low > 1e-12:
        x = (low + high) / 2
        mass = (1 - rate) * stats.norm.cdf(x / noise) + rate * stats.norm.cdf((x - 1) / noise)
        low, high = (x, high) if mass < level else (low, x)
    return low


# --- brute force -----------------------------------------------------------------------------------------------------


def _hockey_stick(p: np.ndarray, q: np.ndarray, t: float) -> float:
    return float(np.maximum(0, p - math.exp(t) * q).sum())


@pytest.mark.parametrize("seed", range(8))
def test_changes_one_after_the_other(seed: int) -> None:
    """Chains P, Q, R of discrete laws: delta of (P, R), and every test between them, against the composed profile."""
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.full(7, 0.7), size=3)
    t = 0.05 * np.arange(401)
    parts = [
        Profile(0.05, np.array([max(_hockey_stick(a, b, x), _hockey_stick(b, a, x)) for x in t]), ("exact",))
        for a, b in zip(laws[:-1], laws[1:], strict=True)
    ]
    both = parts[0].then(parts[1])
    for epsilon in (0.0, 0.31, 1.0, 2.77, 5.0):
        exact = max(_hockey_stick(laws[0], laws[2], epsilon), _hockey_stick(laws[2], laws[0], epsilon))
        assert both.delta(epsilon) >= exact - 1e-12
    for mask in range(1, 127):
        chosen = np.array([mask >> i & 1 for i in range(7)], dtype=bool)
        for first, second in ((0, 2), (2, 0)):
            false, true = laws[first][chosen].sum(), laws[second][chosen].sum()
            assert true <= both.true_positives(false) + 1e-12


def test_randomised_response_reaches_the_bound() -> None:
    """Pure epsilon: the curve of groups is the curve, applied again; composed deltas are no larger than that needs."""
    epsilon = 1.0
    t = 0.01 * np.arange(501)
    profile = Profile(0.01, np.maximum(0, 1 - np.exp(t - epsilon)) * math.e / (1 + math.e), ("exact",))
    once = np.array([pair_alone(epsilon, 0.0, a) for a in RATES])
    twice = np.array([pair_alone(epsilon, 0.0, a) for a in once])
    assert np.allclose(profile.true_positives(RATES), once, rtol=1e-3)
    assert np.allclose(profile.then(profile).true_positives(RATES), twice, rtol=1e-3)
    assert profile.groups(3)[2].epsilon(1e-9) == pytest.approx(3.0, abs=0.02)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_sampled_records(size: int) -> None:
    """k records are sampled one by one, so their exact pair is a mixture of Gaussians with shifts 0, .., k."""
    rate, noise, steps = 0.02, 1.0, 60
    group = privacy_profile(sampled(rate, noise, steps), 1e-5, ADD).groups(size)[-1]
    exact = from_mixture_gaussian_mechanism(
        noise, list(range(size + 1)), list(stats.binom.pmf(range(size + 1), size, rate)),
        value_discretization_interval=1e-2,
    ).self_compose(steps)  # fmt: skip
    for epsilon in (0.5, 1.0, 2.0):
        least = exact.get_delta_for_epsilon(epsilon)
        assert least * 0.98 <= group.delta(epsilon) <= 2.5 * least, (epsilon, least, group.delta(epsilon))


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
def test_delta_against_a_fine_grid(adjacency: str) -> None:
    noise, rate, steps = 0.9, 0.03, 100
    profile = privacy_profile(sampled(rate, noise, steps), 1e-5, adjacency)
    from hf_dpopt.accounting.events import RELATIONS

    fine = from_gaussian_mechanism(
        noise, value_discretization_interval=5e-4, sampling_prob=rate, neighboring_relation=RELATIONS[adjacency]
    ).self_compose(steps)
    for epsilon in (0.0, 0.3, 1.0, 2.5, 4.0):
        least = fine.get_delta_for_epsilon(epsilon)
        assert least * (1 - 2e-3) <= profile.delta(epsilon) <= 1.15 * least + 1e-12


def test_against_opacus() -> None:
    prv = pytest.importorskip("opacus.accountants.prv")
    accountant = prv.PRVAccountant()
    accountant.history = [(1.1, 0.02, 200)]
    profile = privacy_profile(sampled(0.02, 1.1, 200), 1e-5, ADD)
    for delta in (1e-4,):
        epsilon = accountant.get_epsilon(delta, eps_error=0.01)
        assert epsilon - 0.02 <= profile.epsilon(delta) <= epsilon + 0.02


def test_the_tail_is_that_of_renyi_divergences() -> None:
    """Below what a convolution can tell, deltas are those that dp_accounting gets from the orders, and still fall."""
    event = sampled(0.02, 1.0, 100)
    profile = privacy_profile(event, 1e-5, ADD)
    accountant = RdpAccountant(accountants.INTEGER_ORDERS)
    accountant.compose(event)
    epsilon = profile.step * (len(profile.deltas) - 20)
    least = compute_delta(accountant.orders, accountant.rdp, epsilon)[0]
    assert least < 1e-20 and profile.delta(epsilon) == pytest.approx(least, rel=1e-6)


def test_against_a_simulation() -> None:
    """Likelihood-ratio attacks on 8 sampled steps; 5 standard errors, so a false alarm in 1e6 at each of 3 rates."""
    rate, noise, steps, num = 0.2, 1.0, 8, 200_000
    rng = np.random.default_rng()

    def losses(is_in: bool) -> np.ndarray:
        moved = (rng.random((steps, num)) < rate) * is_in
        x = rng.normal(0, noise, (steps, num)) + moved
        return np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2))).sum(axis=0)

    outs, ins = np.sort(losses(False)), losses(True)
    profile = privacy_profile(sampled(rate, noise, steps), 1e-5, ADD)
    for false in (0.001, 0.01, 0.1):
        true = (ins > outs[int((1 - false) * num)]).mean()
        error = 5 * math.sqrt(true / num + true**2 / (false * num))
        bound = float(profile.true_positives(false))
        assert true - error <= bound and bound <= 1.03 * true + error, (false, true, bound)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_what_the_pair_and_the_profile_allow_at_epsilon_8() -> None:
    """SST-2 in batches of 1,032, three passes: the pair excludes no attack, the profile nine of ten."""
    config = PrivacyConfig(target_epsilon=8, target_delta=1e-5, expected_batch_size=1032)
    found = meaning_of_plan(make_plan(config, num_examples=67349, num_steps=198))
    by_rate = {row["false_positives"]: row for row in found["true_positives"]}
    assert [row["pair_alone"] for row in by_rate.values()] == pytest.approx([1, 1, 1], abs=1e-3)
    # a simulation of 200,000 runs in either world reaches 0.029, 0.102 and 0.346
    assert by_rate[0.001]["whole_profile"] == pytest.approx(0.0292, abs=2e-4)
    assert by_rate[0.01]["whole_profile"] == pytest.approx(0.1032, abs=5e-4)
    assert by_rate[0.1]["whole_profile"] == pytest.approx(0.349, abs=1e-3)
    assert not found["gaussian"]["fits"]


PLANS = {
    "poisson": {"sampling": "poisson"},
    "truncated": {"sampling": "truncated_poisson"},
    "cyclic": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 4}, "sampling": "cyclic_poisson"},
    "bins": {"sampling": "balls_in_bins"},
    "fixed": {"sampling": "fixed_order"},
    "correlated": {"noise_mechanism": "nu_dpftrl"},
    "swapped": {"sampling": "poisson", "adjacency": "replace_one"},
    "users": {
        "sampling": "capped_poisson", "privacy_unit": "user", "user_id_column": "author", "records_per_user": 2,
    },
}  # fmt: skip


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_run_has_a_profile(name: str) -> None:
    """Its epsilon at several deltas is that of the accountants, and it passes through the claimed pair."""
    noise, steps = (4.0, 4) if name == "users" else (1.0, 80)  # a mixture of Gaussians takes seconds
    config = PrivacyConfig(noise_multiplier=noise, target_delta=1e-5, expected_batch_size=100, **PLANS[name])
    plan = make_plan(config, num_examples=4000, num_steps=steps)
    profile = profile_of_plan(plan)
    swapped = _swapped(profile, _replaced(plan, None), plan.adjacency)
    assert profile.epsilon(plan.delta) == pytest.approx(plan.epsilon(), rel=1e-6)
    for delta in (1e-3,) if name == "users" else (1e-3, 1e-6):
        other = accountants.epsilon(plan.event, delta, plan.adjacency).epsilon
        assert other * (1 - 1e-3) <= profile.epsilon(delta) <= other * 1.02 + 1e-6
    assert (swapped.true_positives(RATES) >= profile.true_positives(RATES) - 1e-9).all()
    replaced = plan.epsilon_replace_one()
    if replaced is not None:
        assert swapped.epsilon(plan.delta) <= replaced * (1 + 1e-6)
    rates = profile.true_positives(np.linspace(0, 1, 101))
    assert (np.diff(rates) >= 0).all() and (rates >= np.linspace(0, 1, 101) - 1e-12).all()
    found = meaning_of_plan(plan)
    assert found is meaning_of_plan(plan), "computed twice"
    sizes = [group["true_positives"] for group in found["groups"]]
    assert sizes == sorted(sizes) and len(sizes) == 10


def test_more_than_the_plan() -> None:
    """A branch costs more at every rate; a part of the plan is stated as the plan."""
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5, expected_batch_size=100)
    plan = make_plan(config, num_examples=4000, num_steps=40)
    planned, branched = meaning_of_plan(plan), meaning_of_plan(plan, (40, 20))
    for before, after in zip(planned["true_positives"], branched["true_positives"], strict=True):
        assert after["whole_profile"] > before["whole_profile"]
    assert meaning_of_plan(plan, (30,)) == planned == meaning_of_plan(plan, (40,))
    again = ComposedDpEvent([plan.event, plan.event_after(20)])
    assert branched["deltas"][0][1] == pytest.approx(privacy_profile(again, 1e-5, ADD).delta(0.0), rel=0.01)


def test_nothing_is_promised_without_noise() -> None:
    config = PrivacyConfig(noise_multiplier=0.0, target_delta=1e-5, expected_batch_size=100)
    assert meaning_of_plan(make_plan(config, num_examples=4000, num_steps=4)) == {}
    assert privacy_profile(GaussianDpEvent(0.0), 1e-5, ADD).true_positives(1e-9) == 1


def test_a_pair() -> None:
    """A pair that is proven besides lowers what lies above it."""
    event = GaussianDpEvent(1.0)
    plain = privacy_profile(event, 1e-5, ADD)
    lower = privacy_profile(event, 1e-5, ADD, proven=((1.0, 1e-6),))
    assert lower.delta(1.0) == pytest.approx(1e-6) and lower.delta(0.5) < plain.delta(0.5)
    # the chord from delta = 1 at e^epsilon = 0, which any mechanism lies below
    assert lower.delta(0.0) == pytest.approx(min(plain.delta(0.0), 1 - (1 - 1e-6) * math.exp(-1.0)))


def test_numbers_are_rounded_up() -> None:
    assert round_up(0.12341) == 0.1235 and round_up(1.0) == 1.0 and round_up(math.inf) == math.inf
    profile = privacy_profile(GaussianDpEvent(0.9), 1e-5, ADD)
    found = meaning(profile, profile.then(profile), epsilon=5.0, delta=1e-5)
    for row in found["true_positives"]:
        assert row["whole_profile"] >= float(profile.true_positives(row["false_positives"]))


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_the_best_of_several_runs(sampling: str) -> None:
    """A tuned run is stated for the whole tuning: above a single run, through the claimed pair, below the pair alone."""
    config = PrivacyConfig(noise_multiplier=1.1, target_delta=1e-5, expected_batch_size=100, sampling=sampling)
    single = make_plan(config, num_examples=5000, num_steps=40)
    tuned = make_plan(dataclasses.replace(config, tuned_runs=10.0), num_examples=5000, num_steps=40)
    profile = profile_of_plan(tuned)
    assert profile.epsilon(tuned.delta) == pytest.approx(tuned.epsilon(), rel=1e-6)
    assert (profile.true_positives(RATES) > profile_of_plan(single).true_positives(RATES)).all()
    for rate in (1e-3, 1e-2, 0.1):
        assert profile.true_positives(rate) <= pair_alone(tuned.epsilon(), tuned.delta, rate) * (1 + 1e-9)
