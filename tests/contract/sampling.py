"""What every sampler has to keep: checks on the batches it draws, for one registered name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.events import flatten, gaussian_precision
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import BandedToeplitz, BufferedLinearToeplitz, IdentityStrategy, NoiseStrategy, NuDPFTRL
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.sampling import SAMPLERS, Sampler
from hf_dpopt.sampling.check import ParticipationCheck

NUM_EXAMPLES, BATCH_SIZE, NUM_STEPS, DELTA = 40, 8, 15, 1e-4
STRATEGIES = (
    BandedToeplitz((1.0, 0.5)),
    BandedToeplitz((1.0, -0.4, 0.2)),
    BufferedLinearToeplitz((0.9, 0.5), (0.7, 0.2)),
    NuDPFTRL(0.1),
    TreeAggregation("honaker"),
)
OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "capped_poisson": {"records_per_user": 2},
    "cyclic_poisson": {"num_groups": 2},
}


def sampler_of(name: str, batch_size: int = BATCH_SIZE) -> Sampler:
    return SAMPLERS[name](num_examples=NUM_EXAMPLES, expected_batch_size=batch_size, **OWN_OPTIONS.get(name, {}))


def _keys(num: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(1, num + 1)]


def check_batches(name: str) -> None:
    """A batch is a set of records, and a function of key and step alone."""
    sampler = sampler_of(name)
    for key in _keys(3):
        for step in (9, 0, 3):
            batch = sampler.draw(key, step)
            assert batch.dtype == np.int64 and (np.diff(batch) > 0).all()
            assert not len(batch) or (batch[0] >= 0 and batch[-1] < NUM_EXAMPLES)
            np.testing.assert_array_equal(batch, sampler_of(name).draw(key, step))


def check_rate(name: str) -> None:
    """Batches are as large on average as they are said to be: five standard errors of 300 chains."""
    sampler = sampler_of(name)
    sizes = [
        len(sampler.draw(key * 16, step)) for key in (i.to_bytes(2, "big") for i in range(300)) for step in (0, 7)
    ]
    spread = 5 * math.sqrt(NUM_EXAMPLES / len(sizes))
    assert abs(np.mean(sizes) - BATCH_SIZE) < spread


def check_participation(name: str) -> None:
    """No record takes part more often, or sooner again, than the sampler promises, wherever a chain begins."""
    sampler = sampler_of(name)
    for first, key in enumerate(_keys(5), start=1):
        promise = ParticipationCheck(sampler, key, first)
        counts = np.zeros(NUM_EXAMPLES, int)
        for step in range(first, first + NUM_STEPS):
            batch = sampler.draw(key, step)
            promise.observe(step, batch)  # raises where it is broken
            counts[batch] += 1
        assert counts.max() <= sampler.max_participations(NUM_STEPS)


def check_epsilon(name: str) -> None:
    """Finite under every adjacency that is claimed; never less for less noise or more steps; refused elsewhere."""
    sampler = sampler_of(name)
    for adjacency in ("add_or_remove_one", "zero_out", "replace_one"):
        if adjacency not in sampler.adjacencies:
            with pytest.raises(DPConfigError, match="no privacy proof"):
                sampler.check_adjacency(adjacency)
            continue

        def epsilon(stddev: float, steps: int, adjacency: str = adjacency) -> float:
            event = sampler.release(IdentityStrategy(), stddev, steps, planned_steps=NUM_STEPS)
            return accountants.epsilon(event, DELTA, adjacency).epsilon

        assert epsilon(2.0, 0) == 0
        some = epsilon(2.0, NUM_STEPS)
        assert 0 < some < math.inf
        assert epsilon(2.5, NUM_STEPS) <= some <= epsilon(2.0, 3 * NUM_STEPS) * (1 + 1e-9)


def check_strategies(name: str) -> None:
    """Correlated noise is refused with a way out, or charged for the worst record that is really drawn.

    The latter with the largest batches there are: without amplification what a record moves is known.
    """
    num_groups = OWN_OPTIONS.get(name, {}).get("num_groups", 1)
    sampler, full = sampler_of(name), sampler_of(name, NUM_EXAMPLES // num_groups)
    for strategy in STRATEGIES:
        if _is_refused(sampler, strategy):
            continue
        event = sampler.release(strategy, 2.0, NUM_STEPS, planned_steps=NUM_STEPS)
        assert 0 < accountants.epsilon(event, DELTA, sampler.adjacencies[0]).epsilon < math.inf
        if not _is_refused(full, strategy):
            event = full.release(strategy, 2.0, NUM_STEPS, planned_steps=NUM_STEPS)
            precision = gaussian_precision(flatten(event))
            if precision is not None:
                worst = _worst_drawn(full, strategy.strategy_matrix(NUM_STEPS)) / 2.0
                assert precision >= worst**2 * (1 - 1e-9), strategy


def _is_refused(sampler: Sampler, strategy: NoiseStrategy) -> bool:
    """By the sampler, or by the event that it makes; with a way out in either case."""
    try:
        sampler.release(strategy, 2.0, NUM_STEPS, planned_steps=NUM_STEPS)
    except DPConfigError as error:
        assert "Use " in str(error) or "use " in str(error), error
        return True
    assert not sampler.refuses(strategy), "what is refused has no event"
    return False


def _worst_drawn(sampler: Sampler, matrix: np.ndarray) -> float:
    """Largest norm of the columns that one record of 5 chains meets, all pointing the same way."""
    worst = 0.0
    for key in _keys(5):
        met = np.zeros((NUM_STEPS, NUM_EXAMPLES))
        for step in range(NUM_STEPS):
            met[step, sampler.draw(key, step)] = 1
        worst = max(worst, float(np.linalg.norm(matrix @ met, axis=0).max()))
    return worst


def check_excess(name: str) -> None:
    """Where a cost is compared without computing it, epsilon agrees."""
    sampler = sampler_of(name)
    for strategy in (IdentityStrategy(), *STRATEGIES):
        if _is_refused(sampler, strategy):
            continue
        planned = sampler.release(strategy, 2.0, NUM_STEPS, planned_steps=NUM_STEPS)
        most = accountants.epsilon(planned, DELTA, sampler.adjacencies[0]).epsilon
        for chains in ([NUM_STEPS], [NUM_STEPS - 4], [6, 9], [7, 8], [2 * NUM_STEPS]):
            sign = sampler.excess(strategy, chains, NUM_STEPS)
            if sign is not None:
                event = sampler.release(strategy, 2.0, chains, planned_steps=NUM_STEPS)
                spent = accountants.epsilon(event, DELTA, sampler.adjacencies[0]).epsilon
                assert (spent <= most * (1 + 1e-6)) if sign <= 0 else (spent >= most * (1 - 1e-6)), (strategy, chains)


def check_words(name: str) -> None:
    """The statement says how many records there are, and what is sampled."""
    sampler = sampler_of(name)
    for unit in ("record", "user"):
        text = sampler.describe(unit)
        assert unit in text and str(NUM_EXAMPLES // OWN_OPTIONS.get(name, {}).get("records_per_user", 1)) in text
    assert sampler.parameters()["name"] == name


CHECKS = (
    check_batches, check_rate, check_participation, check_epsilon, check_strategies, check_excess, check_words,
)  # fmt: skip
