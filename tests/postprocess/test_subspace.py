"""Projection and subspace AdaGrad against full p x p matrices in float64; what noise alone does; resume."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess.maps import IndependentNoise
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.preclip.subspace_projection import ProjectedGradient, SubspaceAdaGrad
from hf_dpopt.public import PublicGradients
from hf_dpopt.public.subspace import PublicSubspace, RefreshedSubspace
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny
from tests.reference import subspace as reference

SHAPES = {"weight": (4, 3), "bias": (5,)}


class Loudness:
    """Noise whose variance differs from step to step."""

    def __init__(self, variances):
        self.variances = iter(variances)

    def variance(self):
        return next(self.variances)

    def covariance(self, lag):
        return 0.0


def _random(*lead: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    return {name: torch.randn(*lead, *shape, dtype=dtype) for name, shape in SHAPES.items()}


def _made(rank: int) -> PublicSubspace:
    subspace = PublicSubspace(rank)
    subspace.refresh(_random(rank + 4))
    return subspace


def _projector(subspace: PublicSubspace) -> torch.Tensor:
    v = reference.matrix(subspace.basis).T
    return v @ v.T


def test_projection_keeps_what_lies_in_the_subspace():
    subspace, released = _made(3), _random()
    got = ProjectedGradient(subspace)(released)
    assert {n: g.shape for n, g in got.items()} == {n: torch.Size(s) for n, s in SHAPES.items()}
    want = _projector(subspace) @ reference.vector(released)
    torch.testing.assert_close(reference.vector(got), want, rtol=1e-10, atol=1e-12)
    again = ProjectedGradient(subspace)(got)
    torch.testing.assert_close(reference.vector(again), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [ProjectedGradient, lambda s: SubspaceAdaGrad(s, IndependentNoise(0.1))])
def test_coordinates_of_an_engine_are_taken_as_they_are(kind):
    """The engine projected them and began the step; a second projection would find no basis of that name."""
    subspace, released = _made(3), _random()
    want = kind(subspace)(released)
    got = kind(subspace)({"subspace": subspace.project(released)})
    assert all(torch.equal(want[n], got[n]) for n in SHAPES)


@pytest.mark.parametrize("refresh_every", [100, 3, 1])
@pytest.mark.parametrize("loud", [False, True])
def test_it_is_full_matrix_adagrad_in_the_subspace(refresh_every, loud):
    """Against p x p matrices: S, its rotation at a refresh (P S P), the noise's share, the level, the pseudo-inverse."""
    variances = [0.3 * (1 + step % 3) if loud else 0.0 for step in range(12)]
    subspace, slow = _made(4), reference.AmbientAdaGrad(4)
    adagrad = SubspaceAdaGrad(subspace, Loudness(variances), eps=0.05)
    signal, num_kept = _random(), 0
    for step, variance in enumerate(variances):
        if step and step % refresh_every == 0:
            old = reference.matrix(subspace.basis)  # a subspace that turns a little, as training does
            subspace.refresh({n: b + 0.1 * torch.randn_like(b) for n, b in subspace.basis.items()})
            assert not torch.allclose(old, reference.matrix(subspace.basis))
        noise = _random()
        released = {n: 4 * signal[n] + math.sqrt(variance) * noise[n] for n in SHAPES}
        got = reference.vector(adagrad(released))
        want = slow.step(reference.vector(released), _projector(subspace), variance, 0.05)
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
        num_kept += bool(want.any())
    assert num_kept > 6  # the comparison was not one of zeros


def test_pure_noise_is_dropped_and_a_signal_in_it_found():
    """Marchenko-Pastur: above the level lies the largest eigenvalue of pure noise now and then, and no other."""
    torch.manual_seed(0)  # some draws put a direction just above the level, and divide by what it exceeds it by
    k, stddev = 60, 0.5
    subspace = PublicSubspace(k)
    subspace.refresh({"weight": torch.randn(k, 200, dtype=torch.float64)})
    level, kept = SubspaceAdaGrad(subspace, IndependentNoise(stddev)), []
    for _ in range(150):
        u = stddev * torch.randn(k, dtype=torch.float64)
        level({"subspace": u})
        kept.append(int((torch.linalg.eigvalsh(level.second_moment) > level.noise_level).sum()))
    assert max(kept) <= 2 and sum(kept) < 0.6 * len(kept)
    found, signal = SubspaceAdaGrad(subspace, IndependentNoise(stddev)), torch.zeros(k, dtype=torch.float64)
    signal[7] = 1.5  # shows against its noise once sqrt(t) 1.5^2 > 2 sqrt(60) 0.25 + 60 * 0.25 / sqrt(t)
    for _ in range(150):
        update = subspace.project(found({"subspace": signal + stddev * torch.randn(k, dtype=torch.float64)}))
    assert update[7] ** 2 > 0.8 * update.square().sum() > 0


def test_a_negative_eps_is_refused():
    with pytest.raises(DPConfigError, match="eps=-1"):
        SubspaceAdaGrad(_made(2), IndependentNoise(0.1), eps=-1.0)


def test_two_refreshes_within_a_step_are_refused():
    subspace = _made(2)
    adagrad = SubspaceAdaGrad(subspace, IndependentNoise(0.1))
    adagrad(_random())
    subspace.refresh(_random(6)), subspace.refresh(_random(6))
    with pytest.raises(DPConfigError, match="once per step at most"):
        adagrad(_random())


def _refreshed(public):
    return RefreshedSubspace(public, rank=3, num_public=5, refresh_every=2)


KINDS = {  # public gradients -> a map of releases that uses them
    "projection": lambda public: ProjectedGradient(_refreshed(public)),
    "AdaGrad": lambda public: SubspaceAdaGrad(_refreshed(public), IndependentNoise(1e-3)),
    "mirror descent": lambda public: PublicMirrorDescent(public, num_steps=9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_exact(kind):
    """With the public batches, and the subspace, of the steps before."""

    def fresh(model):
        return KINDS[kind](PublicGradients(model, RecordLosses(model), tiny.records(12), tiny.collate, batch_size=4))

    def step(model, postprocess, number):
        generator = torch.Generator().manual_seed(number)
        released = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        released = postprocess(released)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.01 * released[name])

    one, two = tiny.model(), tiny.model()
    whole, first = fresh(one), fresh(two)
    for number in range(3):
        step(one, whole, number), step(two, first, number)
    second = fresh(two)
    second.load_state_dict(first.state_dict())
    for number in range(3, 7):
        step(one, whole, number), step(two, second, number)
    assert getattr(whole, "noise_level", None) == getattr(second, "noise_level", None)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(one.parameters(), tiny.model().parameters(), strict=True))
