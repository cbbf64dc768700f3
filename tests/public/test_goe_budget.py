"""Both parts of the budget, by hand, by the Gaussian mechanism's own delta, and by dp_accounting."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.experimental.subspace_accounting import GoeRelease, goe_budget, goe_sensitivity, goe_zcdp, split_budget

RELEASES = [GoeRelease(1, 30.0), GoeRelease(1, 20.0), GoeRelease(2, 40.0), GoeRelease(4, 25.0)]


def test_zcdp_by_hand():
    want = 0.5**2 * (1 / 30**2 + 1 / 20**2 + 2 / 40**2 + 4 / 25**2)  # 2 p C^2 / (2 sigma^2)
    assert goe_zcdp(RELEASES, clipping_norm=0.5) == pytest.approx(want, rel=1e-12)
    assert goe_zcdp(RELEASES, clipping_norm=0.5, adjacency="replace_one") == pytest.approx(4 * want, rel=1e-12)
    assert goe_zcdp([], clipping_norm=0.5) == 0
    assert goe_zcdp([GoeRelease(1, 0.0)], clipping_norm=0.5) == math.inf


def _delta(mu: float, epsilon: float) -> float:
    """Of a Gaussian mechanism with sensitivity / stddev = mu: Balle and Wang (2018), Thm. 8."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("adjacency, factor", [("zero_out", 1), ("replace_one", 2)])
def test_epsilon_is_that_of_one_gaussian_mechanism(adjacency, factor):
    budget = goe_budget(
        RELEASES, clipping_norm=0.5, gradient_noise_multiplier=6.0, num_participations=10, delta=1e-5,
        adjacency=adjacency,
    )  # fmt: skip
    assert budget.gradients == pytest.approx(10 / (2 * 6.0**2))  # relative to the sensitivity of the adjacency
    mu_squared = 10 / 36 + sum(2 * r.num_participations * (0.5 * factor) ** 2 / r.noise_stddev**2 for r in RELEASES)
    assert budget.rho == pytest.approx(mu_squared / 2)
    assert _delta(math.sqrt(mu_squared), budget.epsilon) == pytest.approx(1e-5, rel=1e-6)
    without = goe_budget(
        [], clipping_norm=0.5, gradient_noise_multiplier=6.0, num_participations=10, delta=1e-5, adjacency=adjacency
    )
    assert without.preconditioner == 0 and without.epsilon < budget.epsilon


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_split_budget_is_spent_and_no_more(share, adjacency):
    gradients, preconditioner = split_budget(2.0, 1e-5, share=share, num_participations=40, num_releases=20)
    releases = [
        GoeRelease(p, preconditioner * goe_sensitivity(p, 0.7, adjacency)) for p in range(1, 41, 2)
    ]  # fmt: skip
    spent = goe_budget(
        releases, clipping_norm=0.7, gradient_noise_multiplier=gradients, num_participations=40, delta=1e-5,
        adjacency=adjacency,
    )  # fmt: skip
    assert 1.999 < spent.epsilon <= 2.0
    assert spent.preconditioner / spent.rho == pytest.approx(share)


def test_more_noise_never_costs_more():
    def epsilon(gradient_noise, stddev):
        return goe_budget(
            [GoeRelease(3, stddev)] * 5, clipping_norm=1.0, gradient_noise_multiplier=gradient_noise,
            num_participations=3, delta=1e-6,
        ).epsilon  # fmt: skip

    assert epsilon(2.0, 5.0) > epsilon(2.0, 6.0) > epsilon(2.5, 6.0) > 0
    assert epsilon(0.0, 5.0) == epsilon(2.0, 0.0) == math.inf


def test_refusals():
    with pytest.raises(DPConfigError, match=r"in \(0, 1\)"):
        split_budget(2.0, 1e-5, share=1.0, num_participations=1, num_releases=1)
    with pytest.raises(DPConfigError, match="num_participations=0"):
        goe_sensitivity(0, 1.0, "zero_out")
    with pytest.raises(DPConfigError, match="bounds nothing"):
        goe_zcdp([GoeRelease(1, 1.0)], clipping_norm=math.nan)
    with pytest.raises(DPConfigError, match="unknown"):
        goe_sensitivity(1, 1.0, "swap")
