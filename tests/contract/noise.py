"""What every noise mechanism has to keep: checks by brute force, for one registered name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS, NoiseStrategy, NoiseStream, Participation, from_parameters, is_whole
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.source import NoiseSource

NUM_EXAMPLES, BATCH_SIZE, NUM_STEPS = 100, 25, 12  # an epoch of 4 steps, 3 participations
SHAPES = {"b.weight": (9, 10), "a.bias": (4,), "scalar": ()}
KEY = bytes(range(32))
CHEAP: dict[str, dict[str, Any]] = {"blt": {"num_buffers": 2}, "banded": {"num_bands": 3}}  # shorter to tune


class CountedSource(NoiseSource):
    """Normals of a key, and which rows of which tensor were asked for."""

    name = description = "counted"

    def __init__(self) -> None:
        self._source = ChaCha20Gaussian(KEY)
        self.asked: list[tuple[int, int]] = []

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        self.asked.append((tensor, step))
        return self._source.normal(shape, step=step, tensor=tensor, device=device)


def plan_of(name: str, **changes: Any) -> PrivacyPlan:
    """A short run of a mechanism with its own sampler."""
    config = PrivacyConfig(
        noise_multiplier=0.7, expected_batch_size=BATCH_SIZE, noise_mechanism=name,
        noise_kwargs=CHEAP.get(name, {}), **changes,
    )  # fmt: skip
    return make_plan(config, num_examples=NUM_EXAMPLES, num_steps=NUM_STEPS)


def strategy_of(name: str) -> NoiseStrategy:
    return plan_of(name).strategy


def _zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def _steps(stream: NoiseStream, first: int, end: int) -> list[dict[str, torch.Tensor]]:
    noises = []
    for step in range(first, end):
        noises.append(_zeros())
        stream.add_(noises[-1], step)
    return noises


# --- strategy --------------------------------------------------------------------------------------------------------


def patterns(n: int, participation: Participation) -> list[tuple[int, ...]]:
    """Every set of steps that one record may take part in."""
    k, b = participation.max_participations, participation.min_sep
    if participation.kind == "fixed_epoch":
        largest = [tuple(range(offset, n, b))[:k] for offset in range(min(b, n))]
        return [
            some for all_ in largest for size in range(len(all_)) for some in itertools.combinations(all_, size + 1)
        ]
    found = []
    for size in range(1, participation.fits(n) + 1):
        for steps in itertools.combinations(range(n), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(steps)):
                found.append(steps)
    return found


def worst_norm(matrix: np.ndarray, participation: Participation) -> float:
    """Largest ``||C u||`` over patterns and signs: contributions of norm 1 that point the same way or apart."""
    worst = 0.0
    for steps in patterns(matrix.shape[1], participation):
        columns = matrix[:, list(steps)]
        for signs in itertools.product((1.0, -1.0), repeat=len(steps) - 1):
            worst = max(worst, float(np.linalg.norm(columns @ np.array([1.0, *signs]))))
    return worst


def check_matrices(name: str) -> None:
    """``B C = I``, at any number of steps that the strategy is for."""
    strategy = strategy_of(name)
    for n in (1, 5, NUM_STEPS) if strategy.anytime else (NUM_STEPS,):
        product = strategy.noising_matrix(n) @ strategy.strategy_matrix(n)
        np.testing.assert_allclose(product, np.eye(n), atol=1e-9)
        norms = np.linalg.norm(strategy.noising_matrix(n), axis=1)
        stated = [strategy.row_norm(t, None if strategy.anytime else n) for t in range(n)]
        np.testing.assert_allclose(stated, norms, rtol=1e-9)


PARTICIPATIONS = (
    Participation(),
    Participation(3, 4),
    Participation(3, 4, "fixed_epoch"),
    Participation(4, 2),
    Participation(NUM_STEPS, 1, "fixed_epoch"),
)


def check_sensitivity(name: str) -> None:
    """Never below what brute force finds."""
    strategy = strategy_of(name)
    matrix = strategy.strategy_matrix(NUM_STEPS)
    for participation in PARTICIPATIONS:
        stated = strategy.sensitivity(NUM_STEPS, participation)
        assert stated >= worst_norm(matrix, participation) * (1 - 1e-9), (name, participation)


def check_accounting(name: str) -> None:
    """The noise of a run, relative to what one record moves, is what the event is told of."""
    plan = plan_of(name)
    plan.strategy.check_claims(NUM_STEPS)
    if plan.strategy.is_independent or plan.sampler.has_groups:  # the sampler's own event, tested with it
        columns = np.linalg.norm(plan.strategy.strategy_matrix(NUM_STEPS), axis=0)
        assert plan.draw_stddev >= plan.noise_multiplier * columns.max() * (1 - 1e-9)
        return
    worst = worst_norm(plan.strategy.strategy_matrix(NUM_STEPS), plan.sampler.participation(NUM_STEPS))
    event: Any = plan.event.events[0]  # type: ignore[attr-defined]
    assert event.noise_multiplier <= plan.draw_stddev / worst * (1 + 1e-9)


# --- stream ----------------------------------------------------------------------------------------------------------


def check_stream(name: str) -> None:
    """The noise of a run is that of its strategy."""
    plan = plan_of(name)
    check_noise(lambda source: plan.mechanism.stream(source, 1.0), plan.strategy, NUM_STEPS)


def check_noise(make: Callable[[NoiseSource], NoiseStream], strategy: NoiseStrategy, num_steps: int) -> None:
    """The noise of all steps is ``scale * B Z``, with rows of Z that were drawn under numbers of their own."""
    source = CountedSource()
    counted = _steps(make(source), 0, num_steps)
    rows = sorted({row for _, row in source.asked if row < 2**40})
    if strategy.is_square:
        assert rows == list(range(num_steps)), "one row of Z for every row of C"
    stream, matrix, compared = make(ChaCha20Gaussian(KEY)), strategy.noising_matrix(num_steps), 0
    for noises in (counted, _steps(stream, 0, num_steps)):  # row by row, and as the cipher adds it
        for tensor, tensor_name in enumerate(sorted(SHAPES)):
            drawn = np.stack([
                source.normal(SHAPES[tensor_name], step=row, tensor=tensor).double().numpy().ravel() for row in rows
            ])  # fmt: skip
            added = np.stack([noise[tensor_name].double().numpy().ravel() for noise in noises]) / stream.draw_stddev
            if strategy.is_square:
                want = matrix @ drawn
                np.testing.assert_allclose(added, want, rtol=0, atol=2e-5 * max(1.0, np.abs(want).max()))
            elif drawn.shape[1] > len(rows):  # enough coordinates to tell the draws apart
                # any square root of the noise will do for a tree, whose nodes are numbered in an order of its own
                weights = np.linalg.lstsq(drawn.T, added.T, rcond=None)[0]
                np.testing.assert_allclose(weights.T @ weights, matrix @ matrix.T, atol=1e-4)
                compared += 1
    assert strategy.is_square or compared, "no tensor is large enough to compare"


def check_draws(name: str) -> None:
    """A step draws as often, and keeps as much, as `cost` says."""
    plan, source = plan_of(name), CountedSource()
    stream = plan.mechanism.stream(source, 1.0)
    before = len(source.asked)
    _steps(stream, 0, NUM_STEPS)
    draws = (len(source.asked) - before) / len(SHAPES) / NUM_STEPS
    assert draws <= plan.cost.draws * 1.0001 + 1 / NUM_STEPS, (draws, plan.cost.draws)
    kept = stream.bytes_kept() / 4 / sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert kept <= plan.cost.kept + 1 + 1e-9, (kept, plan.cost.kept)


def check_resume(name: str) -> None:
    """A stream that goes on from the key alone adds the noise of one that never stopped."""
    plan = plan_of(name)
    whole = _steps(plan.mechanism.stream(CountedSource(), 1.0), 0, NUM_STEPS)
    for stop in (1, 5, 8):
        resumed = plan.mechanism.stream(CountedSource(), 1.0)
        resumed.continue_at(stop)
        for got, expected in zip(_steps(resumed, stop, NUM_STEPS), whole[stop:], strict=True):
            for tensor_name in SHAPES:
                torch.testing.assert_close(got[tensor_name], expected[tensor_name], rtol=0, atol=0)


# --- JSON ------------------------------------------------------------------------------------------------------------


def check_json(name: str) -> None:
    """A ledger gives the strategy back, and a plan made from it is the same plan."""
    plan = plan_of(name)
    written = json.loads(json.dumps(plan.strategy.parameters()))
    if is_whole(written):
        read = from_parameters(written)
        assert read == plan.strategy and read.digest() == plan.strategy.digest()
        np.testing.assert_array_equal(read.noising_matrix(NUM_STEPS), plan.strategy.noising_matrix(NUM_STEPS))
    recorded = PlanRecord.from_json(json.loads(json.dumps(plan.record.to_json())))
    assert recorded == plan.record
    resumed = make_plan(plan.config, num_examples=NUM_EXAMPLES, num_steps=NUM_STEPS, recorded=recorded)
    assert resumed.strategy == plan.strategy and resumed.epsilon() == plan.epsilon()


def check_options(name: str) -> None:
    """An option that it does not know is refused, with those that it knows."""
    config = PrivacyConfig(
        target_epsilon=8.0, expected_batch_size=BATCH_SIZE, noise_mechanism=name,
        noise_kwargs={**CHEAP.get(name, {}), "bandwidth": 3},
    )  # fmt: skip
    with pytest.raises(DPConfigError, match="does not know bandwidth. It ") as refusal:
        make_plan(config, num_examples=NUM_EXAMPLES, num_steps=NUM_STEPS)
    for option in MECHANISMS[name].options:
        assert option in str(refusal.value)


CHECKS = (
    check_matrices, check_sensitivity, check_accounting, check_stream, check_draws, check_resume, check_json,
    check_options,
)  # fmt: skip
