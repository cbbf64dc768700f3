"""Sensitivities against every participation pattern there is, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import BufferedLinearToeplitz, Participation, fit_blt
from hf_dpopt.noise.sensitivity import toeplitz_sensitivity, toeplitz_sensitivity_bound
from hf_dpopt.noise.tree import TreeAggregation
from tests.contract.noise import patterns, worst_norm
from tests.mechanisms.strategies.cases import strategies

PARTICIPATIONS = [Participation(), Participation(2, 3), Participation(3, 4), Participation(4, 1), Participation(3, 5)]
PARTICIPATIONS += [Participation(2, 6, "fixed_epoch"), Participation(3, 4, "fixed_epoch")]
EXACT = ("identity", "nu", "optimal-cc", "anti-pgd", "damped", "blt", "one-band", "falling-bands")


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("n", [5, 12, 13])
def test_exact(name, n, participation):
    strategy = strategies(n)[name]
    want = worst_norm(strategy.strategy_matrix(n), participation)
    assert strategy.sensitivity(n, participation) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("b", range(1, 9))
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("n", [3, 8, 11, 16])
def test_trees_of_any_length(n, k, b):
    """Exact in a fixed order, the one sampler of trees; not below, and at most 3 % above, for patterns that none has."""
    matrix, epochs, any_ = (
        TreeAggregation().strategy_matrix(n),
        Participation(k, b, "fixed_epoch"),
        Participation(k, b),
    )
    assert TreeAggregation().sensitivity(n, epochs) == pytest.approx(worst_norm(matrix, epochs), rel=1e-12)
    want = worst_norm(matrix, any_)
    assert (1 - 1e-12) * want <= TreeAggregation().sensitivity(n, any_) <= 1.03 * want


BOUNDED = {
    **{name: one for name, one in strategies(12).items() if name not in EXACT},
    "restarted-early": TreeAggregation("vanilla", restart_every=3, tree_completion=False),
}


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_never_below_the_worst_pattern(name, participation):
    strategy, n = BOUNDED[name], 12
    assert strategy.sensitivity(n, participation) >= worst_norm(strategy.strategy_matrix(n), participation) - 1e-12


@pytest.mark.parametrize("name", ["rising-bands", "bands", "restarted-bands"])
def test_exact_where_a_record_meets_orthogonal_columns(name):
    strategy, participation = BOUNDED[name], Participation(3, 4)
    want = worst_norm(strategy.strategy_matrix(12), participation)
    assert strategy.sensitivity(12, participation) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "blt",
    [
        BufferedLinearToeplitz((0.9,), (0.5,)),
        BufferedLinearToeplitz((0.9, 0.5, 1e-5), (0.7, 0.2, 1e-9)),
        BufferedLinearToeplitz((1 - 1e-12, 0.9), (1 - 1e-6, 1e-300)),
        BufferedLinearToeplitz((0.97, 0.97 - 1e-12), (0.97 - 5e-13, 0.1)),  # two decays that are nearly one
        fit_blt(1e-4, 8),
    ],
)
@pytest.mark.parametrize(
    "n, k, b",
    [(1, 1, 1), (2, 2, 1), (7, 3, 3), (100, 1, 100), (100, 100, 1), (2052, 6, 342), (2052, 6, 411), (90, 9, 30)],
)
def test_closed_form_of_buffers(blt, n, k, b):
    participation = Participation(k, b)
    want = toeplitz_sensitivity(blt.strategy_coefs(n), participation)
    assert blt.sensitivity(n, participation) == pytest.approx(want, rel=1e-12)


def test_closed_form_of_buffers_in_a_long_run():
    """Too long for the coefficients: 10^9 steps."""
    blt, n = BufferedLinearToeplitz((0.9,), (0.5,)), 10**9
    squares = 1 + 0.4**2 / (1 - 0.9**2)
    assert blt.sensitivity(n, Participation(7, n // 8)) == pytest.approx(np.sqrt(7 * squares), rel=1e-12)


def test_the_theorem_refuses_what_it_does_not_cover():
    for coefs in ([1, -0.5], [1, 0.5, 0.6]):
        with pytest.raises(DPConfigError, match="toeplitz_sensitivity_bound"):
            toeplitz_sensitivity(np.array(coefs), Participation())
        assert toeplitz_sensitivity_bound(np.array(coefs), Participation(2, 1)) > 0


@pytest.mark.parametrize("name", strategies(12))
def test_neighbouring_streams_differ_by_at_most_the_sensitivity(name):
    """Gradient streams of two datasets, clipped to 1, one record of which is used k times with any direction."""
    n, dimension, participation = 12, 6, Participation(3, 4)
    rng, strategy = np.random.default_rng(1), strategies(12)[name]
    bound, matrix = strategy.sensitivity(n, participation), strategy.strategy_matrix(n)
    for steps in patterns(n, participation):
        difference = np.zeros((n, dimension))
        directions = rng.normal(size=(len(steps), dimension)) * rng.uniform(0, 1, (len(steps), 1)) + 1
        difference[list(steps)] = directions / np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ difference) <= bound * (1 + 1e-12)
