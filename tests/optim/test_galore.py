"""Adam in the subspace of the strongest directions of released gradients."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import scipy.stats
import torch
from torch import nn

from hf_dpopt.optim import DPAdamBC, DPAdamW
from hf_dpopt.optim.galore import DPGaLore, projector
from hf_dpopt.postprocess import IndependentNoise
from tests.optim.test_adam import ALPHA, LRS, VARIANCES, train, weights_and_gradients
from tests.reference import optim as reference
from tests.reference.optim import ExponentialAverage, StepNoise

RANK = 3
SHAPES = [(6, 11), (11, 6), (7, 7), (3, 20), (9,), (4, 4, 4)]  # the first three are projected


@pytest.mark.parametrize("filter_beta, inner", [(None, "adamw"), (0.6, "adamw"), (None, "adam_bc"), (0.6, "adam_bc")])
def test_large_matrices_move_in_the_subspace_and_the_rest_as_adam(filter_beta, inner):
    weights, gradients = weights_and_gradients(torch.float64, SHAPES)
    before = [w.detach().clone() for w in weights]
    options = dict(betas=(0.8, 0.95), eps=1e-3)
    low_pass = None if filter_beta is None else ExponentialAverage(filter_beta, torch.float64)
    in_subspace = dict(rank=RANK, refresh_every=5, scale=0.5)
    optimizer = DPGaLore(
        [{"params": weights[::2], "weight_decay": 0.3}, {"params": weights[1::2]}],
        lr=9.0,
        inner=inner,
        noise=StepNoise(VARIANCES) if inner == "adam_bc" else None,
        filter=low_pass,
        **in_subspace,
        **options,
    )
    train(optimizer, weights, gradients)
    if inner == "adam_bc":
        options["variances"] = VARIANCES
    for i, (w, start, of_w) in enumerate(zip(weights, before, gradients, strict=True)):
        slow = dict(lrs=LRS, weight_decay=0.3 * (i % 2 == 0), filter_beta=filter_beta, **options)
        if i < 3:
            expected = reference.galore(start, of_w, **slow, **in_subspace)
        else:
            expected = reference.adam(start, of_w, **slow)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-6, atol=1e-6, msg=lambda m, i=i: f"{SHAPES[i]}: {m}")


@pytest.mark.parametrize("inner, cls", [("adamw", DPAdamW), ("adam_bc", DPAdamBC)])
def test_where_nothing_is_projected_it_is_the_inner_optimizer_to_the_last_bit(inner, cls):
    weights, gradients = weights_and_gradients()
    theirs = [nn.Parameter(w.detach().clone()) for w in weights]
    options = dict(lr=0.1, weight_decay=0.1, noise=IndependentNoise(0.5))
    train(DPGaLore(weights, rank=100, inner=inner, **options), weights, gradients)
    train(cls(theirs, **options), theirs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (12, 12), (12, 9000), (9000, 12)])
def test_the_projector_is_that_of_a_full_svd(shape):
    """The last two are wider than what is widened to float64 at a time."""
    g = torch.randn(shape)
    p = projector(g, 5)
    assert p.shape == (min(shape), 5) and p.dtype == g.dtype and p.untyped_storage().nbytes() == 4 * 5 * min(shape)
    torch.testing.assert_close(p.mT @ p, torch.eye(5), rtol=0, atol=1e-5)
    torch.testing.assert_close(p.double(), reference.top_singular_vectors(g, 5), rtol=0, atol=1e-4)
    assert (p.gather(0, p.abs().argmax(dim=0, keepdim=True)) > 0).all()


def test_projected_noise_has_the_variance_of_the_noise_except_at_a_refresh():
    """Chi-square on the energy at level ALPHA, whatever the seed; P is a function of the first step's noise alone.

    At the refresh it selects that noise: the energy is above any that unselected noise reaches with probability
    1 - ALPHA, and below the documented (1 + sqrt(m / n))^2 with a margin for a finite matrix at level ALPHA.
    """
    m, n, rank, stddev, num_steps = 40, 160, 8, 0.01, 30
    w, low_pass = nn.Parameter(torch.zeros(m, n)), ExponentialAverage(0.5)
    optimizer = DPGaLore([w], lr=0.1, rank=rank, refresh_every=num_steps, filter=low_pass)
    train(optimizer, [w], [[torch.randn(m, n) * stddev for _ in range(num_steps)]], [0.1] * num_steps)
    at_refresh, *later = [(seen["0"].double() / stddev).square().sum().item() for seen in low_pass.seen]
    low, high = scipy.stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=rank * n * len(later))
    assert low < sum(later) < high
    largest = math.sqrt(m) + math.sqrt(n) + math.sqrt(2 * math.log(1 / ALPHA))
    assert scipy.stats.chi2.ppf(1 - ALPHA, df=rank * n) < at_refresh < rank * largest**2


SCRIPT = """
import hashlib, torch
from hf_dpopt.optim.galore import DPGaLore
generator = torch.Generator().manual_seed(5)
weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((48, 200), (200, 48), (5,))]
optimizer = DPGaLore(weights, lr=0.1, rank=6, refresh_every=2)
for _ in range(5):
    for w in weights:
        w.grad = torch.randn(w.shape, generator=generator)
    optimizer.step()
print(hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_compute_the_same_bits(repo):
    """As two ranks do, which hold the same released gradients and never compare their weights."""
    digests = [subprocess.check_output([sys.executable, "-c", SCRIPT], cwd=repo, text=True) for _ in range(2)]
    assert digests[0] == digests[1] and len(digests[0].strip()) == 64


@pytest.mark.parametrize(
    "options, match",
    [
        ({"rank": 0}, "rank=0 is not a positive count"),
        ({"rank": 2.0}, "rank=2.0 is not a positive count"),
        ({"refresh_every": 0}, "refresh_every=0 is not a positive count"),
        ({"scale": -1.0}, "scale=-1.0 is out of range"),
        ({"inner": "sgd"}, "inner='sgd' is unknown. Use one of: 'adamw', 'adam_bc'"),
    ],
)
def test_galore_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        DPGaLore([nn.Parameter(torch.zeros(1))], lr=0.1, **{"rank": 4, **options})
