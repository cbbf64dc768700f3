"""The private run of a head: constants, noise, contraction, resume, what is written."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex import HeadRun, clip_features, head_training, make_head_plan, recorded_head_plan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from tests.adversary import forging
from tests.convex.heads import H, K, N, begin, clipped, data, run
from tests.convex.heads import plain as config
from tests.verify.forging import Folder

ALPHA = 1e-6  # false alarms, whatever the key


@pytest.fixture(scope="module", autouse=True)
def planned_before():
    """The epsilon of the usual run, which is remembered: seconds that belong to no single test."""
    make_head_plan(config(), num_examples=N)


def left(private: Path) -> list[str]:
    """Names of the files of the private folder, but for the log of the run and its lock."""
    return sorted(p.name for p in private.rglob("*") if p.is_file() and p.name not in ("log.jsonl", "lock"))


# --- the constants of softmax regression ---


def test_no_gradient_is_longer_than_stated_and_one_comes_close():
    asked = config(has_bias=False)
    features = clip_features(data(2000)[0] * 10, asked.feature_norm)
    weights = torch.zeros(K, H, dtype=torch.float64)
    longest = 0.0
    for scale in (0.0, 1.0, 30.0):
        weights = scale * torch.randn(K, H, dtype=torch.float64)
        for i in range(200):
            for label in range(K):
                one = head_training.gradient_sum(features[i : i + 1], torch.tensor([label]), weights)
                longest = max(longest, float(one.norm()))
    assert 0.999 * asked.lipschitz < longest <= asked.lipschitz * (1 + 1e-6)


def test_no_curvature_is_larger_than_stated_and_one_comes_close():
    asked = config(has_bias=False)
    largest = 0.0
    for i in range(30):
        feature = clip_features(torch.randn(1, H) * 10, asked.feature_norm).double()
        weights = (
            torch.zeros(K, H).double() if i else torch.tensor([[1.0], [1.0], [-9.0]]) * feature
        )  # p = 1/2, 1/2, 0

        def loss(flat, feature=feature):
            return torch.nn.functional.cross_entropy(feature @ flat.view(K, H).T, torch.tensor([0]))

        hessian = torch.autograd.functional.hessian(loss, weights.flatten())
        largest = max(largest, float(torch.linalg.eigvalsh(hessian)[-1]))
    assert 0.99 * asked.smoothness < largest <= asked.smoothness * (1 + 1e-9)


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_a_step_is_a_contraction_up_to_the_largest_batch(l2):
    """On a batch of as many records as are allowed, all alike, where the curvature is largest."""
    asked = config(l2=l2, has_bias=False)
    plan = make_head_plan(asked, num_examples=N)
    feature = clip_features(torch.ones(1, H) * 10, asked.feature_norm).double()
    labels = torch.zeros(plan.sgd.largest_batch, dtype=torch.int64)
    features = feature.expand(len(labels), H)

    def step(weights):
        total = head_training.gradient_sum(features, labels, weights)
        return weights - asked.step_size * (total / asked.expected_batch_size + l2 * weights)

    # where two labels are equally likely the curvature is largest, along their difference
    level = torch.tensor([[1.0], [1.0], [-9.0]]).double() * feature.double()
    along = torch.tensor([[1.0], [-1.0], [0.0]]).double() * feature.double()
    for direction in (along, torch.randn(K, H).double()):
        small = 1e-3 * direction / direction.norm()
        before, after = float((2 * small).norm()), float((step(level + small) - step(level - small)).norm())
        assert after <= before * (1 - asked.step_size * l2) * (1 + 1e-4)
    more = plan.sgd.largest_batch * 11 // 10
    features, labels = feature.expand(more, H), torch.zeros(more, dtype=torch.int64)
    small = 1e-3 * along / along.norm()
    assert float((step(level + small) - step(level - small)).norm()) > 2 * float(small.norm())  # and not beyond


# --- the run ---


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"l2": 0.1},
        {"decay": 0.5},
        {"has_bias": False},
        {"noise_multiplier": 0.0},
        {"head_radius": None, "l2": 0.1},
    ],
)
def test_a_run_equals_a_slow_loop(tmp_path, keys, changes):
    asked = config(**{"head_radius": 0.5, **changes})
    made, weights = run(tmp_path, asked)
    features, labels = clipped(asked)
    features = features.double()
    source = ChaCha20Gaussian(keys[0].noise_key)
    slow = torch.zeros(K, features.size(1), dtype=torch.float64)
    for step in range(1, 41):
        gradient = torch.zeros_like(slow)
        for i in made.plan.sampler.draw(keys[0].sampling_key, step):
            here = slow.clone().requires_grad_()
            torch.nn.functional.cross_entropy((here @ features[i])[None], labels[i : i + 1]).backward()
            gradient += here.grad
        noise = source.normal(slow.shape, step=step, tensor=0).double()
        gradient += asked.noise_multiplier * math.sqrt(2) * 2.0 * noise
        slow -= asked.step_size * step**-asked.decay * (gradient / 60 + asked.l2 * slow)
        slow *= min(1.0, (asked.head_radius or math.inf) / float(slow.norm()))
    torch.testing.assert_close(weights.double(), slow, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_noise_has_the_stated_law(tmp_path):
    """Features of nothing but noise, a ball out of reach: final weights are a sum of normals. Power: 5 % of stddev."""
    asked = config(head_radius=1e9, num_steps=5, noise_multiplier=0.7, has_bias=False)
    features = torch.zeros(N, 2000)
    _, weights = run(tmp_path, asked, private=(features, data()[1]))
    stddev = asked.step_size * 0.7 * asked.lipschitz / asked.expected_batch_size * math.sqrt(5)
    low, high = stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=weights.numel())
    assert low < float((weights.double() / stddev).square().sum()) < high


def test_weights_stay_in_the_ball(tmp_path):
    _, weights = run(tmp_path, config(head_radius=0.1, noise_multiplier=20.0))
    assert float(weights.norm()) == pytest.approx(0.1, rel=1e-5)


def test_a_record_more_moves_a_step_by_its_bound_at_most():
    """With the same other records and noise, from any weights: eta L / b before the projection, which contracts."""
    asked = config()
    features, labels = clipped(asked)
    for seed in range(20):
        torch.manual_seed(seed)
        weights = torch.randn(K, H + 1, dtype=torch.float64) * 3
        ends = [
            head_training.projected(
                weights - asked.step_size * head_training.gradient_sum(features[:m], labels[:m], weights) / 60, 1.5
            )
            for m in (50, 51)
        ]
        assert float((ends[0] - ends[1]).norm()) <= asked.step_size * asked.lipschitz / 60 * (1 + 1e-6)


def test_a_copy_that_shares_the_key_does_not_train_at_the_same_time(tmp_path, monkeypatch):
    """It would go on from the same state with the same noise, for other labels."""
    made = begin(tmp_path, config(num_steps=3))
    (features, labels), gradients, refused = clipped(config()), head_training.gradient_sum, []

    def copied_meanwhile(*args):
        if not refused:
            shutil.copytree(tmp_path / "out", tmp_path / "copy")
            copy = HeadRun(made.plan, output_dir=tmp_path / "copy", private_state_dir=tmp_path / "private")
            with pytest.raises(DPConfigError, match="a run on a copy of this folder.*Wait for that run") as error:
                copy.train(features, labels.flip(0), K)
            refused.append(error)
        return gradients(*args)

    monkeypatch.setattr(head_training, "gradient_sum", copied_meanwhile)
    made.train(features, labels, K)
    assert refused


def test_a_run_that_is_killed_before_its_model_is_published_gives_the_same_weights(tmp_path, monkeypatch):
    """Until `finish` nothing is lost; a save that was killed half-way leaves nothing behind in the end."""
    _, weights = run(tmp_path, config(), finish=False)
    (kept,) = (tmp_path / "private").glob("runs/*/head-*.pt")
    kept.with_name(f".{kept.name}.0a0a0a0a.tmp").write_bytes(kept.read_bytes())
    monkeypatch.setattr(head_training, "gradient_sum", None)  # nothing is computed again
    again, same = run(tmp_path, config(), finish=False)
    assert torch.equal(same, weights)
    assert not (tmp_path / "out/privacy/statement.md").exists()
    again.finish(K)
    assert (tmp_path / "out/privacy/statement.md").exists()
    assert left(tmp_path / "private") == []


def test_other_kinds_of_numbers_and_folders_with_checkpoints_are_refused(tmp_path):
    features, labels = data()
    for wrong in (features.bfloat16() / 100, features.half() / 100):
        with pytest.raises(DPConfigError, match="Use float32"):
            run(tmp_path, config(), private=(wrong, labels))
    with pytest.raises(DPConfigError, match="int64"):
        run(tmp_path, config(), private=(clipped(config())[0], labels.to(torch.uint8)))
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(DPConfigError, match="checkpoint-5.*output_dir of its own"):
        run(tmp_path, config())


def test_the_statement_says_final_weights_only_in_its_first_line(tmp_path):
    made, _ = run(tmp_path, config(head_radius=1e-4, num_steps=300))
    text = (tmp_path / "out/privacy/statement.md").read_text()
    first = text.splitlines()[0]
    assert first.startswith("# Final weights only: epsilon ") and "delta 1e-05" in first
    assert made.plan.spent.horizon is not None and f"last {made.plan.spent.horizon:,} steps count" in text
    run(tmp_path / "plain", config(num_steps=3))
    assert "Plain composition over all 3 steps" in (tmp_path / "plain/out/privacy/statement.md").read_text()
    run(tmp_path / "off", config(noise_multiplier=0.0))
    assert "NOT PRIVATE" in (tmp_path / "off/out/privacy/statement.md").read_text().splitlines()[0]


def test_a_head_without_a_ball_is_stated_and_verified(tmp_path):
    """Of a strongly convex loss; without l2 nothing keeps two runs together."""
    made, _ = run(tmp_path, config(head_radius=None, l2=0.5, num_steps=300, noise_multiplier=8.0))
    assert made.plan.spent.horizon is not None and made.plan.noise_over_radius(7) is None
    assert "ball" not in (tmp_path / "out/privacy/statement.md").read_text()
    folder = Folder(tmp_path / "out", tmp_path / "forged")
    assert not folder.failed() and folder.report["diameter"] is folder.report["head_radius"] is None
    folder.claim(0.95 * made.plan.epsilon())
    assert folder.failed() == {"epsilon of the release"}
    folder.edit_plan(lambda plan: plan.update(l2=0.0))
    assert "geometry" in folder.failed()


@pytest.mark.parametrize("head_radius", [1.5, None])
def test_a_head_of_long_steps_is_verified_by_their_own_contraction(head_radius, tmp_path):
    """R = 2 and l2 = 1: a step of 0.6 is above 2 / (M + 2 l2) = 0.5 and below 2 / (M + l2) = 0.67."""
    long = dict(l2=1.0, learning_rate=0.6, expected_batch_size=N, num_steps=400, noise_multiplier=60.0)
    made, _ = run(tmp_path, config(head_radius=head_radius, **long))
    folder = Folder(tmp_path / "out", tmp_path / "forged")
    assert made.plan.spent.horizon is not None and folder.report["batch_cap"] == N + 1 and not folder.failed()
    folder.edit_plan(lambda plan: plan.update(batch_cap=N))  # every batch has so many
    assert "epsilon of the release" in folder.failed()
    folder.edit_plan(lambda plan: plan.pop("batch_cap"))
    assert "geometry" in folder.failed()
    shrink = 0.6 * (2 * (N + 1) / N + 1) - 1
    assert made.plan.sgd.shift_costs(np.array([1])) == pytest.approx((shrink * made.plan.sgd.distance / 0.6) ** 2)
    with pytest.raises(DPConfigError, match="Use at most 0.4"):  # batches of 60 vary too much
        make_head_plan(config(**{**long, "expected_batch_size": 60}), num_examples=N)


# --- refusals ---


def test_features_that_are_too_long_and_labels_that_are_none_are_refused(tmp_path):
    features, labels = data()
    with pytest.raises(DPConfigError, match="clip_features first"):
        run(tmp_path, config(), private=(torch.cat([features, features[:, :1]], dim=1), labels))
    with pytest.raises(DPConfigError, match="clip_features first"):
        run(tmp_path, config(), private=(torch.full((N, H), math.nan), labels))
    with pytest.raises(DPConfigError, match=r"outside \[0, 3\)"):
        run(tmp_path, config(), private=(clipped(config())[0], labels + 1))
    with pytest.raises(DPConfigError, match=r"features have shape \(299, 6\) and the labels \(300,\)"):
        run(tmp_path, config(), private=(torch.zeros(N - 1, H), labels))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"head_radius": None}, "Give --head_radius a public number > 0, or --l2"),
        ({"feature_norm": None}, "Give --feature_norm"),
        ({"head_radius": 0.0}, "head_radius"),
        ({"learning_rate": 1.01}, r"above 2 / \(M \+ 2 l2\) = 1\b"),  # R = 2: M = 2
        ({"target_epsilon": 1.0}, "exactly one"),
        ({"noise_multiplier": None}, "exactly one"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 is outside"),
        ({"target_delta": 1.0}, "outside"),
        ({"target_delta": 0.004}, "above 1/n = 0.00333.*Use target_delta <= 0.0003"),
        ({"decay": 1.0}, "decay"),
        ({"expected_batch_size": 301}, "more than the 300 records"),
    ],
)
def test_settings_out_of_range_are_refused(changes, match):
    with pytest.raises(DPConfigError, match=match):
        make_head_plan(config(**changes), num_examples=N)


def test_the_accountant_is_told_of_the_domain_the_rate_and_the_steps_that_run():
    plan = make_head_plan(config(l2=0.1, decay=0.25, learning_rate=0.3), num_examples=N)
    sgd = plan.sgd
    assert make_head_plan(config(target_delta=None), num_examples=N).delta == 3e-4  # 1/(10 n), to one digit
    assert sgd.diameter == 2 * 1.5  # two points of a ball
    assert (sgd.lipschitz, sgd.smoothness) == (pytest.approx(2 * math.sqrt(2)), 2.0)
    assert sgd.sample_rate == plan.sampler.sample_rate == 60 / N
    assert (sgd.num_steps, sgd.step_size, sgd.decay, sgd.l2, sgd.noise_multiplier) == (40, 0.3, 0.25, 0.1, 1.0)


@pytest.mark.parametrize("how", ["deleted", "another id"])
def test_a_ledger_that_was_taken_away_is_refused_in_words(tmp_path, how):
    """Else the same head would be trained, and charged, a second time, or stated without its charge."""
    made, _ = run(tmp_path, config(), finish=False)
    ledger = tmp_path / "out/privacy/ledger.jsonl"
    ledger.unlink()
    if how == "another id":
        forging.write(tmp_path / "out", [{"kind": "header", "version": 1, "run": "f" * 16, "parent": None}])
    for again in (lambda: made.finish(K), lambda: made.train(*clipped(config()), K)):
        with pytest.raises(DPConfigError, match="was deleted or replaced after a head was trained"):
            again()


def test_no_delta_of_a_head_is_taken_from_a_ledger_without_its_log(tmp_path):
    run(tmp_path / "others", config(target_delta=0.4, allow_large_delta=True), finish=False)
    records = forging.records_of(tmp_path / "others/out")
    records[0]["run"] = "f" * 16
    forging.write(tmp_path / "out", records[:2])
    assert recorded_head_plan(tmp_path / "out", tmp_path / "others/private") is None
