"""What a unit adds to the numbers of a step: by brute force, with engines, users and losses of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.measures import MEASURES, Measures
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.units import Units
from hf_dpopt.plan.private_metrics import PrivateMetrics
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.metrics import quantile_of
from hf_dpopt.users.user_batches import UserInParts, UsersBatch
from tests.helpers import tiny

BOUND = {"loss_bound": 1.5}


def _measures(**changes):
    values = dict(loss_weight=0.3, norm_weight=0.4, loss_bound=1.5, centre=0.5, thresholds=(0.5, 1.0, 2.0))
    return Measures(**{**values, "clipping_norm": 0.7, **changes})


def _plan(**changes):
    values = dict(noise_multiplier=1.0, expected_batch_size=50, sampling="poisson", log_private_metrics=0.02)
    config = PrivacyConfig(**{**values, "private_metrics_kwargs": BOUND, **changes})
    return make_plan(config, num_examples=500, num_steps=3)


def _one(measures, loss, norm):
    """What a unit adds, written out: no tensor, no histogram function."""
    loss = measures.loss_bound if not math.isfinite(loss) and not loss == -math.inf else loss
    loss = min(max(loss, 0.0), measures.loss_bound)
    coordinate = (
        measures.loss_weight * (loss - measures.centre) / max(measures.centre, measures.loss_bound - measures.centre)
    )
    ratio = norm / measures.clipping_norm if math.isfinite(norm) else math.inf
    place = sum(ratio > end for end in measures.thresholds)
    if norm**2 == 0:  # without gradient
        return [0.0] * (len(measures.thresholds) + 2)
    return [coordinate, *(measures.norm_weight * (i == place) for i in range(len(measures.thresholds) + 1))]


WILD = [math.nan, math.inf, -math.inf, -3.0, 0.0, 0.5, 1.5, 7.0, 1e300]


@pytest.mark.parametrize("centre", [0.0, 0.5, 1.5])
def test_units_add_what_is_written_out_and_never_more_than_the_norm(centre):
    measures = _measures(centre=centre)
    norms = [0.0, 0.35, 0.36, 0.7, 0.71, 5.0, math.inf, math.nan, 1e-300]
    losses, squares = torch.tensor(WILD, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64).square()
    total = measures.total_of(losses, {"all": squares})
    expected = np.sum([_one(measures, *unit) for unit in zip(WILD, norms, strict=True)], axis=0)
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-12, atol=1e-12)
    for unit in range(len(WILD)):
        alone = measures.total_of(losses[unit : unit + 1], {"all": squares[unit : unit + 1]})
        assert alone.isfinite().all() and alone.norm() <= measures.norm * (1 + 1e-12)
    assert measures.nothing().shape == total.shape


@pytest.mark.parametrize("engine", ENGINES)
def test_a_record_without_gradient_adds_nothing_to_the_numbers(engine):
    """Under zero_out it stands in for another one, which then moves them by the norm and no further."""
    model, batch, measures = tiny.model(dropout=0.0), tiny.collate(tiny.records(3)), _measures()
    losses, made = RecordLosses(model), make_engine(model, _plan(clipping_norm=0.7).clipper, engine)
    found = []
    for rows in ([0, 1, 2], [0, 2]):
        some, sums = {k: v[rows] for k, v in batch.items()}, made.empty_sum()
        some["labels"] = torch.where(torch.tensor(rows) == 1, -100, some["labels"])
        sums.take_measures(measures)
        made.add_clipped_sum(sums, lambda some=some: losses(some), len(rows))
        found.append(sums.result()[MEASURES])
    torch.testing.assert_close(found[0], found[1])
    assert found[0].norm() > 0


@pytest.mark.parametrize("units", [None, (2, 1, 3, 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_one_unit_out_moves_all_that_is_summed_by_the_sensitivity_at_most(engine, units):
    """Gradient and numbers together; one record has a loss that is no number, its gradient is dropped."""
    model, batch = tiny.model(dropout=0.0), tiny.collate(tiny.records(8))
    plan = _plan(clipping_norm=0.5, log_private_metrics=0.4)
    measures = plan.private_metrics.measures(plan.sensitivity, 0.5, 0.4)
    losses, sizes = RecordLosses(model), units or (1,) * 8
    assert plan.sensitivity == pytest.approx(math.hypot(0.5, measures.norm))

    def whole(keep):
        rows = [r for u, r in zip(np.repeat(range(len(sizes)), sizes), range(8), strict=True) if u in keep]
        made = make_engine(model, plan.clipper, engine)
        sums = made.empty_sum(Scale({}, 2.0))
        sums.take_measures(measures)
        some = {k: v[rows] for k, v in batch.items()}
        wild = torch.tensor([torch.nan if row == 3 else 1.0 for row in rows])
        made.add_clipped_sum(sums, lambda: losses(some) * wild, len(rows), Units([sizes[u] for u in keep]))
        return sums.result()

    everyone = list(range(len(sizes)))
    total, moved = whole(everyone), []
    for left_out in everyone:
        rest = whole([u for u in everyone if u != left_out])
        assert (total[MEASURES] - rest[MEASURES]).norm() <= measures.norm * (1 + 1e-5)
        assert (total[MEASURES][1:] - rest[MEASURES][1:]).sum() == pytest.approx(measures.norm_weight, rel=1e-4)
        moved.append(math.sqrt(sum((total[n].double() - rest[n].double()).square().sum().item() for n in total)))
    assert 0.9 * plan.sensitivity < max(moved) <= plan.sensitivity * (1 + 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_norms_are_those_of_single_records(engine):
    """Against one plain backward per record; what is counted is the norm before the clip, once."""
    model, batch = tiny.model(dropout=0.0), tiny.collate(tiny.records(6))
    losses, measures = RecordLosses(model), _measures(thresholds=tuple(np.geomspace(0.1, 50, 30)))
    made = make_engine(model, _plan(clipping_norm=0.7).clipper, engine)
    sums = made.empty_sum()
    sums.take_measures(measures)
    for part in (slice(0, 4), slice(4, 6)):  # physical batches
        some = {k: v[part] for k, v in batch.items()}
        made.add_clipped_sum(sums, lambda some=some: losses(some), len(some["labels"]))
    expected = []
    for b in range(6):
        model.zero_grad()
        loss = losses({k: v[b : b + 1] for k, v in batch.items()}).sum()
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        expected.append(_one(measures, loss.item(), norm))
    np.testing.assert_allclose(sums.result()[MEASURES].numpy(), np.sum(expected, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [1 / 16, None])
def test_the_loss_of_a_user_is_the_mean_of_its_rows_also_in_parts(weight):
    model, batch = tiny.model(dropout=0.0), tiny.collate(tiny.records(5))
    losses, sizes, measures = RecordLosses(model), (2, 3), _measures()
    made = make_engine(model, _plan(clipping_norm=0.7).clipper)
    weights_B = torch.tensor([weight or 1 / 2] * 2 + [weight or 1 / 3] * 3, dtype=torch.float64)
    together, apart = made.empty_sum(), made.empty_sum()
    for sums in (together, apart):
        sums.take_measures(measures)
    users = UsersBatch(batch, sizes, weights_B)
    users.add_to(together, made, losses)
    for user in users.apart():
        rows = [{k: v[r : r + 1] for k, v in user.batches[0].items()} for r in range(len(user.batches[0]["labels"]))]
        UserInParts(rows, user.weight).add_to(apart, made, losses)
    losses_B = losses(batch).detach()
    expected = sum(_one(measures, float(some.mean()), 1.0)[0] for some in losses_B.split(sizes))
    assert together.result()[MEASURES][0].item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(together.result()[MEASURES], apart.result()[MEASURES], rtol=1e-4, atol=1e-5)


def test_a_batch_that_stands_in_adds_nothing():
    model, batch = tiny.model(dropout=0.0), tiny.collate(tiny.records(3))
    losses, made = RecordLosses(model), make_engine(model, _plan().clipper)
    sums = made.empty_sum()
    sums.take_measures(_measures())
    with made.leaving_out():
        made.add_clipped_sum(sums, lambda: losses(batch), 3)
    assert not sums.result()[MEASURES].any()


# --- what they cost ---


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_epsilon_stays_and_the_noise_of_the_gradient_grows_by_what_is_said(share, adjacency):
    sampling = {"sampling": "fixed_order"} if adjacency == "zero_out" else {}
    with_them = _plan(log_private_metrics=share, adjacency=adjacency, **sampling)
    without = _plan(log_private_metrics=None, private_metrics_kwargs={}, adjacency=adjacency, **sampling)
    assert with_them.epsilon() == without.epsilon() and with_them.event == without.event
    assert with_them.sensitivity == pytest.approx(without.sensitivity / math.sqrt(1 - share))
    factor = 2 if adjacency == "replace_one" else 1
    measures = with_them.private_metrics.measures(with_them.sensitivity / factor, 1.0, 0.3)
    # precisions of independent noise add up, in squared sensitivities over squared noise
    noise = with_them.noise_multiplier * with_them.sensitivity
    together = (without.sensitivity / noise) ** 2 + (factor * measures.norm / noise) ** 2
    assert together == pytest.approx(with_them.noise_multiplier**-2)
    assert (factor * measures.norm / noise) ** 2 == pytest.approx(share * together)


def test_a_quantile_and_two_queries_have_their_share_beside_the_numbers():
    by_quantile = {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 0.05}}
    plan = _plan(**by_quantile)
    of_count = (plan.noise_multiplier * plan.sensitivity / (0.05 * 50) / 2 / plan.sensitivity) ** 2
    assert plan.sensitivity**2 == pytest.approx(1 / (1 - of_count - 0.02))
    two = _plan(preconditioner="dp2_rmsprop", preconditioner_kwargs={"delay": 1, "variant": "extra_query"})
    assert two.sensitivity**2 == pytest.approx(2 / (1 - 0.02))
    with pytest.raises(DPConfigError, match="take the whole budget"):
        _plan(**by_quantile, noise_multiplier=4.0, log_private_metrics=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_private_metrics": 0.0}, "log_private_metrics=0.0 is outside"),
        ({"log_private_metrics": 1}, "log_private_metrics=1 is outside"),
        ({"log_private_metrics": math.nan}, "log_private_metrics=nan"),
        ({"log_private_metrics": None}, "there are none. Add --log_private_metrics 0.02"),
        ({"private_metrics_kwargs": {}}, "no bound on the loss of a unit. Declare one"),
        ({"private_metrics_kwargs": {"loss_bound": 0}}, "loss_bound"),
        ({"private_metrics_kwargs": {**BOUND, "window": 3}}, "does not know window. It knows: loss_bound"),
        (
            {"private_metrics_kwargs": {**BOUND, "loss_share": 1.0}},
            "loss_share of private_metrics_kwargs=1.0 is outside",
        ),
        ({"private_metrics_kwargs": {**BOUND, "norm_thresholds": [2, 1]}}, "no increasing numbers > 0"),
        ({"private_metrics_kwargs": {**BOUND, "norm_thresholds": []}}, "no increasing numbers > 0"),
        ({"private_metrics_kwargs": {**BOUND, "norm_thresholds": ["a"]}}, "norm_thresholds"),
        (
            {"privacy_unit": "user", "records_per_user": 2, "local_training": {"learning_rate": 0.1}},
            "no loss to sum where users train",
        ),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(DPConfigError, match=message):
        _plan(**changes)


def test_quantiles_of_counts_without_noise_are_those_of_the_lengths():
    generator = np.random.default_rng(0)
    lengths, ends = generator.lognormal(0, 1.5, 20_000), tuple(np.geomspace(1 / 64, 64, 60))
    counts = np.histogram(lengths, [0, *ends, np.inf])[0].astype(float)
    for share in (0.1, 0.5, 0.9):
        assert quantile_of(counts.tolist(), ends, share) == pytest.approx(np.quantile(lengths, share), rel=0.03)
    assert quantile_of([5.0, 0.0, 0.0], (1.0, 2.0), 0.9) == pytest.approx(1.0, rel=0.1)
    assert quantile_of([-5.0, -1.0, 3.0], (1.0, 2.0), 1.0) == 4.0


def test_parameters_give_the_same_numbers_again():
    spec = PrivateMetrics(share=0.02, loss_bound=2.0, norm_thresholds=[1, 2])
    options = spec.parameters()
    assert PrivateMetrics.of(options.pop("share"), options) == spec
