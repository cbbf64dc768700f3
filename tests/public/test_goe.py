"""The paper's preconditioner: law of its noise, sensitivity against neighbours that were searched for, and its state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.experimental.goe import GoePreconditioner, gaussian_orthogonal_ensemble
from hf_dpopt.experimental.subspace_accounting import goe_sensitivity
from hf_dpopt.randomness.cipher import make_noise_source
from hf_dpopt.sampling import FixedOrderSampler
from tests.reference import subspace as reference

ALPHA = 1e-6  # two-sided false-alarm probability per case, whatever the key


def _source():
    return make_noise_source("secure", np.random.default_rng().bytes(32))


def _isometric(matrix: torch.Tensor) -> torch.Tensor:
    """Coordinates of a symmetric matrix in which its Frobenius norm is the Euclidean one."""
    k = len(matrix)
    row, column = torch.triu_indices(k, k, offset=1)
    return torch.cat([matrix.diagonal(), math.sqrt(2) * matrix[row, column]])


def test_the_noise_is_isotropic_in_the_frobenius_norm():
    """k (k + 1) / 2 normals of one stddev: chi-square on the energy of the diagonal and of the rest, at level ALPHA.

    Power: variances of off-diagonal entries wrong by the factor 2 that this is about are caught with certainty.
    """
    k, stddev, source = 96, 0.7, _source()
    diagonal, rest, correlation = [], [], []
    for step in range(32):
        noise = gaussian_orthogonal_ensemble(k, stddev, source, step)
        assert torch.equal(noise, noise.T)
        z = _isometric(noise) / stddev
        assert len(z) == k * (k + 1) // 2
        diagonal.append(z[:k]), rest.append(z[k:])
        correlation.append((z[:-1] * z[1:]).sum())
    for part in (torch.cat(diagonal), torch.cat(rest)):
        low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=len(part))
        assert low < part.square().sum().item() < high
    num = 32 * (k * (k + 1) // 2 - 1)
    assert abs(torch.stack(correlation).sum().item()) < scipy.stats.norm.isf(ALPHA / 2) * math.sqrt(num)


def _moved(x: torch.Tensor, e: torch.Tensor) -> float:
    return (reference.absolute_value(x + e) - reference.absolute_value(x)).norm().item()


@pytest.mark.parametrize("t, p", [(1, 1), (7, 1), (7, 7), (9, 4)])
def test_adversarial_neighbours_reach_it(t, p):
    """All gradients long and alike; the record turns those of its steps: |X| turns with them. The constant is not loose."""
    x, e = torch.zeros(t, 3, dtype=torch.float64), torch.zeros(t, 3, dtype=torch.float64)
    x[:p, 0], e[:p, 1] = 1e4, 0.3
    bound = goe_sensitivity(p, 0.3, "zero_out")
    assert 0.9999 * bound < _moved(x, e) <= bound * (1 + 1e-9)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k, t, p", [(2, 3, 1), (3, 4, 2), (4, 4, 4)])
def test_optimised_neighbours_do_not_exceed_it(k, t, p, seed):
    """Gradient ascent on ``|| |X + E| - |X| ||_F`` over X and E from random starts: near the bound, never above."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(t, k, dtype=torch.float64, generator=generator).requires_grad_()
    raw = torch.randn(p, k, dtype=torch.float64, generator=generator).requires_grad_()
    optimizer, most = torch.optim.Adam([x, raw], lr=0.05), 0.0

    def root(y: torch.Tensor) -> torch.Tensor:  # with a ridge, so that its gradient exists
        values, vectors = torch.linalg.eigh(y.T @ y + 1e-9 * torch.eye(k, dtype=torch.float64))
        return vectors * values.clamp(min=1e-12).sqrt() @ vectors.T

    bound = goe_sensitivity(p, 1.0, "zero_out")
    for _ in range(400):
        e = torch.cat([torch.nn.functional.normalize(raw, dim=1), torch.zeros(t - p, k, dtype=torch.float64)])
        moved = (root(x + e) - root(x)).norm()
        optimizer.zero_grad()
        (-moved).backward()
        optimizer.step()
        exact = _moved(x.detach(), e.detach())
        assert exact <= bound * (1 + 1e-9)
        most = max(most, exact)
    assert most > 0.75 * bound  # the search found something


def _make(rank=3, noise_multiplier=2.0, source=None, adjacency="zero_out", **options) -> GoePreconditioner:
    sampler = FixedOrderSampler(num_examples=20, expected_batch_size=10)
    return GoePreconditioner(
        rank, clipping_norm=0.5, noise_multiplier=noise_multiplier, max_participations=sampler.max_participations,
        source=source or _source(), adjacency=adjacency, **options,
    )  # fmt: skip


@pytest.mark.parametrize("adjacency, factor", [("zero_out", 1), ("replace_one", 2)])
def test_a_release_is_the_root_plus_the_noise_of_its_participations(adjacency, factor):
    source = _source()
    preconditioner = _make(source=source, adjacency=adjacency)
    u = torch.randn(5, 3)
    stddevs = []
    for step in range(5):
        preconditioner.accumulate(u[step])
        got = preconditioner.release(step)
        stddev = 2.0 * factor * math.sqrt(2 * (step // 2 + 1)) * 0.5  # two steps an epoch: p = 1, 1, 2, 2, 3
        want = reference.absolute_value(u[: step + 1].double()) + gaussian_orthogonal_ensemble(3, stddev, source, step)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert preconditioner.floor == pytest.approx(math.sqrt(2 * 3) * stddev)
        stddevs.append(stddev)
    assert [r.num_participations for r in preconditioner.releases] == [1, 1, 2, 2, 3]
    assert [r.noise_stddev for r in preconditioner.releases] == pytest.approx(stddevs)


def test_small_directions_keep_their_digits():
    """A root taken of the sum of squares is off by 1e-8 of the largest: more than a record among many moves it."""
    preconditioner, u = _make(noise_multiplier=0.0), torch.tensor([[1e5, 0, 0], [0, 1e-4, 0]], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    for row in u @ turn:
        preconditioner.accumulate(row)
    want = turn.T @ torch.diag(torch.tensor([1e5, 1e-4, 0], dtype=torch.float64)) @ turn
    torch.testing.assert_close(preconditioner.release(0), want, rtol=0, atol=1e-9)


def test_the_noise_of_a_step_hides_one_matrix():
    preconditioner = _make()
    preconditioner.accumulate(torch.ones(3))
    preconditioner.release(4)
    with pytest.raises(AssertionError, match="noise of step 4 was used"):
        preconditioner.release(4)


def test_without_noise_it_is_full_matrix_adagrad():
    preconditioner, u = _make(noise_multiplier=0.0), torch.randn(6, 3, dtype=torch.float64)
    for step in range(6):
        preconditioner.accumulate(u[step])
        preconditioner.release(step)
        want = torch.linalg.pinv(reference.absolute_value(u[: step + 1]), rtol=1e-6) @ u[step]
        torch.testing.assert_close(preconditioner.apply(u[step]), want, rtol=1e-6, atol=1e-8)


def test_directions_within_the_noise_are_dropped():
    k = 40
    preconditioner = _make(rank=k, noise_multiplier=3.0)
    u = torch.zeros(k)
    u[0] = 1e4
    preconditioner.accumulate(u)
    preconditioner.release(0)
    released = u + torch.randn(k)
    update = preconditioner.apply(released)
    assert abs(update[0].item() - 1) < 0.05  # u / |u|
    values = torch.linalg.eigvalsh(preconditioner.matrix)
    kept = int((values > preconditioner.floor).sum())
    assert kept <= 4  # the signal, and rarely the largest of the noise, of 40 directions
    assert update[1:].norm() < 0.6


def test_a_rotation_takes_along_what_is_secret_and_what_was_released():
    preconditioner = _make(noise_multiplier=0.0)
    u = torch.randn(4, 3, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    for step in range(2):
        preconditioner.accumulate(u[step])
    preconditioner.release(0)
    preconditioner.rotate(turn)
    torch.testing.assert_close(preconditioner.matrix, turn @ reference.absolute_value(u[:2]) @ turn.T)
    preconditioner.accumulate(u[2])
    stacked = torch.cat([u[:2] @ turn.T, u[2:3]])
    torch.testing.assert_close(preconditioner.release(1), reference.absolute_value(stacked), rtol=1e-9, atol=1e-9)


def test_refusals():
    with pytest.raises(DPConfigError, match="bounds nothing"):
        GoePreconditioner(2, clipping_norm=0.0, noise_multiplier=1.0, max_participations=lambda t: t, source=_source())
    with pytest.raises(DPConfigError, match="zero_out"):
        _make(adjacency="nobody")
    with pytest.raises(DPConfigError, match="noise_multiplier=-1"):
        _make(noise_multiplier=-1.0)
    with pytest.raises(DPConfigError, match="rank=0"):
        _make(rank=0)
