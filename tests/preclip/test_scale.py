"""Fixed and public scales, against records that are divided one by one."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dpopt import DPConfigError
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.preclip import PublicPreconditioner, ScaleThenPrivatize
from tests.preclip.loop import CLIP_SGD, EXPECTED, Loop, gradient, model, plan
from tests.reference.dp2 import Moment, clip

SHAPES = {"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
SCALE = {"weight": 10.0 ** torch.linspace(-3, 2, 18).view(3, 6), "bias": torch.tensor([0.5, 2.0, 1.0])}


def _released(weights, records, divisors, norm, noise):
    total = [torch.zeros_like(w).double() for w in weights]
    for b in records:
        g = [gi / d for gi, d in zip(gradient([w.double() for w in weights], b), divisors, strict=True)]
        parts = clip(torch.cat([x.flatten() for x in g]), norm).split([x.numel() for x in g])
        total = [t + p.view_as(t) for t, p in zip(total, parts, strict=True)]
    return [(t + n * norm / CLIP_SGD) / EXPECTED for t, n in zip(total, noise, strict=True)]


@pytest.mark.parametrize("kind", ["diagonal", "factored", "bias alone"])
def test_a_fixed_scale_divides_every_record(tmp_path, kind):
    rows, columns = torch.tensor([0.01, 1.0, 30.0]), torch.linspace(0.2, 5, 6)
    scale = {"diagonal": SCALE, "factored": {"weight": (rows, columns)}, "bias alone": {"bias": SCALE["bias"]}}[kind]
    weight = torch.outer(rows, columns) if kind == "factored" else scale.get("weight", torch.ones(3, 6))
    divisors = [weight.double(), scale.get("bias", torch.ones(3)).double()]
    loop = Loop(tmp_path, plan(3, ScaleThenPrivatize(scale=scale, clipping_norm=2.0)), rate=0.1)
    weights = [p.detach().double() for p in model().parameters()]
    for t in (1, 2, 3):
        loop.step(t)
        released = _released(weights, loop.batches[-1], divisors, 2.0, loop.noise[-1][0])
        weights = [w - 0.1 * g for w, g in zip(weights, released, strict=True)]
        for got, want in zip(loop.weights(), weights, strict=True):
            assert (got.double() - want).abs().max() <= 2e-5 * want.abs().max()


class Source:
    """Public gradients that a test knows beforehand."""

    def __init__(self):
        self.calls = 0

    def mean(self):
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return {name: torch.randn(p.shape, generator=generator) for name, p in SHAPES.items()}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("factored", [False, True], ids=["full", "factored"])
@pytest.mark.parametrize("every", [1, 2])
def test_adadps_divides_by_the_second_moment_of_public_gradients(tmp_path, every, factored):
    spec = PublicPreconditioner(refresh_every=every, eps=1e-3, beta=0.7, clipping_norm=1.5, factored=factored)
    loop = Loop(tmp_path, plan(5, spec), rate=0.1, public=Source())
    reference, moments = Source(), [Moment(p.shape, "rmsprop", 0.7, 1e-3, factored) for p in SHAPES.values()]
    weights = [p.detach().double() for p in model().parameters()]
    for t in range(1, 6):
        loop.step(t)
        if (t - 1) % every == 0:
            for moment, g in zip(moments, reference.mean().values(), strict=True):
                moment.update(g.double() ** 2)
        divisors = [moment.divisor() for moment in moments]
        released = _released(weights, loop.batches[-1], divisors, 1.5, loop.noise[-1][0])
        weights = [w - 0.1 * g for w, g in zip(weights, released, strict=True)]
        for got, want in zip(loop.weights(), weights, strict=True):
            assert (got.double() - want).abs().max() <= 2e-5 * want.abs().max()


def test_adadps_without_public_records_is_refused():
    with pytest.raises(DPConfigError, match="public_dataset.*dp2_rmsprop"):
        PublicPreconditioner().start(SHAPES, clipping_norm=1.0)


@pytest.mark.parametrize(("options", "match"), [
    ({"refresh_every": 0}, "refresh_every"), ({"eps": 0.0}, "> 0"), ({"eps": None}, "eps"), ({"beta": 2}, "0, 1"),
    ({"second_moment": "sgd"}, "rmsprop"), ({"clipping_norm": -1}, "> 0"), ({"learning_rate_ratio": math.nan}, "finite"),
])  # fmt: skip
def test_adadps_out_of_range_is_refused(options, match):
    with pytest.raises(DPConfigError, match=match):
        PublicPreconditioner(**options)


@pytest.mark.parametrize("scale", [
    {"weight": torch.zeros(3, 6)}, {"weight": torch.ones(6, 3)}, {"weight": -torch.ones(3, 6)},
    {"weight": torch.full((3, 6), math.nan)}, {"weight": torch.full((3, 6), math.inf)}, {"other": torch.ones(3)},
    {"weight": (torch.ones(6), torch.ones(3))}, {"bias": (torch.ones(3), torch.zeros(1))},
])  # fmt: skip
def test_a_scale_that_does_not_fit_is_refused(scale):
    with pytest.raises(DPConfigError, match="Leave it out|Give D in the parameter's shape"):
        ScaleThenPrivatize(scale=scale).start(SHAPES, clipping_norm=1.0, noise=IndependentNoise())


def test_scales_are_told_apart_in_the_ledger():
    one, same = ScaleThenPrivatize(scale=SCALE), ScaleThenPrivatize(scale={n: s.clone() for n, s in SCALE.items()})
    other = ScaleThenPrivatize(scale=SCALE | {"bias": SCALE["bias"] + 1})
    assert one.parameters() == same.parameters() != other.parameters()
