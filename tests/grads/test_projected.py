"""Clipping in the coordinates of a subspace: against a loop over records in p dimensions, and its bound."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from hf_dpopt import make_plan
from hf_dpopt.clipping.contributions import Rows, Transposed
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.preclip import subspace_projection
from hf_dpopt.preclip.subspace_projection import ProjectedGradient, ProjectingEngine, coordinates
from hf_dpopt.public import PublicGradients
from hf_dpopt.public.subspace import PublicSubspace, RefreshedSubspace
from hf_dpopt.records.losses import RecordLosses, num_records
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.step import private_step
from tests.grads.models import MODELS, batch_for
from tests.grads.test_contributions import _make, _materialise
from tests.helpers import tiny
from tests.reference import clipping as clipping_reference
from tests.reference import subspace as reference

ALPHA = 1e-6


def _subspace(model, rank: int = 3) -> PublicSubspace:
    subspace = PublicSubspace(rank)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    subspace.refresh({n: torch.randn(rank + 2, *p.shape, dtype=p.dtype) for n, p in trained.items()})
    return subspace


def _sum(model, batch, subspace, clip: float, rule: str = "flat", parts=None) -> torch.Tensor:
    engine = ProjectingEngine(model, make_clipping(rule, clip), subspace)
    losses, sums = RecordLosses(model), engine.empty_sum()
    for part in parts or [slice(None)]:
        piece = {k: v[part] for k, v in batch.items()}
        engine.add_clipped_sum(sums, lambda piece=piece: losses(piece), num_records(piece))
    (got,) = sums.result().values()
    return got


def _slow(model, batch, subspace, clip: float, rule: str = "flat") -> torch.Tensor:
    v = reference.matrix(subspace.basis).T
    return reference.clipped_coordinates(clipping_reference.record_gradients(model, batch), v, clip, rule)


def _median_norm(model, batch, subspace) -> float:
    """Half of the records are clipped, half are not."""
    v = reference.matrix(subspace.basis).T
    norms = [(v.T @ reference.vector(g)).norm().item() for g in clipping_reference.record_gradients(model, batch)]
    return sorted(norms)[len(norms) // 2]


@pytest.mark.slow_but(30)
@pytest.mark.parametrize("rule", ["flat", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_equals_a_loop_over_records(name, dtype, rule):
    """However the records are spread over physical batches."""
    model = MODELS[name]().to(dtype)
    batch, subspace = batch_for(model), _subspace(model, 7)
    clip = _median_norm(model, batch, subspace)
    want = _slow(model, batch, subspace, clip, rule)
    for parts in (None, [[3], [0, 4], [1, 2]]):
        got = _sum(model, batch, subspace, clip, rule, parts)
        assert got.shape == (7,) and got.dtype == dtype
        assert (got - want).norm() <= (1e-10 if dtype == torch.float64 else 5e-5) * want.norm()


@pytest.mark.parametrize("formed", [1, 100, 2**22])
@pytest.mark.parametrize("kind", ["outer", "one-token", "rows", "dense"])
def test_coordinates_of_each_form(kind, formed, monkeypatch):
    monkeypatch.setattr(subspace_projection, "MAX_FORMED", formed)
    use = _make(kind)
    basis = torch.randn(4, *_materialise(use).shape[1:], dtype=torch.float64)
    want = torch.einsum("bpq,kpq->bk", _materialise(use), basis)
    torch.testing.assert_close(coordinates(use, basis), want, rtol=1e-10, atol=1e-12)
    if isinstance(use, Rows):
        torch.testing.assert_close(coordinates(Transposed(use), basis.mT.contiguous()), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("name", ["bert", "bert-lora", "gpt2", "t5"])
def test_one_more_record_moves_the_coordinates_by_at_most_c(name, dtype):
    """And reaches it: the clip is not merely loose. In bfloat16 the others run in batches of another shape."""
    model = MODELS[name]()
    batch, subspace = batch_for(model), _subspace(model, 6)
    without = {k: v[:4] for k, v in batch.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        moved = _sum(model, batch, subspace, 1e-4) - _sum(model, without, subspace, 1e-4)
        alone = _sum(model, {k: v[4:] for k, v in batch.items()}, subspace, 1e-4)
    slack = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    assert 0.9e-4 <= moved.norm().item() <= 1e-4 * (1 + slack)
    assert 0.999e-4 <= alone.norm().item() <= 1e-4


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_without_finite_gradient_adds_exactly_nothing(poison):
    model = MODELS["bert"]()
    batch, subspace = batch_for(model), _subspace(model)
    batch["input_ids"][batch["input_ids"] == 5] = 6
    batch["input_ids"][2, 0] = 5
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float(poison)
    others = {k: v[[0, 1, 3, 4]] for k, v in batch.items()}
    got, want = _sum(model, batch, subspace, 0.5), _sum(model, others, subspace, 0.5)
    assert want.any() and (got - want).norm() <= 1e-5 * want.norm()
    engine = ProjectingEngine(model, make_clipping("flat", 0.5), subspace)
    seen = engine.add_clipped_sum(engine.empty_sum(), lambda: RecordLosses(model)(batch), 5)
    assert (seen.num_records, seen.num_dropped) == (5, 1)


def test_refusals():
    model = MODELS["bert"]()
    subspace = _subspace(model)
    with pytest.raises(DPConfigError, match="'flat' or 'automatic'"):
        ProjectingEngine(model, make_clipping("per_layer", 1.0), subspace)
    with pytest.raises(DPConfigError, match="project='after_noise'"):
        ProjectingEngine(model, make_clipping("flat", 1.0), subspace).empty_sum(Scale())
    with pytest.raises(DPConfigError, match="Call refresh"):
        ProjectingEngine(model, make_clipping("flat", 1.0), PublicSubspace(2)).empty_sum()
    model.classifier.requires_grad_(False)
    with pytest.raises(DPConfigError, match="frozen or unfrozen"):
        ProjectingEngine(model, make_clipping("flat", 1.0), subspace).empty_sum()


def test_a_private_step_noises_k_coordinates_and_lifts_them(tmp_path):
    """Through `private_step`: gradients lie in V, and their coordinates carry the plan's noise; chi-square at ALPHA."""
    model, records, rank, clip, batch_size = tiny.model(dropout=0.0).double(), tiny.records(), 8, 0.3, 16
    config = PrivacyConfig(
        noise_multiplier=2.0, expected_batch_size=batch_size, clipping_norm=clip, target_delta=1e-3, sampling="poisson"
    )
    plan = make_plan(config, num_examples=len(records), num_steps=40)
    run = PrivateRun(plan, output_dir=tmp_path / "run", private_state_dir=tmp_path / "keys")
    public = PublicGradients(model, RecordLosses(model), tiny.records(20), tiny.collate, batch_size=4)
    subspace = RefreshedSubspace(public, rank=rank, num_public=12, refresh_every=4)
    engine, losses, energy = ProjectingEngine(model, plan.clipper, subspace), RecordLosses(model), 0.0
    for step in range(1, 41):
        rows = [records[i] for i in run.draw(step)]
        batches = [tiny.collate(rows)] if rows else []
        private_step(engine, losses, batches, run=run, step=step, after_noise=[ProjectedGradient(subspace)])
        grads = {n: p.grad for n, p in model.named_parameters()}
        u = subspace.project(grads)
        back = reference.vector(subspace.lift(u))
        torch.testing.assert_close(reference.vector(grads), back, rtol=1e-8, atol=1e-12)
        v = reference.matrix(subspace.basis).T
        want = torch.zeros(rank, dtype=torch.float64)
        for p in model.parameters():
            p.grad = None
        if rows:
            found = clipping_reference.record_gradients(model, tiny.collate(rows))
            want = reference.clipped_coordinates(found, v, clip, "flat")
        noise = (u * batch_size - want) / (2.0 * clip)
        energy += noise.square().sum().item()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.05 * grads[name])
    run.close()
    assert subspace.version == 10
    low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=40 * rank)
    assert low < energy < high
    assert np.isfinite(energy)
