"""The best of a random number of runs: theorems written out by hand, and mechanisms small enough to enumerate."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import integrate, stats

from hf_dpopt.accounting import accountants, epsilon, events
from hf_dpopt.accounting.best_of_runs import RunCount, gaussian_delta, profile_epsilon
from hf_dpopt.common.errors import DPConfigError

ALPHA = 1e-6  # probability that a test of random numbers fails by chance
LAWS = [RunCount(mean=m) for m in (1.5, 4.0, 30.0)]


def law_name(law: RunCount) -> str:
    return f"{law.mean:g}"


# --- the law of the number of runs ---


def generating(law: RunCount, x: np.ndarray) -> np.ndarray:
    """E[x^K] by Definition 1 of arXiv:2110.03620 with eta = 1: ((1 - (1 - gamma) x)^-1 - 1) / (gamma^-1 - 1)."""
    gamma = 1 / law.mean
    return ((1 - (1 - gamma) * x) ** -1 - 1) / (1 / gamma - 1)


@pytest.mark.parametrize("law", LAWS, ids=law_name)
def test_the_probabilities_are_those_of_the_law(law: RunCount):
    counts = np.arange(0, 1_500)
    found = np.array([law.probability(int(k)) for k in counts])
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert (found * counts).sum() == pytest.approx(law.mean, rel=1e-4)
    for x in (0.2, 0.7, 0.95):
        assert (found * x**counts).sum() == pytest.approx(float(generating(law, np.array(x))), rel=1e-5)


@pytest.mark.parametrize("law", [RunCount(mean=1.5), RunCount(mean=4.0)], ids=law_name)
def test_numbers_are_drawn_from_the_law(law: RunCount):
    """Chi-square over 8 cells at level ALPHA."""
    source, num_draws = random.SystemRandom(), 2000
    drawn = np.bincount([min(law.draw(source), 7) for _ in range(num_draws)], minlength=8)
    expected = np.array([law.probability(k) for k in range(7)])
    expected = num_draws * np.append(expected, 1 - expected.sum())
    used = expected > 0
    assert drawn[~used].sum() == 0  # a truncated law never draws 0
    statistic = ((drawn - expected)[used] ** 2 / expected[used]).sum()
    assert statistic < stats.chi2.ppf(1 - ALPHA, used.sum() - 1)


@pytest.mark.parametrize("mean", [1.0, 0.5, math.nan, math.inf, 1e9])
def test_no_law_has_such_a_mean(mean: float):
    with pytest.raises(DPConfigError, match="tuned_runs="):
        RunCount(mean=mean)


def test_a_law_is_read_back():
    for law in LAWS:
        assert RunCount.read(law.public_dict()) == law
    with pytest.raises(DPConfigError, match="not a geometric number"):
        RunCount.read({"mean": 10.0, "shape": "poisson"})


def test_another_law_has_no_profile_bound():
    """Its Renyi divergences are known; the constant of the profile bound is that of the geometric law."""
    other = events.flatten(RepeatAndSelectDpEvent(GaussianDpEvent(2.0), 10.0, math.inf))
    assert (
        events.selected_run(other) is None and accountants.selection_epsilon(other, 1e-5, "add_or_remove_one") is None
    )


# --- the theorems, by hand ---


def test_theorem_2():
    """eps'(l) = eps(l) + (1 + eta) (1 - 1/l') eps(l') + (1 + eta) log(1/gamma) / l' + log(mean) / (l - 1), eta 1."""
    law, noise, delta = RunCount(mean=10.0), 1.3, 1e-5
    orders = np.array(accountants.SELECTION_ORDERS)
    one = orders / (2 * noise**2)
    beside = min((1 - 1 / b) * e + math.log(law.mean) / b for b, e in zip(orders, one, strict=True))
    by_hand = [e + 2 * beside + math.log(law.mean) / (a - 1) for a, e in zip(orders, one, strict=True)]
    by_hand = [min(by_hand[i:]) for i in range(len(orders))]  # divergences grow with the order
    found = accountants.divergences(events.flatten(law.event(GaussianDpEvent(noise)))[0][0], tuple(orders))
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)
    rdp = accountants.rdp_epsilon(events.flatten(law.event(GaussianDpEvent(noise))), delta, "add_or_remove_one")
    assert rdp == pytest.approx(compute_epsilon(orders, by_hand, delta)[0], rel=1e-6)


def test_orders_are_not_lost_where_few_are_asked_for():
    """The bound at one order takes the best of the others: a single order must give the same."""
    leaf = events.flatten(RunCount(mean=10.0).event(GaussianDpEvent(1.0)))[0][0]
    divergences = accountants.divergences(leaf, accountants.SELECTION_ORDERS)
    every = dict(zip(accountants.SELECTION_ORDERS, divergences, strict=True))
    assert accountants.divergences(leaf, (2.0, 5.0)).tolist() == [every[2], every[5]]
    assert math.isinf(accountants.divergences(leaf, (2.31,))[0])


# --- exact mechanisms ---


def selected(law: RunCount, q: np.ndarray) -> np.ndarray:
    """Exact law of the best of K draws from q, worst first; for K = 0 an outcome below all."""
    reached = np.concatenate([[0.0], np.cumsum(q)])
    reached[-1] = 1.0
    steps = generating(law, reached)
    return np.concatenate([[steps[0]], np.diff(steps)])


def hockey_stick(p: np.ndarray, q: np.ndarray, at: float) -> float:
    return float(np.maximum(p - math.exp(at) * q, 0).sum())


def both(p: np.ndarray, q: np.ndarray, at: float) -> float:
    return max(hockey_stick(p, q, at), hockey_stick(q, p, at))


def least_epsilon(p: np.ndarray, q: np.ndarray, delta: float) -> float:
    low, high = 0.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if both(p, q, middle) > delta else (low, middle)
    return high


def randomised_response(e: float, where: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of k-ary randomised response on two inputs, one of them `where` in the order of outputs."""
    p, q = np.ones(4), np.ones(4)
    p[where], q[(where + 1) % 4] = math.exp(e), math.exp(e)
    return p / p.sum(), q / q.sum()


def bound(law: RunCount, p: np.ndarray, q: np.ndarray, delta: float) -> float:
    return profile_epsilon(law, delta, lambda share: least_epsilon(p, q, share), lambda at: both(p, q, at))


@pytest.mark.parametrize("law", LAWS, ids=law_name)
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_the_best_of_randomised_responses_is_within_the_bound(law: RunCount, where: int):
    for e in (0.3, 1.0, 2.5):
        p, q = randomised_response(e, where)
        best_p, best_q = selected(law, p), selected(law, q)
        for delta in (1e-6, 1e-3, 0.05):
            exact = least_epsilon(best_p, best_q, delta)
            assert exact <= bound(law, p, q, delta) * (1 + 1e-9) + 1e-9


def test_one_run_alone_would_understate_it():
    """The check above can fail: without the second term of the bound it does."""
    law, response = RunCount(mean=30.0), randomised_response(1.0, 0)
    tuned = least_epsilon(*(selected(law, one) for one in response), 1e-6)
    assert tuned > 1.2 * least_epsilon(*response, 1e-6 / law.mean)


def test_random_mechanisms_are_within_the_bound():
    """Five outputs with random probabilities, also with ones that only one input gives."""
    source = np.random.default_rng()
    for _ in range(150):
        law = LAWS[source.integers(len(LAWS))]
        p, q = source.dirichlet(np.full(5, 0.5)), source.dirichlet(np.full(5, 0.5))
        delta = 10 ** -source.uniform(1, 6)
        assert least_epsilon(selected(law, p), selected(law, q), delta) <= bound(law, p, q, delta) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("law", [RunCount(mean=10.0)], ids=law_name)
@pytest.mark.parametrize("noise", [0.7, 1.5])
def test_the_largest_of_gaussian_outputs_is_within_what_is_reported(law: RunCount, noise: float):
    """Q adds noise to a count, and its output is its score: the density of the largest of K in closed form."""
    delta = 1e-4
    grid = np.linspace(-12 * noise, 1 + 12 * noise, 400_001)

    def masses(shift: float) -> np.ndarray:
        steps = generating(law, stats.norm.cdf((grid - shift) / noise))
        return np.concatenate([[steps[0]], np.diff(steps)])

    exact = least_epsilon(masses(0.0), masses(1.0), delta)
    spent = epsilon(law.event(GaussianDpEvent(noise)), delta, "add_or_remove_one")
    one = epsilon(GaussianDpEvent(noise), delta, "add_or_remove_one").epsilon
    assert one < exact <= spent.epsilon  # that of a single run would be too little
    assert spent.accountant in ("selection (privacy profile)", "rdp")


@pytest.mark.parametrize("noise", [0.5, 2.0])
@pytest.mark.parametrize("at", [0.0, 1.0, 3.0])
def test_delta_of_a_gaussian_is_exact(noise: float, at: float):

    def excess(x: float) -> float:
        return stats.norm.pdf(x, 1, noise) - math.exp(at) * stats.norm.pdf(x, 0, noise)

    exact, _ = integrate.quad(excess, 0.5 + at * noise**2, 1 + 12 * noise, epsabs=1e-13)
    assert gaussian_delta(noise, at) == pytest.approx(exact, rel=1e-6, abs=1e-12)


# --- what the accountants make of it ---


def sampled(noise: float = 0.8, num_steps: int = 50) -> SelfComposedDpEvent:
    return SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(noise)), num_steps)


def test_the_profile_of_sampled_steps_is_below_the_divergences():
    """Both are proofs; dp_accounting's RDP bound, computed here on its own orders, is the independent one."""
    law, delta = RunCount(mean=10.0), 1e-5
    spent = epsilon(law.event(sampled()), delta, "add_or_remove_one")
    accountant = RdpAccountant(accountants.SELECTION_ORDERS)
    accountant.compose(RepeatAndSelectDpEvent(sampled(), 10.0, 1.0))
    alone = epsilon(sampled(), delta, "add_or_remove_one").epsilon
    assert alone < spent.epsilon < accountant.get_epsilon(delta)
    assert spent.accountant == "selection (privacy profile)"


def test_more_runs_cost_more_and_more_noise_costs_less():
    costs = [epsilon(RunCount(mean=m).event(sampled()), 1e-5, "add_or_remove_one").epsilon for m in (2.0, 10.0, 50.0)]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    quiet = epsilon(RunCount(mean=10.0).event(sampled(1.6)), 1e-5, "add_or_remove_one").epsilon
    assert quiet < costs[1]


def test_a_cap_on_batches_is_paid_in_delta_for_every_run():
    capped = SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(1000, 0.05, 110, 0.8), 50)
    law = RunCount(mean=10.0)
    (_, poisson_cost), (poisson, cost) = (
        events.split_truncation(events.flatten(event)) for event in (capped, law.event(capped))
    )
    assert cost == pytest.approx(10 * poisson_cost) and cost > 0
    assert poisson == events.flatten(law.event(sampled()))
    costs = [epsilon(law.event(event), 1e-5, "add_or_remove_one").epsilon for event in (sampled(), capped)]
    assert costs[0] < costs[1] < 1.001 * costs[0]


def test_a_selection_is_composed_with_what_came_before():
    law, before = RunCount(mean=5.0), GaussianDpEvent(4.0)
    alone = epsilon(law.event(sampled()), 1e-5, "add_or_remove_one").epsilon
    composed = ComposedDpEvent([before, law.event(sampled())])
    both_of_them = epsilon(composed, 1e-5, "add_or_remove_one")
    parts = [epsilon(part, 5e-6, "add_or_remove_one").epsilon for part in composed.events]
    renyi = accountants.rdp_epsilon(events.flatten(composed), 1e-5, "add_or_remove_one")
    assert alone < both_of_them.epsilon == pytest.approx(min(renyi, sum(parts)))
    twice = epsilon(SelfComposedDpEvent(law.event(sampled()), 2), 1e-5, "add_or_remove_one")
    assert twice.epsilon > both_of_them.epsilon


def test_equal_selections_are_equal_and_nothing_else_is_let_in():
    first, second = (events.flatten(RunCount(mean=5.0).event(sampled())) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    with pytest.raises(DPConfigError, match="No proof is known"):
        events.flatten(RunCount(mean=5.0).event(RepeatAndSelectDpEvent))


def test_swapped_records_have_a_profile_and_no_divergences():
    """dp_accounting's RDP accountant forgets the factor 2 of `replace_one`, so that it may not be asked."""
    event = RunCount(mean=5.0).event(GaussianDpEvent(2.0))
    swapped = epsilon(event, 1e-5, "replace_one")
    assert swapped.accountant == "selection (privacy profile)"
    assert swapped.epsilon == pytest.approx(
        accountants.selection_epsilon(
            events.flatten(RunCount(mean=5.0).event(GaussianDpEvent(1.0))), 1e-5, "add_or_remove_one"
        ),
        rel=1e-6,
    )
