"""The clipping norm that follows a quantile: what it costs, where it ends, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from hf_dpopt import DPConfigError, PrivacyConfig, PrivateRun, make_plan, private_step
from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.clipped_sum import COUNT
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.units import Units
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.preclip.quantile import FARTHEST
from tests.helpers import tiny

ALPHA = 1e-6  # false-alarm probability of each random test


def _config(**changes):
    options = {"preconditioner": "quantile", "preconditioner_kwargs": {}, "noise_multiplier": 1.0}
    return PrivacyConfig(**{"expected_batch_size": 50, "sampling": "poisson", **options, **changes})


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("z", [0.4, 1.0, 2.5])
def test_gradient_and_count_together_are_one_gaussian_of_the_planned_noise(z, adjacency):
    """The two parts have precisions that add up: z^-2 = z_Delta^-2 + (2 sigma_b)^-2, Theorem 1 of arXiv:1905.03871."""
    plan = make_plan(
        _config(noise_multiplier=z, expected_batch_size=80, clipping_norm=0.3, adjacency=adjacency),
        num_examples=500,
        num_steps=3,
    )
    plain = make_plan(
        _config(noise_multiplier=z, expected_batch_size=80, preconditioner="none", adjacency=adjacency),
        num_examples=500,
        num_steps=3,
    )
    assert plan.epsilon() == plain.epsilon()
    moves = 1.0 if adjacency == "add_or_remove_one" else 2.0  # of the gradients in clips, of the count in halves
    noise = z * plan.sensitivity  # of every coordinate
    z_gradient, sigma_b = noise / 0.3, 0.05 * 80
    weight = noise / sigma_b
    joint = math.hypot(moves * 0.3, moves * weight / 2)
    assert noise / joint == pytest.approx(z) and plan.sensitivity == pytest.approx(joint)
    precision = (moves / z_gradient) ** 2 + (moves / (2 * sigma_b)) ** 2
    assert precision == pytest.approx(z**-2)


@pytest.mark.parametrize("units", [None, (2, 1, 3, 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_more_moves_the_whole_sum_by_the_sensitivity_at_most(engine, units):
    model, batch = tiny.model(dropout=0.0), tiny.collate(tiny.records(8))
    plan = make_plan(_config(clipping_norm=0.5), num_examples=500, num_steps=3)
    weight = plan.noise_multiplier * plan.sensitivity / (0.05 * 50)
    from hf_dpopt.records.losses import RecordLosses

    losses, sizes = RecordLosses(model), units or (1,) * 8

    def whole(keep):
        rows = [r for u, r in zip(np.repeat(range(len(sizes)), sizes), range(8), strict=True) if u in keep]
        made = make_engine(model, plan.clipper, engine)
        sums = made.empty_sum(Scale({}, 2.0, count_weight=weight))
        some = {k: v[rows] for k, v in batch.items()}
        made.add_clipped_sum(sums, lambda: losses(some), len(rows), Units([sizes[u] for u in keep]))
        return sums.result()

    everyone = list(range(len(sizes)))
    total, moved = whole(everyone), []
    for left_out in everyone:
        rest = whole([u for u in everyone if u != left_out])
        assert abs(total[COUNT] - rest[COUNT]).item() == pytest.approx(weight / 2, rel=1e-5)
        moved.append(math.sqrt(sum((total[n].double() - rest[n].double()).square().sum().item() for n in total)))
    assert 0.9 * plan.sensitivity < max(moved) <= plan.sensitivity * (1 + 1e-5)


def _run(tmp_path, noise_multiplier, num_steps, **options):
    """Linear regression on records of norms 1 .. 400 in steps of 1: clip norms are read off the weights of the count."""
    x = torch.zeros(400, 1)
    norms = torch.arange(1, 401).float()
    config = _config(
        noise_multiplier=noise_multiplier, expected_batch_size=200, clipping_norm=5.0, preconditioner_kwargs=options
    )
    plan = make_plan(config, num_examples=400, num_steps=num_steps)
    model = torch.nn.Linear(1, 1)  # the gradient of the bias is the factor of the loss
    engine = make_engine(model, plan.clipper)
    run = PrivateRun(plan, output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")
    preclip = run.start_preclip(engine)
    clips = []
    for step in range(1, num_steps + 1):
        rows = torch.tensor(run.draw(step))
        batch = {"x": x[rows], "labels": norms[rows]}
        losses = lambda b: model(b["x"]).squeeze(1) * b["labels"]  # noqa: E731
        private_step(engine, losses, [batch], run=run, step=step)
        clips.append(5.0 * preclip.ratio)
    return clips, model


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_it_ends_at_the_quantile(tmp_path, quantile):
    clips, _ = _run(tmp_path, 0.5, 200, quantile=quantile, learning_rate=0.2)
    assert np.mean(clips[-60:]) == pytest.approx(400 * quantile, rel=0.1)


def test_the_share_has_the_noise_that_was_asked_for(tmp_path):
    clips, _ = _run(tmp_path, 1.0, 300, quantile=0.5, learning_rate=1e-9, count_noise=0.08)
    shares = 0.5 - np.diff(np.log([5.0, *clips])) / 1e-9
    # 200 records of which 5 of 400 are within the clip: a binomial share around 0.0125, and the batch is not 200
    sampling = np.sqrt(400 * 0.25) * 0.5 / 200  # sum of (within - 1/2): all but few are -1/2
    low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], 299) / 299
    assert low < np.var(shares, ddof=1) / (0.08**2 + sampling**2) < high * 1.02


REFUSED = {
    "noise that starts anew in every step": (
        dict(noise_mechanism="blt", sampling="fixed_order", noise_at_changes="restart"),
        "Use noise_at_changes='carry_on', or noise_mechanism='gaussian'",
    ),
    "layers": (dict(clipping="per_layer"), "Use clipping='flat'"),
    "automatic": (dict(clipping="automatic"), "Use clipping='flat'"),
    "a count that costs more than all": (dict(noise_multiplier=6.0), "Use more than 0.06"),
    "a quantile of 1": (dict(preconditioner_kwargs={"quantile": 1.0}), "outside \\(0, 1\\)"),
    "no noise for the count": (dict(preconditioner_kwargs={"count_noise": 0.0}), "count_noise"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(DPConfigError, match=message):
        make_plan(_config(**changes), num_examples=500, num_steps=3)


def test_a_rate_that_is_far_too_large_ends_at_the_bounds():
    spec = make_plan(_config(preconditioner_kwargs={"learning_rate": 5000.0}), num_examples=500, num_steps=3).preclip
    clipping = spec.start(tiny.model().state_dict(), clipping_norm=1.0, noise=IndependentNoise(0.1))
    for share, end in ((-0.5, FARTHEST), (0.5, 1 / FARTHEST), (-0.5, FARTHEST)):
        clipping.receive({"w": torch.ones(2), COUNT: torch.tensor(share * clipping._weight)})
        assert clipping.ratio == pytest.approx(end)


@pytest.mark.slow
def test_users_who_diverge_locally_are_not_counted(tmp_path):
    """As short moves they would pull the clipping norm down."""
    trainer = tiny.trainer(
        tmp_path / "out", model=tiny.model(dropout=0.0), preconditioner="quantile", privacy_unit="user",
        user_id_column="author", expected_batch_size=20, noise_multiplier=0.0, max_steps=8, learning_rate=0.0,
        train_dataset=[{**r, "author": i % 20} for i, r in enumerate(tiny.records(64))],
        local_training={"learning_rate": 1e12}, sampling="poisson",
    )  # fmt: skip
    trainer.train()
    assert trainer._session.stages.preclip.ratio == pytest.approx(
        1.0
    )  # a share of one half, which is what is asked for
