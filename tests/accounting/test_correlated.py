"""Epsilon of correlated noise in a fixed order, whole runs and parts of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_dpopt.accounting.correlated import CorrelatedMechanism, calibrate_correlated
from hf_dpopt.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.mechanisms.randomness import make_noise_source
from hf_dpopt.mechanisms.strategies import (
    DenseStrategy,
    IdentityStrategy,
    NuDPFTRL,
    Participation,
    Stamped,
    TreeAggregation,
)
from hf_dpopt.mechanisms.strategies.tuning import optimize_blt

N, EPOCHS = 2052, Participation(6, 342)


@pytest.mark.parametrize(
    "ratio, delta, zero_out, replace_one",
    [
        (0.5, 1e-5, 9.99726, 24.3816),
        (1.0, 1e-5, 4.37718, 9.99726),
        (1.0, 1e-6, 4.88655, 10.99715),
        (2.0, 1e-5, 1.99309, 4.37718),
        (5.0, 1e-6, 0.83412, 1.76565),
    ],
)
def test_one_gaussian(ratio, delta, zero_out, replace_one):
    """Exact values; replacing a record moves the sums twice as far."""
    for adjacency, want in (("zero_out", zero_out), ("replace_one", replace_one)):
        mechanism = CorrelatedMechanism(
            strategy=IdentityStrategy(),
            participation=Participation(),
            num_steps=1,
            draw_stddev=ratio,
            adjacency=adjacency,
        )
        assert mechanism.epsilon(delta) == pytest.approx(want, abs=1e-5 * 2)


# epsilon after so many steps of a run calibrated to 8 at delta 1e-6, 2052 steps, 6 epochs of 342
PREFIXES = [100, 342, 343, 1026, 2052, 2400, 4104]
RUNS = {
    "nu": (2.9305, [2.4176, 2.5317, 3.0385, 5.1052, 8.0, 9.2244, 12.4894]),
    "optimal-cc": (3.9825, [1.7632, 1.9074, 2.2604, 4.3195, 8.0, 9.5650, 16.3349]),
    "blt": (3.0892, [2.4835, 2.6853, 3.1263, 5.2638, 8.0, 9.1263, 12.2201]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stops_early_or_goes_on(name):
    strategies = {"nu": NuDPFTRL(0.001614), "optimal-cc": NuDPFTRL(0.0)}
    strategy = strategies[name] if name in strategies else optimize_blt(N, EPOCHS, 3)
    stddev, wanted = RUNS[name]
    mechanism = calibrate_correlated(strategy, EPOCHS, N, target_epsilon=8.0, delta=1e-6)
    assert mechanism.draw_stddev == pytest.approx(stddev, rel=5e-4)
    got = [mechanism.epsilon(1e-6, steps) for steps in PREFIXES]
    assert got == pytest.approx(wanted, rel=2e-3 if name == "blt" else 5e-4)
    assert got == sorted(got)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_calibration_spends_the_budget_and_no_more(adjacency, target):
    mechanism = calibrate_correlated(
        TreeAggregation(), Participation(3, 20), 64, target_epsilon=target, delta=1e-5, adjacency=adjacency
    )
    assert target * (1 - 1e-6) <= mechanism.epsilon(1e-5) <= target
    sensitivity = TreeAggregation().sensitivity(64, Participation(3, 20))
    factor = 2 if adjacency == "replace_one" else 1
    assert mechanism.noise_multiplier == pytest.approx(mechanism.draw_stddev / (sensitivity * factor))


def test_the_stream_has_the_noise_that_was_accounted_for():
    mechanism = calibrate_correlated(NuDPFTRL(0.1), Participation(2, 4), 8, target_epsilon=4.0, delta=1e-5)
    stream = mechanism.stream(make_noise_source("secure", bytes(32)), clipping_norm=0.5)
    sums = {"w": torch.zeros(200_000)}
    for step in range(8):
        before = sums["w"].clone()
        stream.add_(sums, step)
    want = 0.5 * mechanism.draw_stddev * NuDPFTRL(0.1).row_norm(7)
    assert (sums["w"] - before).std().item() == pytest.approx(want, rel=0.01)


def test_a_strategy_made_for_a_run_ends_with_it():
    strategy = DenseStrategy(np.eye(8))
    mechanism = calibrate_correlated(strategy, Participation(2, 4), 8, target_epsilon=4.0, delta=1e-5)
    assert mechanism.epsilon(1e-5, 3) == mechanism.epsilon(1e-5)
    with pytest.raises(DPBudgetExceeded, match="made for 8 steps.*anytime"):
        mechanism.epsilon(1e-5, 9)
    with pytest.raises(DPBudgetExceeded):
        mechanism.stream(make_noise_source("secure", bytes(32)), clipping_norm=1.0, max_steps=9)


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({"adjacency": "add_or_remove_one"}, "zero_out"),
        ({"target_epsilon": 0.0}, "epsilon > 0"),
        ({"target_epsilon": float("inf")}, "epsilon > 0"),
        ({"delta": 1.0}, "delta in"),
        ({"num_steps": 5}, "do not fit into 5 steps"),
    ],
)
def test_bad_input(changes, mend):
    arguments = {"num_steps": 20, "target_epsilon": 8.0, "delta": 1e-5, **changes}
    with pytest.raises(DPConfigError, match=mend):
        calibrate_correlated(NuDPFTRL(0.1), Participation(4, 5), **arguments)


@pytest.mark.parametrize("strategy", [Stamped(NuDPFTRL(0.0), 4), TreeAggregation("full_honaker")])
def test_a_part_of_a_run_is_never_charged_less_than_its_part_of_the_matrix(strategy):
    """The matrix of a shorter run is not the beginning of that of a longer one."""
    n, once = 32, Participation(1, 32)
    mechanism = calibrate_correlated(strategy, once, n, target_epsilon=4.0, delta=1e-5)
    matrix = strategy.strategy_matrix(n)
    for t in (1, 2, 8, 17, 31):
        planned = CorrelatedMechanism(
            strategy=DenseStrategy(matrix[:t, :t]), participation=Participation(1, t), num_steps=t,
            draw_stddev=mechanism.draw_stddev,
        )  # fmt: skip
        assert mechanism.epsilon(1e-5, t) >= planned.epsilon(1e-5)


@pytest.mark.parametrize("target", [1e-12, 1e-8, 1e-4])
def test_tiny_budgets_end(target):
    assert (
        calibrate_correlated(NuDPFTRL(0.5), Participation(), 4, target_epsilon=target, delta=1e-6).epsilon(1e-6)
        <= target
    )


@pytest.mark.parametrize("clipping_norm", [0.0, -1.0, float("nan")])
def test_a_stream_without_noise_is_refused(clipping_norm):
    mechanism = calibrate_correlated(NuDPFTRL(0.5), Participation(), 4, target_epsilon=1.0, delta=1e-6)
    with pytest.raises(DPConfigError, match="scale"):
        mechanism.stream(make_noise_source("secure", bytes(32)), clipping_norm=clipping_norm)
