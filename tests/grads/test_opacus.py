"""Clipped sums beside those of Opacus' ghost clipping, an implementation by others, on models that both support."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.thresholds import FlatClipping

fast = pytest.importorskip("opacus.grad_sample.grad_sample_module_fast_gradient_clipping")
NUM_RECORDS, TOKENS, WIDTH, VOCABULARY = 6, 7, 8, 20


def made() -> nn.Module:
    """Embedding, LayerNorm and linear layers over tokens: the layers of a transformer, without its attention."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, 3)
    ).double()  # fmt: skip


def losses(model: nn.Module, words_BT: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words_BT).mean(1), labels_B, reduction="none")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_clipped_sum_is_that_of_opacus(engine):
    generator = torch.Generator().manual_seed(1)
    words_BT = torch.randint(VOCABULARY, (NUM_RECORDS, TOKENS), generator=generator)
    labels_B = torch.randint(3, (NUM_RECORDS,), generator=generator)
    model = made()
    squares = torch.stack([
        sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        for loss in losses(model, words_BT, labels_B)
    ])  # fmt: skip
    clip = float(squares.sqrt().median())  # half of the records are clipped

    ours = make_engine(model, FlatClipping(clipping_norm=clip), engine)
    sums = ours.empty_sum()
    ours.add_clipped_sum(sums, lambda: losses(model, words_BT, labels_B), NUM_RECORDS)

    other = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fast.GradSampleModuleFastGradientClipping(
            other, strict=False, loss_reduction="sum", max_grad_norm=clip, use_ghost_clipping=True
        )
        of_records = losses(module, words_BT, labels_B)
        of_records.sum().backward(retain_graph=True)
        factors_B = module.get_clipping_coef()
        module.disable_hooks()
        other.zero_grad()
        (factors_B * of_records).sum().backward()
    assert 0 < (factors_B < 1).sum() < NUM_RECORDS
    for name, p in other.named_parameters():
        assert torch.allclose(sums.result()[name], p.grad, rtol=1e-5, atol=1e-7), name
