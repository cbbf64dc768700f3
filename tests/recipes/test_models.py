"""Which parameters are trained: frozen parts and adapters whose first matrix keeps its start."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from hf_dpopt import DPConfigError
from recipes.models import choose_trained
from recipes.options import ModelArguments


def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    )


def language_model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))


def trained(model, task="SEQ_CLS", **flags):
    made = choose_trained(model, ModelArguments(**flags), task)
    return {name for name, p in made.named_parameters() if p.requires_grad}


def test_all_is_trained_by_default():
    assert trained(classifier()) == {name for name, _ in classifier().named_parameters()}


def test_frozen_embeddings():
    left = trained(classifier(), freeze="embeddings")
    assert "classifier.weight" in left and "bert.encoder.layer.0.attention.self.query.weight" in left
    assert not any("_embeddings" in name for name in left) and "bert.embeddings.LayerNorm.weight" in left


def test_frozen_encoder_leaves_the_head():
    assert trained(classifier(), freeze="encoder") == {"classifier.weight", "classifier.bias"}


def test_a_head_that_is_the_embeddings_cannot_be_trained_alone():
    with pytest.raises(DPConfigError, match="--freeze encoder leaves nothing of GPT2LMHeadModel to train"):
        trained(language_model(), "CAUSAL_LM", freeze="encoder")


def test_ffa_lora_trains_the_second_matrix_alone():
    flags = {"lora_r": 2, "lora_target_modules": ["query", "value"]}
    both, second = trained(classifier(), **flags), trained(classifier(), lora_freeze_a=True, **flags)
    assert second == {name for name in both if ".lora_A." not in name} < both
    assert any(".lora_B." in name for name in second)
