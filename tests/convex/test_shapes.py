"""Features and labels of other shapes would mix records: they are refused before anything is touched."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex import HeadConfig, HeadRun, SubspaceHeadConfig, clip_features, make_head_plan, make_subspace_plan
from hf_dpopt.convex.gradients import gradient_sum

N, H, K = 60, 6, 3
SETTINGS = dict(head_radius=1.5, feature_norm=2.0, num_steps=3, noise_multiplier=1.0, target_delta=1e-5)


def _data(num=N, seed=0):
    rng = torch.Generator().manual_seed(seed)
    features = clip_features(torch.randn(num, H, generator=rng), 2.0, 1.0)
    return features, torch.randint(K, (num,), generator=rng)


def _plain(folder):
    plan = make_head_plan(HeadConfig(expected_batch_size=20, **SETTINGS), num_examples=N)
    return HeadRun(plan, output_dir=folder / "out", private_state_dir=folder / "private"), {}


def _in_subspace(folder):
    plan = make_subspace_plan(SubspaceHeadConfig(expected_batch_size=N, rank=4, **SETTINGS), num_examples=N)
    run = HeadRun(plan, output_dir=folder / "out", private_state_dir=folder / "private")
    return run, {"public": _data(20, seed=1)}


BAD = {
    "labels in a column": (lambda x, y: (x, y[:, None]), r"labels \(60, 1\)"),
    "two columns of labels": (lambda x, y: (x, torch.stack([y, y], 1)), r"labels \(60, 2\)"),
    "features in a row": (lambda x, y: (x[:, 0], y), r"features have shape \(60,\)"),
    "features of tokens": (lambda x, y: (x[:, None], y), r"features have shape \(60, 1, 7\)"),
    "an array": (lambda x, y: (x.numpy(), y), "ndarray.*torch.from_numpy"),
    "a list": (lambda x, y: (x, y.tolist()), "list.*torch.from_numpy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [_plain, _in_subspace], ids=["plain", "in a subspace"])
@pytest.mark.parametrize("bad", BAD)
def test_other_shapes_are_refused(tmp_path, make, bad):
    change, match = BAD[bad]
    run, given = make(tmp_path)
    with pytest.raises(DPConfigError, match=match):
        run.train(*change(*_data()), K, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", BAD)
def test_other_shapes_of_public_records_are_refused(tmp_path, bad):
    change, _ = BAD[bad]
    run, given = _in_subspace(tmp_path)
    with pytest.raises(DPConfigError, match="public"):
        run.train(*_data(), K, public=change(*given["public"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("copied", [False, True])
def test_private_records_are_no_public_ones(tmp_path, copied):
    run, _ = _in_subspace(tmp_path)
    features, labels = _data()
    public = (features.clone(), labels) if copied else (features[:30], labels[:30])
    with pytest.raises(DPConfigError, match="are the private ones"):
        run.train(features, labels, K, public=public)
    assert not (tmp_path / "out").exists()


def test_the_sum_itself_takes_no_labels_of_another_shape():
    features, labels = _data()
    with pytest.raises(AssertionError, match="one label"):
        gradient_sum(features, labels[:, None], torch.zeros(K, features.size(1), dtype=torch.float64))


def test_parts_of_one_tensor_may_be_private_and_public(tmp_path):
    run, _ = _in_subspace(tmp_path)
    features, labels = _data(N + 20)
    weights = run.train(features[:N], labels[:N], K, public=(features[N:], labels[N:]))
    assert weights.shape == (K, H + 1)
