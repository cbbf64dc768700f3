"""Clipped sums on a CUDA device: through the fused kernels, against the loop over records and against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_dpopt import clipped_gradient_sum
from hf_dpopt.clipping import kernels, products
from hf_dpopt.clipping.contributions import Outer
from hf_dpopt.clipping.record_norms import squared_norm
from tests.grads.models import MODELS, batch_for
from tests.reference import clipping as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FAMILIES = ["bert", "roberta-mlm", "gpt2", "llama", "t5", "gpt2-lora", "llama-lora"]


def _to_gpu(model, batch):
    return copy.deepcopy(model).cuda(), {k: v.cuda() for k, v in batch.items()}


def _median_norm(model, batch):
    norms = [reference.norm(grads).item() for grads in reference.record_gradients(model, batch)]
    return sorted(norms)[len(norms) // 2]


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f in MODELS])
def test_equal_to_the_loop(family, dtype, tolerance, engine):
    model = MODELS[family]().to(dtype)
    batch = batch_for(model)
    on_gpu, gpu_batch = _to_gpu(model, batch)
    norm = _median_norm(on_gpu, gpu_batch)
    want = reference.clipped_sum(on_gpu, gpu_batch, norm)
    got = clipped_gradient_sum(on_gpu, gpu_batch, clipping_norm=norm, engine=engine)
    assert reference.relative_error(got, want) <= tolerance


@pytest.mark.parametrize("engine", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f in MODELS])
def test_under_autocast(family, engine):
    model = MODELS[family]()
    on_gpu, batch = _to_gpu(model, batch_for(model))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        norm = _median_norm(on_gpu, batch)
        want = reference.clipped_sum(on_gpu, batch, norm)
        got = clipped_gradient_sum(on_gpu, batch, clipping_norm=norm, engine=engine)
    assert reference.relative_error(got, want) <= 2e-2
    one = {k: v[:1] for k, v in batch.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        alone = clipped_gradient_sum(on_gpu, one, clipping_norm=norm / 10, engine=engine)
    assert reference.norm(alone).item() <= norm / 10 * (1 + 1e-6)


def _first_tokens(outputs, labels):
    """A loss of one's own, that hands back a gradient packed without gaps."""
    logits = outputs.logits.float().contiguous()
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("loss", ["auto", _first_tokens])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_is_no_multiple_of_eight(tied, loss):
    config = GPT2Config(
        vocab_size=1027, n_embd=32, n_layer=2, n_head=2, n_positions=16, tie_word_embeddings=tied, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).cuda()
    ids = torch.randint(0, 1027, (4, 12), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        norm = _median_norm(model, batch)
        want = reference.clipped_sum(model, batch, norm)
        got = clipped_gradient_sum(model, batch, clipping_norm=norm, loss=loss)
    assert reference.relative_error(got, want) <= 2e-2


def test_kernels_and_products_agree(monkeypatch):
    """bfloat16 factors whose tokens almost cancel, which scaled copies in bfloat16 would get wrong."""
    left = torch.randn(6, 64, 96, device="cuda")
    left = (left - left.mean(dim=1, keepdim=True)).bfloat16()
    right = (torch.randn(6, 1, 160, device="cuda") + 1e-2 * torch.randn(6, 64, 160, device="cuda")).bfloat16()
    exact = torch.bmm(left.double().mT, right.double())
    factors = torch.rand(6, device="cuda")
    want = torch.einsum("b,bpq->pq", factors.double(), exact)
    for takes in (True, False):
        monkeypatch.setattr(kernels, "takes", lambda *tensors, takes=takes, **more: takes)
        norms = squared_norm([Outer(left, right)]).double()
        torch.testing.assert_close(norms, exact.square().sum(dim=(1, 2)), rtol=1e-4, atol=0)
        total = torch.empty(96, 160, device="cuda")
        products.add_weighted_sum_(total, left, right, factors, beta=0)
        assert (total - want).norm() / want.norm() < 1e-4
