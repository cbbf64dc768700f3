"""Which parameters are trained: frozen parts and adapters."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    GPT2LMHeadModel,
    RobertaForSequenceClassification,
    T5ForConditionalGeneration,
)

from hf_dpopt import DPConfigError
from recipes.models import choose_trained, linear_layers
from recipes.options import ModelArguments
from tests.helpers import tiny


def classifier():
    return tiny.made(BertForSequenceClassification)


def language_model():
    return tiny.made(GPT2LMHeadModel)


def trained(model, task="SEQ_CLS", **flags):
    made = choose_trained(model, ModelArguments(**flags), task)
    return {name for name, p in made.named_parameters() if p.requires_grad}


def test_all_is_trained_by_default():
    assert trained(classifier()) == {name for name, _ in classifier().named_parameters()}


def test_frozen_encoder_leaves_the_head():
    assert trained(classifier(), freeze="encoder") == {"classifier.weight", "classifier.bias"}


def test_a_head_that_is_the_embeddings_cannot_be_trained_alone():
    with pytest.raises(DPConfigError, match="--freeze encoder leaves nothing of GPT2LMHeadModel to train"):
        trained(language_model(), "CAUSAL_LM", freeze="encoder")


def adapted_layers(model, task, **flags):
    """Names of the layers with adapters, without the number of their layer of the network."""
    names = {name for name in trained(model, task, lora_r=2, **flags) if ".lora_A." in name}
    return {name.split(".lora_A.")[0].removeprefix("base_model.model.") for name in names}


def test_adapters_lie_on_all_linear_layers_but_the_head():
    layer = "bert.encoder.layer.0."
    assert adapted_layers(classifier(), "SEQ_CLS") == {
        *(f"{layer}attention.self.{name}" for name in ("query", "key", "value")),
        *(f"{layer}{name}.dense" for name in ("attention.output", "intermediate", "output")),
        "bert.pooler.dense",
    }


def test_adapters_leave_a_head_of_two_layers_to_full_training():
    model = tiny.made(RobertaForSequenceClassification)
    names = trained(model, lora_r=2)
    assert not any("classifier" in name and "lora" in name for name in names)
    assert {name.split("modules_to_save.default.")[1] for name in names if "modules_to_save" in name} == {
        f"{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")
    }


def test_adapters_of_a_language_model_leave_its_head_alone():
    layer = "transformer.h.0."
    assert adapted_layers(language_model(), "CAUSAL_LM") == {
        f"{layer}{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_a_head_inside_the_base_model_is_left_alone():
    model = tiny.made(T5ForConditionalGeneration, tie_word_embeddings=False)
    names = adapted_layers(model, "SEQ_2_SEQ_LM")
    assert "lm_head" not in names and "decoder.block.0.layer.1.EncDecAttention.q" in names


def test_layers_that_attention_never_calls_get_no_adapters():
    model = classifier()
    model.bert.extra = torch.nn.MultiheadAttention(16, 2)
    assert not any("extra" in name for name in linear_layers(model))


def test_named_layers_alone_get_adapters():
    named = {"lora_target_modules": ["query"]}
    assert adapted_layers(classifier(), "SEQ_CLS", **named) == {"bert.encoder.layer.0.attention.self.query"}
