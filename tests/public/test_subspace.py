"""V against the singular value decomposition of X itself, in float64; schedule and resume."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.public import PublicGradients
from hf_dpopt.public import subspace as module
from hf_dpopt.public.subspace import PublicSubspace, RefreshedSubspace
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny
from tests.reference import subspace as reference

SHAPES = {"a": (5, 4), "scalar": (), "b": (7,), "c": (2, 3, 3)}
NUM_COORDINATES = 20 + 1 + 7 + 18


def _tensors(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of (m, p) as gradients of the parameters."""
    out, first = {}, 0
    for name, shape in SHAPES.items():
        size = int(torch.Size(shape).numel())
        out[name] = x[:, first : first + size].reshape(len(x), *shape)
        first += size
    return out


def _with_singular_values(values: list[float], dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Gradients of len(values) + 3 records with random singular vectors."""
    k = len(values)
    left, right = (torch.linalg.qr(torch.randn(n, k, dtype=torch.float64)).Q for n in (k + 3, NUM_COORDINATES))
    return _tensors((left * torch.tensor(values, dtype=torch.float64) @ right.T).to(dtype))


def _columns(subspace: PublicSubspace) -> torch.Tensor:
    """V as stored, (p, k), in float64."""
    return reference.matrix(subspace.basis).T


def _made(per_record, rank) -> PublicSubspace:
    subspace = PublicSubspace(rank)
    subspace.refresh(per_record)
    return subspace


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 29, 2**20])
def test_v_spans_the_top_singular_vectors(dtype, tolerance, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    grads = _with_singular_values([8.0, 4.0, 2.0, 1.0, 0.5], dtype)
    subspace = _made(grads, 3)
    v, want = _columns(subspace), reference.top_directions(grads, 3)
    torch.testing.assert_close(v @ v.T, want @ want.T, rtol=0, atol=tolerance)
    # singular vectors, not only their span: the same up to signs
    torch.testing.assert_close((v * want).sum(dim=0).abs(), torch.ones(3, dtype=torch.float64), rtol=tolerance, atol=0)
    assert all(b.dtype == dtype and b.shape == (3, *SHAPES[n]) for n, b in subspace.basis.items())


@pytest.mark.parametrize("dtype, orthonormal", [(torch.float64, 1e-13), (torch.float32, 3e-7)])
def test_columns_are_orthonormal_however_badly_x_is_conditioned(dtype, orthonormal):
    smallest = 1e-6 if dtype == torch.float64 else 1e-4  # of the largest; just above what is told from rounding
    subspace = _made(_with_singular_values([1e3, 1.0, 1e3 * smallest], dtype), 3)
    assert subspace.num_directions == 3
    v = _columns(subspace)
    torch.testing.assert_close(v.T @ v, torch.eye(3, dtype=torch.float64), rtol=0, atol=orthonormal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_collinear_gradients_give_the_directions_there_are(dtype):
    grads = _with_singular_values([3.0, 1.0], dtype)  # 5 records of rank 2
    with torch.no_grad():
        for g in grads.values():  # and rounding: records that differ in their last bits
            g *= 1 + torch.finfo(dtype).eps * torch.randn_like(g)
    subspace = _made(grads, 4)
    assert subspace.num_directions == 2
    v, want = _columns(subspace), reference.top_directions(grads, 2)
    torch.testing.assert_close(v @ v.T, want @ want.T, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5)
    assert not v[:, 2:].any()
    g = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    assert not subspace.project(g)[2:].any()
    more = _with_singular_values([3.0, 2.0, 1.0, 0.5], dtype)
    subspace.refresh(more)
    assert subspace.num_directions == 4


def test_projection_and_lift():
    subspace = _made(_with_singular_values([4.0, 2.0, 1.0]), 2)
    v = _columns(subspace)
    g = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    u = torch.randn(2, dtype=torch.float64)
    torch.testing.assert_close(subspace.project(g), v.T @ reference.vector(g), rtol=1e-11, atol=1e-12)
    lifted = subspace.lift(u)
    assert {n: t.shape for n, t in lifted.items()} == {n: torch.Size(s) for n, s in SHAPES.items()}
    torch.testing.assert_close(reference.vector(lifted), v @ u, rtol=1e-11, atol=1e-12)
    assert subspace.project(g).norm() <= reference.vector(g).norm() * (1 + 1e-12)


def test_the_transition_takes_coordinates_of_the_last_basis_to_this_one():
    subspace = _made(_with_singular_values([4.0, 2.0, 1.0]), 3)
    assert not subspace.transition.any()  # there was none before
    for values in ([3.0, 2.0, 1.0], [1.0, 1e-3, 1e-6]):
        old = _columns(subspace)
        subspace.refresh(_with_singular_values(values))
        torch.testing.assert_close(subspace.transition, _columns(subspace).T @ old, rtol=0, atol=1e-9)
    subspace.refresh({n: b + 0 for n, b in subspace.basis.items()})  # the same space: a rotation, never longer
    assert torch.linalg.matrix_norm(subspace.transition, 2) <= 1.0 + 1e-15
    assert subspace.version == 4


def test_refusals():
    grads = _with_singular_values([3.0, 2.0, 1.0])
    with pytest.raises(DPConfigError, match="num_public >= 7"):
        _made(grads, 7)
    with pytest.raises(DPConfigError, match="All public gradients are zero"):
        _made({n: torch.zeros_like(g) for n, g in grads.items()}, 2)
    bad = {n: g.clone() for n, g in grads.items()}
    bad["b"][1, 2] = float("inf")
    with pytest.raises(DPConfigError, match="not finite"):
        _made(bad, 2)
    subspace = _made(grads, 2)
    with pytest.raises(DPConfigError, match="frozen or unfrozen"):
        subspace.refresh({n: g for n, g in grads.items() if n != "b"})
    with pytest.raises(DPConfigError, match="Call refresh"):
        PublicSubspace(2).advance()
    with pytest.raises(DPConfigError, match="rank=0"):
        PublicSubspace(0)
    with pytest.raises(DPConfigError, match="rank 2, not 3. Resume with that rank"):
        PublicSubspace(3).load_state_dict(subspace.state_dict())
    public = _public(tiny.model())
    with pytest.raises(DPConfigError, match="num_public >= 5"):
        RefreshedSubspace(public, rank=5, num_public=4)
    with pytest.raises(DPConfigError, match="more public records"):
        RefreshedSubspace(public, rank=5, num_public=13)
    with pytest.raises(DPConfigError, match="refresh_every=0"):
        RefreshedSubspace(public, rank=2, num_public=4, refresh_every=0)


def _public(model) -> PublicGradients:
    return PublicGradients(model, RecordLosses(model), tiny.records(12), tiny.collate, batch_size=4)


def test_it_is_refreshed_in_the_first_step_and_every_so_many():
    model = tiny.model(dropout=0.2).double()
    subspace = RefreshedSubspace(_public(model), rank=2, num_public=6, refresh_every=3)
    versions = []
    for _ in range(7):
        subspace.advance()
        versions.append(subspace.version)
    assert versions == [1, 1, 1, 2, 2, 2, 3]
    public = _public(model)
    want = None
    for _ in range(3):
        want = reference.top_directions(public.per_record(6), 2)
    v = _columns(subspace)
    torch.testing.assert_close(v @ (v.T @ want), want, rtol=0, atol=1e-9)  # one plane: v has as many columns
    torch.testing.assert_close(v.T @ v, torch.eye(2, dtype=v.dtype), rtol=0, atol=1e-9)
