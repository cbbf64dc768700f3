"""Features and labels of other shapes would mix records: they are refused before anything is touched."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.softmax_gradients import gradient_sum
from tests.convex.heads import H, K, M, N, begin, clipped, in_subspace, plain

HEADS = {"plain": plain, "in a subspace": in_subspace}


def _public():
    return clipped(in_subspace(), M, seed=1)


BAD = {
    "labels in a column": (lambda x, y: (x, y[:, None]), r"labels \(300, 1\)"),
    "two columns of labels": (lambda x, y: (x, torch.stack([y, y], 1)), r"labels \(300, 2\)"),
    "features in a row": (lambda x, y: (x[:, 0], y), r"features have shape \(300,\)"),
    "features of tokens": (lambda x, y: (x[:, None], y), r"features have shape \(300, 1, 7\)"),
    "an array": (lambda x, y: (x.numpy(), y), "ndarray.*torch.from_numpy"),
    "a list": (lambda x, y: (x, y.tolist()), "list.*torch.from_numpy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bad", BAD)
def test_other_shapes_are_refused(tmp_path, head, bad):
    change, match = BAD[bad]
    asked = HEADS[head]()
    public = {"public": _public()} if head != "plain" else {}
    with pytest.raises(DPConfigError, match=match):
        begin(tmp_path, asked).train(*change(*clipped(asked)), K, **public)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", BAD)
def test_other_shapes_of_public_records_are_refused(tmp_path, bad):
    change, _ = BAD[bad]
    with pytest.raises(DPConfigError, match="public"):
        begin(tmp_path, in_subspace()).train(*clipped(in_subspace()), K, public=change(*_public()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("copied", [False, True])
def test_private_records_are_no_public_ones(tmp_path, copied):
    features, labels = clipped(in_subspace())
    public = (features.clone(), labels) if copied else (features[:30], labels[:30])
    with pytest.raises(DPConfigError, match="are the private ones"):
        begin(tmp_path, in_subspace()).train(features, labels, K, public=public)
    assert not (tmp_path / "out").exists()


def test_the_sum_itself_takes_no_labels_of_another_shape():
    features, labels = clipped(plain())
    with pytest.raises(AssertionError, match="one label"):
        gradient_sum(features, labels[:, None], torch.zeros(K, features.size(1), dtype=torch.float64))


def test_parts_of_one_tensor_may_be_private_and_public(tmp_path):
    features, labels = clipped(in_subspace(), N + M)
    weights = begin(tmp_path, in_subspace()).train(features[:N], labels[:N], K, public=(features[N:], labels[N:]))
    assert weights.shape == (K, H + 1)
