"""Clipping norms at the ends of what single precision can square: the records that are hard to measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_dpopt import DPConfigError, PrivacyConfig, clipped_gradient_sum
from hf_dpopt.common import checks
from hf_dpopt.common.checks import LARGEST_CLIPPING_NORM, SMALLEST_CLIPPING_NORM
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.preclip import make_preclip
from hf_dpopt.preclip.scale import ScaleThenPrivatize
from tests.adversary import harness
from tests.helpers import tiny

SIZES = [1e-2, 1.0, 1e2, 1e5, 1e9]  # gradients of the record / the clipping norm


def ratio(folder, norm: float, size: float, **changes: Any) -> float:
    """Influence of a record whose loss has gradients of about `size` clipping norms, in float32."""

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none") * (norm * size)

    def make(output_dir, dataset):
        # the harness makes a float64 model of one that it is given
        return harness.trainer(
            output_dir, dataset, model_init=lambda: tiny.model(dropout=0.0), clipping_norm=norm,
            per_example_loss_func=loss, skip_self_check=True, **changes,
        )  # fmt: skip

    return harness.influence(make, tiny.records(8), 1, folder, drawn=[1]) * harness.CLIPPING_NORM / norm


MODES: dict[str, dict[str, Any]] = {
    "flat": {},
    "per layer": {"clipping": "per_layer"},
    "automatic": {"clipping": "automatic"},
    "two passes": {"clipping_engine": "two_pass"},
    "a quantile": {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 1.0}},
}


# A released count is one coordinate more: at noise multiplier 1 and batches of 4, the noise is made for this.
ALLOWED = {"a quantile": (1 - (1 / (2 * 1.0 * 4)) ** 2) ** -0.5}


@pytest.mark.slow_but(10)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_at_the_smallest_norm_a_record_is_held_to_it(tmp_path, mode, size):
    assert ratio(tmp_path, SMALLEST_CLIPPING_NORM, size, **MODES[mode]) <= ALLOWED.get(mode, 1.0) + harness.SLACK


@pytest.mark.parametrize("mode", MODES)
def test_at_the_largest_norm_too(tmp_path, mode):
    assert ratio(tmp_path, LARGEST_CLIPPING_NORM, 1e2, **MODES[mode]) <= ALLOWED.get(mode, 1.0) + harness.SLACK


@pytest.mark.parametrize("norm, size", [(1e-24, 1.3), (1e-30, 80.0)])
def test_without_the_floor_a_record_passes_unclipped(tmp_path, monkeypatch, norm, size):
    """What the floor is for: its squares vanish. On this model the norm is about 1.4 times the loss's factor."""
    monkeypatch.setattr(checks, "SMALLEST_CLIPPING_NORM", norm)
    assert ratio(tmp_path, norm, size) > 1 + 100 * harness.SLACK


@pytest.mark.parametrize("norm", [1e-11, 1e-24, 1e11, 1e30, 1e39])
def test_norms_out_of_range_are_refused_wherever_they_are_given(norm):
    refused = pytest.raises(
        DPConfigError, match="is out of range: in float32.*Use a finite number > 0, from 1e-10 to 1e\\+10"
    )
    with refused:
        PrivacyConfig(noise_multiplier=1.0, expected_batch_size=4, clipping_norm=norm)
    with refused:
        clipped_gradient_sum(nn.Linear(2, 1), {"x": torch.ones(1, 2)}, clipping_norm=norm)
    for name in ("dp2_rmsprop", "dp2_yogi", "adadps"):
        with refused:
            PrivacyConfig(
                noise_multiplier=1.0, expected_batch_size=4, preconditioner=name,
                preconditioner_kwargs={"clipping_norm": norm},
            )  # fmt: skip
    with refused:
        ScaleThenPrivatize(scale={}, clipping_norm=norm)


def test_two_norms_that_are_too_far_apart_are_refused():
    scale = ScaleThenPrivatize(scale={}, clipping_norm=1e10)
    with pytest.raises(DPConfigError, match="further apart than 1e\\+15.*closer together"):
        scale.start({}, clipping_norm=1e-10)
    scale.start({}, clipping_norm=1e-5)


def test_a_quantile_does_not_carry_the_norm_out_of_range():
    """All units are within the clip, step after step; and then none is."""
    spec = make_preclip("quantile", {"quantile": 0.5, "learning_rate": 3.0})
    for first in (1e-8, 1e8, 1.0):
        adaptive = spec.start({}, clipping_norm=first, noise=IndependentNoise())
        for share, end in (
            (1.0, max(first / 1e6, SMALLEST_CLIPPING_NORM)),
            (0.0, min(first * 1e6, LARGEST_CLIPPING_NORM)),
        ):
            for _ in range(30):
                count = torch.tensor((share - 0.5) * adaptive._weight)
                adaptive.receive({"units within the clip": count, "weight": torch.zeros(1)})
            assert first * adaptive.ratio == pytest.approx(end, rel=1e-9)
        adaptive.load_state_dict({"ratio": 1e-30, "last": 1.0})
        assert first * adaptive.ratio >= SMALLEST_CLIPPING_NORM * (1 - 1e-9)
