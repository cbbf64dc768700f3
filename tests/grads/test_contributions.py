"""Norms, inner products and sums of contributions against the materialised gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import Dense, Outer, Rows, Transposed
from hf_dpopt.clipping.products import BLOCK
from hf_dpopt.clipping.record_norms import squared_norms

B, T, P, Q = 4, 6, 5, 3


def squared_norm(contributions, grams=None) -> torch.Tensor:
    """``||sum_i c_i||^2`` per record, (B,), for one parameter."""
    return squared_norms({"": contributions}, grams)[""]


def _materialise(c) -> torch.Tensor:  # (B, P, Q), by the definition of each form
    if isinstance(c, Outer):
        return torch.stack(
            [left.double().T @ right.double() for left, right in zip(c.left_BTP, c.right_BTQ, strict=True)]
        )
    if isinstance(c, Dense):
        return c.grad_B.double()
    if isinstance(c, Transposed):
        return _materialise(c.of).mT
    out = torch.zeros(B, c.num_rows, c.grad_BTD.size(-1), dtype=torch.float64)
    for b, t in itertools.product(range(B), range(c.ids_BT.size(1))):
        out[b, c.ids_BT[b, t]] += c.grad_BTD[b, t].double()
    return out


def _make(kind: str):
    if kind == "outer":
        return Outer(torch.randn(B, T, P, dtype=torch.float64), torch.randn(B, T, Q, dtype=torch.float64))
    if kind == "one-token":
        return Outer(torch.randn(B, 1, P, dtype=torch.float64), torch.randn(B, 1, Q, dtype=torch.float64))
    if kind == "rows":  # repeated ids: their gradients add up before the square
        return Rows(torch.randint(0, P, (B, T + 2)), torch.randn(B, T + 2, Q, dtype=torch.float64), P)
    return Dense(torch.randn(B, P, Q, dtype=torch.float64))


KINDS = ["outer", "one-token", "rows", "dense"]


@pytest.mark.parametrize("kinds", [(k,) for k in KINDS] + list(itertools.combinations_with_replacement(KINDS, 2)))
def test_norms_of_sums(kinds):
    uses = [_make(k) for k in kinds]
    want = sum(_materialise(c) for c in uses).square().sum(dim=(1, 2))
    torch.testing.assert_close(squared_norm(uses), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_sums_and_selection(kind):
    c, factors = _make(kind), torch.rand(B, dtype=torch.float64)
    start = torch.randn(P, Q, dtype=torch.float64)
    total = start.clone()
    c.add_weighted_sum_(total, factors)
    torch.testing.assert_close(total, start + torch.einsum("b,bpq->pq", factors, _materialise(c)))
    keep = torch.tensor([True, False, True, False])
    total = torch.zeros(P, Q, dtype=torch.float64)
    c.select(keep).add_weighted_sum_(total, factors[keep])
    torch.testing.assert_close(total, torch.einsum("b,bpq->pq", factors[keep], _materialise(c)[keep]))


def test_cancelling_tokens_in_bfloat16_keep_their_norm():
    """Almost equal activations, output gradients that sum to almost zero: a bfloat16 Gram matrix goes negative here."""
    left = torch.randn(1, 64, 32)
    left = (left - left.mean(dim=1, keepdim=True)).bfloat16()
    right = (torch.randn(1, 1, 32) + 1e-3 * torch.randn(1, 64, 32)).bfloat16()
    want = (left[0].double().T @ right[0].double()).square().sum().item()
    got = squared_norm([Outer(left, right)]).item()
    assert want * (1 - 1e-4) <= got <= 1.02 * want  # what rounding may leave of the tokens is part of it


def test_two_uses_that_almost_cancel_keep_their_norm():
    """x and -x (1 + 1e-5) through one weight: own squares and cross term agree to ten digits, float32 has seven."""
    left, right = torch.randn(50, 8, 16), torch.randn(50, 8, 12)
    uses = [Outer(left, right), Outer(-left, right * (1 + 1e-5))]
    want = sum(_materialise(c) for c in uses).square().sum(dim=(1, 2))
    got = squared_norm(uses)
    assert (got >= 0).all()
    assert (got.sqrt() / want.sqrt()).min() > 0.9


@pytest.mark.parametrize("num_tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 22])
def test_gram_blocks_that_do_not_divide_the_length(num_tokens):
    left, right = (torch.randn(B, num_tokens, d, dtype=torch.float64) for d in (P, Q))
    use = Outer(left, right)
    torch.testing.assert_close(squared_norm([use]), _materialise(use).square().sum(dim=(1, 2)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kinds", [(k,) for k in KINDS] + list(itertools.product(KINDS, KINDS)))
def test_a_clipped_sum_starts_from_nothing(kinds, monkeypatch):
    # fresh memory may hold anything, the gradients of an earlier step for one
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(*shape, torch.nan, **kwargs))
    uses, factors = [_make(k) for k in kinds], torch.rand(B, dtype=torch.float64)
    parameter = torch.zeros(P, Q, dtype=torch.float64)
    clipped = ClippedSum({"unused": torch.zeros(3), "weight": parameter})
    nobody = torch.zeros(B, dtype=torch.bool)
    clipped.add("weight", uses[0].select(nobody), factors[nobody])
    for use in uses:
        clipped.add("weight", use, factors)
    want = sum(torch.einsum("b,bpq->pq", factors, _materialise(use)) for use in uses)
    result = clipped.result()
    assert list(result) == ["unused", "weight"]
    torch.testing.assert_close(result["weight"], want, rtol=1e-12, atol=1e-12)
    assert not result["unused"].any()
    assert not ClippedSum({"weight": parameter}).result()["weight"].any()
