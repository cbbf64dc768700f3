"""Clipped sums on a CUDA device: through the fused kernels, against the loop over records and against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_dpopt import clipped_gradient_sum
from hf_dpopt.clipping import kernels, products
from hf_dpopt.clipping.contributions import Outer
from hf_dpopt.clipping.record_norms import squared_norms
from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness import chacha
from hf_dpopt.randomness.chacha import COUNTER, NORMALS, ChaCha20Gaussian
from hf_dpopt.randomness.source import Part
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
    kept = torch.stack([Outer(left, right).rounding_of(b) for b in range(6)]).double()  # what rounding may have left
    factors = torch.rand(6, device="cuda")
    want = torch.einsum("b,bpq->pq", factors.double(), exact)
    for takes in (True, False):
        monkeypatch.setattr(kernels, "takes", lambda *tensors, takes=takes, **more: takes)
        norms = squared_norms({"w": [Outer(left, right)]})["w"].double()
        torch.testing.assert_close(norms, exact.square().sum(dim=(1, 2)) + kept, rtol=1e-5, atol=0)
        total = torch.empty(96, 160, device="cuda")
        products.add_weighted_sum_(total, left, right, factors, beta=0)
        assert (total - want).norm() / want.norm() < 1e-4


# --- noise: the words of the kernel, and every range, are in test_noise_kernel.py, which runs on a GPU too ---


def test_the_noise_of_a_step_is_drawn_on_the_device_and_is_the_cpus():
    """To one unit in the last place of float32, or 1e-14 near zero; a tensor for each kernel launch."""
    key, shapes = bytes(range(32)), {"a": (1000, 1003), "b": (7,), "c": (), "d": (0, 5)}
    assert chacha.is_drawn_on(torch.device("cuda"))
    here, there = {n: torch.zeros(s) for n, s in shapes.items()}, {n: torch.zeros(s).cuda() for n, s in shapes.items()}
    for sums in (here, there):
        independent_noise(0.9).stream(ChaCha20Gaussian(key), 1.3).add_(sums, 5)
    for name, want in here.items():
        torch.testing.assert_close(there[name].cpu(), want, rtol=2.0**-22, atol=1e-14)
    differing = sum(int((there[name].cpu() != want).sum()) for name, want in here.items())
    assert differing < 100, f"{differing} of a million normals differ in their last bit, 1e-8 of them were expected"


def test_no_tensor_of_the_noise_is_made():
    sums = torch.zeros(2**26, device="cuda")
    source = ChaCha20Gaussian(bytes(32))
    source.add_to({0: sums[:64]}, stddev=1.0, step=0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    source.add_to({0: sums}, stddev=1.0, step=1)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    assert abs(sums.double().square().mean().item() - 1) < 1e-3


def test_elements_beyond_32_bits_are_drawn():
    """A part of a tensor of 2^35 elements, around the change of nonce."""
    source, first = ChaCha20Gaussian(bytes(32)), COUNTER * NORMALS - 12345
    total = torch.zeros(30_000, device="cuda")
    source.add_parts([Part(3, first, total)], stddev=1.0, step=1)
    want = source.normal_range(first, 30_000, step=1, tensor=3)
    torch.testing.assert_close(total.cpu(), want, rtol=2.0**-22, atol=1e-14)
