"""The exact simulation of private linear models of sparse records, against the engines of the package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, random_array

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.squared_sum import COLUMNS, ROWS, SquaredSum
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.preclip import DelayedPreconditioner, Identity, OneQuery, PublicPreconditioner
from recipes.paper import linear
from recipes.paper.runs import ascend, interval

NUM, WORDS, CLASSES, CLIP = 60, 7, 5, 0.3


def _layer(weights_WK: np.ndarray) -> torch.nn.Linear:
    """The same model; its weights are (K, W)."""
    layer = torch.nn.Linear(*weights_WK.shape, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights_WK.T))
    return layer


def _records(num_outputs: int, seed: int) -> linear.Records:
    rng = np.random.default_rng(seed)
    x_NW = linear.with_bias(csr_matrix(random_array((NUM, WORDS), density=0.4, rng=rng, format="csr")), 0.3)
    if num_outputs == 1:
        return linear.TwoClasses(x_NW, rng.integers(2, size=NUM))
    return linear.ManyClasses(x_NW, rng.integers(num_outputs, size=NUM))


def _losses(model: torch.nn.Module, records: linear.Records) -> torch.Tensor:
    logits_NK = model(torch.tensor(records.x_NW.toarray()))
    labels = torch.tensor(records.labels_N)
    if logits_NK.size(1) == 1:
        losses = torch.nn.functional.binary_cross_entropy_with_logits
        return losses(logits_NK[:, 0], labels.double(), reduction="none")
    return torch.nn.functional.cross_entropy(logits_NK, labels, reduction="none")


def _engine(weights_WK: np.ndarray, clip: float):
    model = _layer(weights_WK)
    return model, make_engine(model, make_clipping("flat", clip))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", ["none", "of a feature", "of a coordinate", "factored"])
@pytest.mark.parametrize("num_outputs", [1, CLASSES])
def test_clipped_sums_are_those_of_the_engine(num_outputs, scale, seed):
    records, rng = _records(num_outputs, seed), np.random.default_rng(seed + 100)
    shape = (WORDS + 1, num_outputs)
    weights_WK = rng.standard_normal(shape)
    rows_W, columns_K = np.exp(rng.standard_normal(shape[0])), np.exp(rng.standard_normal(shape[1]))
    inverse_WK = {
        "none": None,
        "of a feature": np.outer(rows_W, np.ones(shape[1])),
        "of a coordinate": np.exp(rng.standard_normal(shape)),
        "factored": np.outer(rows_W, columns_K),
    }[scale]
    clip = float(np.median(linear.norms(records, records.residuals(weights_WK), inverse_WK)))
    model, engine = _engine(weights_WK, clip)
    part = None if inverse_WK is None else Diagonal(torch.tensor(inverse_WK.T.copy()))
    if scale == "factored":
        part = Factored(torch.tensor(columns_K), torch.tensor(rows_W))
    sums = engine.empty_sum(None if part is None else Scale({"weight": part}))
    engine.add_clipped_sum(sums, lambda: _losses(model, records), NUM)
    got_WK = linear.clipped_sum(records, weights_WK, inverse_WK, clip)  # half of the records are clipped
    np.testing.assert_allclose(got_WK, sums.result()["weight"].T.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("num_outputs", [1, CLASSES])
def test_squared_sums_are_those_of_the_engine(num_outputs, by_rows):
    records, rng = _records(num_outputs, 3), np.random.default_rng(4)
    weights_WK = rng.standard_normal((WORDS + 1, num_outputs))
    model, engine = _engine(weights_WK, CLIP)
    sums = SquaredSum(engine.parameters, by_rows=by_rows)
    engine.add_clipped_sum(sums, lambda: _losses(model, records), NUM)
    want, got = sums.result(), linear.squared_sum(records, weights_WK, CLIP, by_rows=by_rows)
    if by_rows:  # the layer has its outputs in rows, the simulation in columns
        np.testing.assert_allclose(got["w" + ROWS], want["weight" + COLUMNS].numpy(), rtol=1e-5)
        np.testing.assert_allclose(got["w" + COLUMNS], want["weight" + ROWS].numpy(), rtol=1e-5)
    else:
        np.testing.assert_allclose(got["w"], want["weight"].T.numpy(), rtol=1e-5)


@pytest.mark.parametrize("num_outputs", [1, CLASSES])
def test_the_gradient_is_that_of_autograd(num_outputs):
    records = _records(num_outputs, 5)
    weights_WK = np.random.default_rng(6).standard_normal((WORDS + 1, num_outputs))
    model = _layer(weights_WK)
    _losses(model, records).mean().backward()
    np.testing.assert_allclose(records.gradient(weights_WK), model.weight.grad.T.numpy(), rtol=1e-10)


# --- a run -----------------------------------------------------------------------------------------------------------


def _gradients(spec, *, sigma: float, seed: int, weights_WK: np.ndarray, records, num_steps: int = 6, batch: int = 20):
    config = PrivacyConfig(noise_multiplier=sigma, target_delta=1e-3, expected_batch_size=batch, sampling="poisson")
    plan = make_plan(config, num_examples=NUM, num_steps=num_steps, preclip=spec)
    public = linear.PublicMean(records, weights_WK)

    def start(level: MechanismLevel):
        return spec.start({"w": torch.zeros(weights_WK.shape)}, clipping_norm=CLIP, noise=level, public=public)

    rng = np.random.default_rng(seed)
    keys = rng.bytes(32), rng.bytes(32)
    made = linear.PrivateGradients(records, weights_WK, plan, clip=CLIP, keys=keys, start=start)
    return made, plan, keys[0]


def test_the_noise_of_a_step_is_that_of_the_plan():
    """Releases minus the clipped means, over the claimed stddev: 6 * 8 * 5 * 40 normals, stddev off by 5 % is 7 sigma.

    False alarms: below 1e-5, whatever the seed (the relative stddev of the estimate is 0.7 %).
    """
    found, weights_WK = [], np.zeros((WORDS + 1, CLASSES))
    for seed in range(40):
        records = _records(CLASSES, seed)
        gradients, plan, key = _gradients(Identity(), sigma=1.5, seed=seed, weights_WK=weights_WK, records=records)
        for step in range(1, 7):
            batch = records[plan.sampler.draw(key, step)]
            clean_WK = linear.clipped_sum(batch, weights_WK, None, CLIP) / 20
            found.append((gradients() - clean_WK) / (1.5 * CLIP / 20))
    assert 0.95 < np.std(found) < 1.05


def test_dp2_divides_by_what_it_released():
    """Without noise to speak of, the second phase is that of D made by hand from the first."""
    records, weights_WK = _records(CLASSES, 7), np.zeros((WORDS + 1, CLASSES))
    spec = DelayedPreconditioner(delay=2, eps=1e-3, clipping_norm=5 * CLIP, learning_rate_ratio=0.5)
    gradients, plan, key = _gradients(spec, sigma=1e-4, seed=8, weights_WK=weights_WK, records=records)
    first = [gradients() for _ in range(2)]
    inverse_WK = 1 / (np.sqrt(0.1 * np.mean(first, axis=0) ** 2) + 1e-3)
    batch = records[plan.sampler.draw(key, 3)]
    want_WK = 0.5 * linear.clipped_sum(batch, weights_WK, inverse_WK, 5 * CLIP) / 20
    np.testing.assert_allclose(gradients(), want_WK, atol=1e-3)
    assert np.abs(want_WK).max() > 0.02


def test_adadps_divides_by_public_gradients():
    records, weights_WK = _records(CLASSES, 9), np.zeros((WORDS + 1, CLASSES))
    gradients, plan, key = _gradients(
        PublicPreconditioner(eps=1e-2), sigma=1e-4, seed=10, weights_WK=weights_WK, records=records
    )
    inverse_WK = 1 / (np.sqrt(0.1 * records.gradient(weights_WK) ** 2) + 1e-2)
    batch = records[plan.sampler.draw(key, 1)]
    want_WK = linear.clipped_sum(batch, weights_WK, inverse_WK, CLIP) / 20
    np.testing.assert_allclose(gradients(), want_WK, atol=1e-4)


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_answer_to_the_opening_query_has_the_noise_that_is_paid_for(by_rows):
    """Noise over its claimed stddev, of 400 answers: off by 10 % is 5 sigma and more; false alarms below 1e-5."""
    records, weights_WK = _records(CLASSES, 11), np.zeros((WORDS + 1, CLASSES))
    spec, rng = OneQuery(query_noise=3.0, by_rows=by_rows), np.random.default_rng()
    clean = linear.squared_sum(records, weights_WK, CLIP, by_rows=by_rows)
    found = []
    for _ in range(400):
        answer = linear.opening_answer(spec, records, weights_WK, CLIP, rng)
        found += [(answer[name].numpy() * NUM - clean[name]).flatten() for name in clean]
    stddev = spec.query_noise * spec.opening.sensitivity(CLIP)
    assert 0.9 < np.std(np.concatenate(found)) / stddev < 1.1


# --- search and statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_climb_in_many_values_ends_at_the_top_and_asks_each_place_once(is_eager):
    tried = []

    def score(a: float, b: float, c: float) -> float:
        tried.append((a, b, c))
        return -abs(np.log2(a / 16)) - abs(np.log(b * 9) / np.log(3)) - abs(np.log10(c))

    moves = [tuple(sign * (i == j) for j in range(3)) for i in range(3) for sign in (1, -1)]
    best, values = ascend(score, (1.0, 1.0, 100.0), (2.0, 3.0, 10.0), moves, is_eager=is_eager)
    assert best == pytest.approx(0.0) and values == pytest.approx((16.0, 1 / 9, 1.0))
    assert len(tried) == len(set(tried))
    around = [tuple(v * f**i for v, f, i in zip(values, (2, 3, 10), move, strict=True)) for move in moves]
    assert all(any(np.allclose(place, seen) for seen in tried) for place in around)  # neighbours were all asked


def test_an_interval_is_student_s():
    mean, half = interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3.0 and half == pytest.approx(2.776 * np.sqrt(2.5 / 5), rel=1e-3)
