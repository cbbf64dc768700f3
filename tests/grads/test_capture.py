"""What cannot be captured is refused by name, before anything runs."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.grads.capture import Capture
from hf_dpopt.grads.rules import broadcast
from tests.grads.models import bert, gpt2, llama


def test_trainable_experts_are_refused_and_a_frozen_mixture_is_not():
    config = tf.MixtralConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = tf.MixtralForCausalLM(config)
    with pytest.raises(UnsupportedModuleError, match="mixture of experts.*Freeze experts and routers"):
        Capture(model)
    for name, p in model.named_parameters():
        p.requires_grad_(".mlp." not in name)
    Capture(model)


def test_trainable_token_rows_are_refused_by_name():
    config = peft.LoraConfig(r=4, target_modules=["query"], trainable_token_indices=[3, 4])
    with pytest.raises(UnsupportedModuleError, match="trainable_tokens_delta"):
        Capture(peft.get_peft_model(bert(), config))


def test_dora_on_an_embedding_is_refused_by_name():
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["wte"], use_dora=True))
    ids = torch.randint(3, 60, (2, 4))
    with pytest.raises(UnsupportedModuleError, match="wte.*DoRA"):
        clipped_gradient_sum(model, {"input_ids": ids, "labels": ids}, clipping_norm=1.0)


class _MovesTokens(nn.Module):
    """Not a broadcast: the weight of one token reaches its neighbour."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight).roll(1, dims=0)


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        (llama().model.norm, True),
        (tf.models.gemma.modeling_gemma.GemmaRMSNorm(8), True),
        (tf.models.t5.modeling_t5.T5LayerNorm(8), True),
        (nn.LayerNorm(8), False),
        (nn.BatchNorm1d(8), False),
        (nn.GroupNorm(2, 8), False),
        (nn.PReLU(8), False),
        (nn.Linear(8, 8), False),
        (_MovesTokens(), False),
        (_Unused(), False),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)
def test_layers_that_broadcast_are_found_by_trying(module, is_one):
    assert broadcast.broadcasts(module) is is_one


def test_trying_leaves_the_layer_as_it_was():
    norm = llama().model.norm
    before, parameter = norm.weight.detach().clone(), norm.weight
    broadcast.broadcasts(norm)
    assert norm.weight is parameter and torch.equal(norm.weight, before)


def test_flattened_tokens_that_are_not_in_order_are_refused():
    model = llama()
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: inner(x.flatten(0, 1)).view(x.shape)
    ids = torch.randint(3, 60, (3, 4))
    with pytest.raises(UnsupportedModuleError, match="first dimension 12, but the batch has 3 records"):
        clipped_gradient_sum(model, {"input_ids": ids, "labels": ids}, clipping_norm=1.0)
