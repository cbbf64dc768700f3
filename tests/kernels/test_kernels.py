"""The fused kernels against torch in float64: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install -c constraints.txt '.[test]'")

from hf_dpopt.clipping import kernels
from hf_dpopt.clipping.kernels import cross_entropy, layer_norm, outer

pytestmark = pytest.mark.slow

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter has no bfloat16 products; what a kernel does is the same for both.
DTYPES = [torch.bfloat16 if HAS_GPU else torch.float32]
SHAPES = [(3, 2, 5, 7), (2, 63, 40, 24), (2, 64, 64, 64), (3, 65, 130, 50), (2, 300, 40, 150), (17, 8, 16, 8)]


def _factors(shape, dtype):
    B, T, P, Q = shape
    return [torch.randn(B, T, d, device=DEVICE).to(dtype) for d in (P, Q)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_squares(shape, dtype):
    left, right = _factors(shape, dtype)
    squares, energy = outer.squares(left, right)
    want = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(squares.double(), want, rtol=1e-5, atol=0)
    diagonal = (left.double().square().sum(2) * right.double().square().sum(2)).sum(1)
    torch.testing.assert_close(energy.double(), diagonal, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_long_records(dtype):
    """Of 17 rows of tiles: a row that the square root of the number of a tile misses by two is not put right."""
    left, right = _factors((1, 17 * outer.TOKENS, 4, 4), dtype)
    want = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(outer.squares(left, right)[0].double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_over_a_vocabulary_of_one_sign(dtype):
    """Tensor cores truncate what they add up: one long sum of positive numbers would come out too small."""
    left, right = torch.rand(2, 8, 50_257, device=DEVICE).to(dtype), torch.rand(2, 8, 40, device=DEVICE).to(dtype)
    want = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(outer.squares(left, right)[0].double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_factors_that_are_stored_in_another_order(dtype):
    left, right = torch.randn(2, 33, 70, device=DEVICE).to(dtype).mT, torch.randn(70, 2, 20, device=DEVICE).to(dtype)
    right = right.transpose(0, 1)
    want = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(outer.squares(left, right)[0].double(), want, rtol=1e-5, atol=0)
    total, factors = torch.zeros(33, 20, device=DEVICE), torch.rand(2, device=DEVICE)
    outer.add_weighted_sum_(total, left, right, factors)
    want = torch.einsum("b,btp,btq->pq", factors.double(), left.double(), right.double())
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("programs", [1, 12, 1000], ids="{} programs".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weighted_sums(shape, dtype, programs, monkeypatch):
    monkeypatch.setattr(outer, "PROGRAMS", programs)  # all records in one part, some, each in its own
    left, right = _factors(shape, dtype)
    factors = torch.rand(shape[0], device=DEVICE)
    want = torch.einsum("b,btp,btq->pq", factors.double(), left.double(), right.double())
    atol = 1e-5 * want.abs().max().item()
    total = torch.full(want.shape, torch.nan, device=DEVICE)  # overwritten, whatever was there
    outer.add_weighted_sum_(total, left, right, factors, beta=0)
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=atol)
    again = total.clone()
    outer.add_weighted_sum_(total, left, right, factors, beta=0)
    assert torch.equal(total, again)
    outer.add_weighted_sum_(total, left, right, factors)
    torch.testing.assert_close(total.double(), 2 * want, rtol=1e-5, atol=2 * atol)


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 37, 200), (2, 64, 128)], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(shape, grad_dtype):
    x, grad = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE).to(grad_dtype)
    _, mean, rstd = torch.native_layer_norm(x, [shape[-1]], None, None, 1e-5)
    scale, shift = layer_norm.parameter_gradients(grad, x, mean, rstd)
    normal = F.layer_norm(x.double(), [shape[-1]])
    torch.testing.assert_close(scale.double(), (grad.double() * normal).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shift.double(), grad.double().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3, 500, 5001])
def test_cross_entropy(vocabulary, dtype):
    logits = (10 * torch.randn(2, 9, vocabulary, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 9), device=DEVICE)
    labels[0, 3] = labels[1, 0] = -100
    logits[1, 2, : vocabulary // 2], labels[1, 2] = float("-inf"), vocabulary - 1  # words that a model rules out
    logits[0, 1] += 1e4  # a sum of exponentials would overflow, and a stored log-sum-exp lose its digits
    shares = torch.tensor([0.5, 0.25], device=DEVICE)
    reference = logits.double().requires_grad_()
    want = F.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)
    (want * shares.unsqueeze(1)).sum().backward()
    losses, normalisers = cross_entropy.losses(logits, labels)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    cross_entropy.gradient_(logits, labels, shares, normalisers)
    torch.testing.assert_close(
        logits.double(), reference.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows_in_the_loss(bad):
    logits, labels = torch.randn(2, 3, 40, device=DEVICE), torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    logits[1, 2, 7] = bad
    losses, _ = cross_entropy.losses(logits, labels)
    assert losses.isfinite().flatten().tolist() == [True] * 5 + [False]


def test_logits_in_rows_that_do_not_touch():
    wider = torch.randn(2, 5, 60, device=DEVICE)
    logits, labels = wider[..., :40], torch.randint(0, 40, (2, 5), device=DEVICE)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    losses, normalisers = cross_entropy.losses(logits, labels)
    torch.testing.assert_close(losses, want)
    beside = wider[..., 40:].clone()
    cross_entropy.gradient_(logits, labels, torch.ones(2, device=DEVICE), normalisers)
    assert torch.equal(wider[..., 40:], beside)


def test_where_they_cannot_be_built_torch_serves_and_says_so(monkeypatch):
    def no_compiler(*args):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(cross_entropy, "losses", no_compiler)
    kernels._work_on.cache_clear()
    with pytest.warns(UserWarning, match="Failed to find C compiler.*HF_DPOPT_KERNELS=0"):
        assert not kernels._work_on(torch.device(DEVICE))
    kernels._work_on.cache_clear()
    monkeypatch.setenv("HF_DPOPT_KERNELS", "0")
    assert not kernels._work_on(torch.device(DEVICE))
    kernels._work_on.cache_clear()
    monkeypatch.undo()
    assert kernels._work_on(torch.device(DEVICE))
