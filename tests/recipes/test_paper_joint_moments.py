"""Joint moment estimation: how far a record moves both sums, what is released, and the Adam that is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, random_array

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.sensitivity import gram_sensitivity
from recipes.paper import linear
from recipes.paper.joint_moments import limits, words
from recipes.paper.joint_moments.releases import JointReleases, MomentAdam, averaged
from recipes.paper.joint_moments.sensitivity import free_scale, joint_sensitivity
from recipes.paper.runs import KeptRuns

NUM, FEATURES, CLASSES, BATCH, STEPS = 60, 6, 3, 20, 30
KEYS = (b"s" * 32, b"n" * 32)


# --- sensitivity, without its formula -------------------------------------------------------------------------------


def _in_ball(free: np.ndarray, clip: float) -> np.ndarray:
    """Vectors of norm at most the clip from rows of any numbers."""
    norms = np.linalg.norm(free, axis=-1, keepdims=True)
    return clip * free / np.maximum(norms, 1.0)


def _contribution(gradient: np.ndarray, scale: float) -> np.ndarray:
    return np.concatenate([gradient, scale * gradient**2], axis=-1)


def _largest(moved, shape: tuple[int, ...], starts: int = 12) -> float:
    """The largest value of a function of free numbers, over local searches from random places."""
    rng, found = np.random.default_rng(0), 0.0
    for _ in range(starts):
        made = minimize(lambda free: -moved(free.reshape(shape)), 2 * rng.standard_normal(math.prod(shape)))
        found = max(found, -made.fun)
    return found


@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("relative", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("coordinates", [1, 3])
def test_a_record_more_moves_both_sums_as_far_as_is_said(coordinates, relative, clip):
    scale = relative / clip
    found = _largest(lambda free: np.linalg.norm(_contribution(_in_ball(free, clip), scale)), (coordinates,))
    assert found == pytest.approx(joint_sensitivity(clip, scale, "add_or_remove_one"), rel=1e-4)
    assert joint_sensitivity(clip, scale, "zero_out") == joint_sensitivity(clip, scale, "add_or_remove_one")


@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("relative", [0.3, 0.70, 0.72, 1.0, 3.0])
def test_a_replaced_record_moves_both_sums_as_far_as_is_said(relative, clip):
    scale = relative / clip

    def moved(free: np.ndarray) -> float:
        one, other = _contribution(_in_ball(free, clip), scale)
        return float(np.linalg.norm(one - other))

    found = _largest(moved, (2, 2), starts=30)
    assert found == pytest.approx(joint_sensitivity(clip, scale, "replace_one"), rel=1e-4)
    assert _largest(moved, (2, 1)) <= joint_sensitivity(clip, scale, "replace_one") * (1 + 1e-9)
    assert (scale <= free_scale(clip)) == (found <= 2 * clip * (1 + 1e-6))  # free, and nowhere else


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_correlated_noise_is_that_for_vectors_of_the_joint_norm(adjacency):
    """A record in steps 0 and 2 of 4, whose gradients there are chosen freely, before one strategy for both sums."""
    clip, scale, steps = 0.5, 3.0, [0, 2]
    strategy_TT = np.array([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0.4, 0.5, 1, 0], [0.3, 0.4, 0.5, 1]])
    pattern = Participation(max_participations=2, min_sep=2)
    of_strategy = gram_sensitivity(strategy_TT.T @ strategy_TT, pattern)

    def moved(free: np.ndarray) -> float:
        one, other = _contribution(_in_ball(free, clip), scale)
        changes = one if adjacency == "zero_out" else one - other
        return float(np.linalg.norm(strategy_TT[:, steps] @ changes))

    found = _largest(moved, (2, 2, 2), starts=20)
    assert found == pytest.approx(of_strategy * joint_sensitivity(clip, scale, adjacency), rel=1e-4)


# --- releases ---------------------------------------------------------------------------------------------------------


def _records(num_outputs: int, seed: int = 0) -> linear.Records:
    rng = np.random.default_rng(seed)
    x_NW = linear.with_bias(csr_matrix(random_array((NUM, FEATURES), density=0.5, rng=rng, format="csr")))
    scores_NK = x_NW @ rng.standard_normal((FEATURES + 1, num_outputs))
    scores_NK -= scores_NK.mean(axis=0)  # no class has most of them
    if num_outputs == 1:
        return linear.TwoClasses(x_NW, (scores_NK[:, 0] > 0).astype(int))
    return linear.ManyClasses(x_NW, scores_NK.argmax(axis=1))


def _task(num_outputs: int) -> words.Task:
    records = _records(num_outputs)
    return words.Task(records, records, records, batch=BATCH, num_steps=STEPS)


@pytest.fixture(autouse=True)
def few_records(monkeypatch):
    monkeypatch.setattr(words.words, "DELTA", 1e-3)


def _slow(records: linear.Records, rows: np.ndarray, weights_WK: np.ndarray, clip: float) -> tuple[np.ndarray, ...]:
    """Both sums, record by record, with gradients of autograd."""
    gradient_WK, squares_WK = np.zeros(weights_WK.shape), np.zeros(weights_WK.shape)
    for row in rows:
        weights = torch.tensor(weights_WK, requires_grad=True)
        logits = torch.tensor(records.x_NW[[row]].toarray()) @ weights
        label = torch.tensor([records.labels_N[row]])
        if weights_WK.shape[1] == 1:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], label.double())
        else:
            loss = torch.nn.functional.cross_entropy(logits, label)
        loss.backward()
        g = weights.grad.numpy()
        g = g * min(1.0, clip / np.linalg.norm(g))
        gradient_WK, squares_WK = gradient_WK + g, squares_WK + g**2
    return gradient_WK, squares_WK


@pytest.mark.parametrize("num_outputs", [1, CLASSES])
def test_what_is_released_is_that_of_a_slow_loop_with_the_noise_that_is_paid_for(num_outputs):
    """Releases minus a slow loop's sums, over the stddev that the privacy needs: about 1, in both parts.

    Of 25 seeds x 3 steps x 7 or 21 coordinates: 525 normals at least, whose stddev is off by 15 % once in 1e6.
    """
    task, clip, scale = _task(num_outputs), 0.3, 1.7
    plan, found = words.plan_of(task, 1.0), {"gradient": [], "squares": []}
    largest = _largest(lambda free: np.linalg.norm(_contribution(_in_ball(free, clip), scale / clip)), (3,))
    needed = plan.noise_multiplier * largest / BATCH
    rng = np.random.default_rng(1)
    for seed in range(25):
        weights_WK = rng.standard_normal((FEATURES + 1, num_outputs))
        keys = (KEYS[0], rng.bytes(32))
        releases = JointReleases(task.train, weights_WK, plan, clip=clip, scale=scale, keys=keys)
        assert releases.stddev == pytest.approx(needed, rel=1e-4), seed
        for step in range(1, 4):
            rows = plan.sampler.draw(KEYS[0], step)
            slow_WK, squares_WK = (total / BATCH for total in _slow(task.train, rows, weights_WK, clip))
            gradient_WK, moment_WK = releases()
            found["gradient"].append((gradient_WK - slow_WK) / needed)
            found["squares"].append((moment_WK - squares_WK) / (needed * clip / scale))
            weights_WK += 0.1
    for part, values in found.items():
        assert 0.85 < np.std(values) < 1.15 and abs(np.mean(values)) < 0.25, part
    assert releases.stddev_of_squares == pytest.approx(needed * clip / scale, rel=1e-4)


def test_without_noise_in_the_squares_the_gradient_pays_nothing():
    task, weights_WK = _task(1), np.zeros((FEATURES + 1, 1))
    plan = words.plan_of(task, 1.0)
    releases = JointReleases(task.train, weights_WK, plan, clip=0.3, scale=0.0, keys=KEYS, is_private=False)
    assert releases.stddev == pytest.approx(plan.noise_multiplier * 0.3 / BATCH)
    _, squares_WK = releases()
    np.testing.assert_allclose(
        squares_WK, _slow(task.train, plan.sampler.draw(KEYS[0], 1), weights_WK, 0.3)[1] / BATCH
    )


def test_the_update_is_that_of_adam_coordinate_by_coordinate():
    rng, floor, stddev = np.random.default_rng(2), 0.7, 0.4
    update = MomentAdam((4, 2), floor=floor, stddev_of_squares=stddev)
    means, squares = rng.standard_normal((5, 4, 2)), rng.standard_normal((5, 4, 2))
    for t in range(1, 6):
        got_WK = update(means[t - 1], squares[t - 1])
        first = dict.fromkeys(np.ndindex(4, 2), 0.0)
        second = dict(first)
        for i in first:
            of_steps = range(t)
            weight = sum(0.9 ** (t - 1 - s) for s in of_steps)
            first[i] = sum(0.9 ** (t - 1 - s) * means[s][i] for s in of_steps) / weight
            weight = sum(0.999 ** (t - 1 - s) for s in of_steps)
            second[i] = sum(0.999 ** (t - 1 - s) * squares[s][i] for s in of_steps) / weight
        least = stddev * averaged(t) / math.sqrt(8)
        root = math.sqrt(max(sum(second.values()) / 8, least))
        for i in first:
            want = (1 + floor) * first[i] / (math.sqrt(max(second[i], 0.0)) + floor * root)
            assert got_WK[i] == pytest.approx(want)


def test_the_stddev_of_an_average_is_that_of_its_weights():
    for t in (1, 7, 400):
        weights = 0.999 ** np.arange(t)
        assert averaged(t) == pytest.approx(np.linalg.norm(weights / weights.sum()))


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [1, CLASSES])
@pytest.mark.parametrize("method", words.METHODS)
def test_every_method_learns_without_much_noise(method, num_outputs):
    task = _task(num_outputs)
    _, _, floor, scale = words.METHODS[method].starts[0]
    run = words.Run("made up", method, 300.0, 0.3, 1.0, floor, scale, 0)
    results = words.train(lambda name: task, run)
    assert results == words.train(lambda name: task, run)  # seeds say all
    assert results["tuning"] > np.bincount(task.train.labels_N).max() / NUM + 0.2


def test_a_climb_begins_where_the_first_budget_s_ended_and_ends_at_the_top(tmp_path):
    asked = []

    def train(run):
        asked.append(run)
        values = (run.rate / 2, run.clip * 3, run.floor / 3, run.scale * 2 or 1.0)
        peak = -sum(abs(math.log(value)) for value in values) * (1 if run.epsilon == words.EPSILONS[0] else 0)
        return {"tuning": peak, "test": run.seed + (run.method == "JME")}

    runs = KeptRuns(tmp_path / "runs.jsonl", train, lambda run, line: "")
    best = words.tune(runs, "x", "JME", words.EPSILONS[0])
    assert (best.rate, best.clip, best.floor, best.scale) == pytest.approx((2.0, 1 / 3, 3.0, 0.5))
    asked.clear()
    assert words.tune(runs, "x", "JME", 8.0).rate == best.rate  # all alike there: it stays
    assert {run.epsilon for run in asked} == {8.0} and {run.seed for run in asked} == set(words.TUNING_SEEDS)
    rows = words.table(runs, [("x", 8.0)])
    assert [row.get("over_dp_adamw") for row in rows][3] == [100.0, 0.0]
    assert not set(words.TUNING_SEEDS) & set(range(words.NUM_SEEDS))


# --- what can be known ------------------------------------------------------------------------------------------------


def test_what_can_be_known_is_counted():
    moment, mean = np.array([4.0, 1.0, 0.1, 0.0]), np.array([1.0, 0.0, 0.0, -1.0])
    stddev = 2.0 * averaged(50) / 10
    made = limits.known(moment * stddev, mean, 1.0, batch=10, num_steps=50, noise_multiplier=2.0)
    assert (made.above, made.rho, made.ratio) == (0.25, 2.0, 10.0)
    assert made.of_energy == pytest.approx(4 / 5.1)
    assert made.on_paper == pytest.approx(10 / (4 * 2.0 * averaged(50)))


def test_sums_of_an_encoder_are_those_of_a_slow_loop():
    torch.manual_seed(0)
    model, x_BD, y_B = torch.nn.Linear(4, 3), torch.randn(12, 4), torch.arange(12) % 3
    engine = make_engine(model, make_clipping("flat", 0.5))

    def losses(rows: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x_BD[rows]), y_B[rows], reduction="none")

    got = limits.sums_of(engine, losses, np.split(np.arange(12), 3))
    assert [name for total in got for name in total] == 2 * list(engine.parameters)
    want = [np.zeros(15), np.zeros(15)]
    for row in range(12):
        parts = torch.autograd.grad(losses(np.array([row])).sum(), list(engine.parameters.values()))
        g = torch.cat([part.flatten() for part in parts]).double().numpy()
        g *= min(1.0, 0.5 / np.linalg.norm(g))
        want = [want[0] + g, want[1] + g**2]
    for total, flat in zip(got, want, strict=True):
        np.testing.assert_allclose(np.concatenate(list(total.values())), flat, rtol=1e-4, atol=1e-6)
