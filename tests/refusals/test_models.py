"""Models that are refused, and their neighbours that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import nn

from hf_dpopt import DPTrainer, UnsupportedModuleError
from tests.helpers import tiny
from tests.refusals.base import NUM_RECORDS, bert, records, small


def _bert_with(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = bert()
        change(model)
        return model

    return make


def _embedding_with(**values: Any) -> Callable[[], nn.Module]:
    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model.bert.embeddings.word_embeddings, name, value)

    return _bert_with(change)


class _BatchNormedForSequenceClassification(tf.BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.extra_norm = nn.BatchNorm1d(config.hidden_size)


class _ScaledForSequenceClassification(tf.BertForSequenceClassification):
    """Owns a tensor of its own beside its children, as vision models own their class token."""

    def __init__(self, config):
        super().__init__(config)
        self.own_scale = nn.Parameter(torch.ones(()))


EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 1}


def mixtral(**config: Any) -> nn.Module:
    return small(tf.MixtralForCausalLM, **EXPERTS, num_local_experts=2, **config)


def qwen_moe() -> nn.Module:
    sizes = {"num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return small(tf.Qwen2MoeForCausalLM, **EXPERTS, **sizes)


def granite_moe() -> nn.Module:
    return small(tf.GraniteMoeForCausalLM, **EXPERTS, num_local_experts=2)


def _only(make: Callable[[], nn.Module], *fragments: str) -> Callable[[], nn.Module]:
    """The model with these parameters trained and no others."""

    def build() -> nn.Module:
        model = make()
        for name, p in model.named_parameters():
            p.requires_grad_(any(fragment in name for fragment in fragments))
        return model

    return build


def _attention_lora(make: Callable[[], nn.Module]) -> nn.Module:
    return peft.get_peft_model(
        make(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def _adapted(config: peft.PeftConfig) -> Callable[[], nn.Module]:
    return lambda: peft.get_peft_model(bert(), config)


def _initialised_as(how: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
        model.peft_config["default"].init_lora_weights = how  # after the fact: peft wants the data here
        return model

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "device_map": (
        _bert_with(lambda m: setattr(m, "hf_device_map", {"bert": 0, "classifier": 1})),
        "device_map.*Load it on one device",
    ),
    "reentrant checkpointing": (
        _bert_with(lambda m: m.gradient_checkpointing_enable({"use_reentrant": True})),
        "reentrant.*'use_reentrant': False",
    ),
    "reentrant checkpointing by torch's default": (
        _bert_with(lambda m: m.gradient_checkpointing_enable({"preserve_rng_state": True})),
        "reentrant.*'use_reentrant': False",
    ),
    "batch norm": (
        lambda: small(_BatchNormedForSequenceClassification),
        "extra_norm .BatchNorm1d.*Replace it by GroupNorm",
    ),
    "mixtral": (mixtral, "mixture of experts.*Freeze experts and routers"),
    "mixtral router": (_only(mixtral, "mlp.gate.weight"), "mlp.gate.weight.*Freeze experts and routers"),
    "qwen router": (_only(qwen_moe, "mlp.gate.weight"), "mlp.gate.weight.*Freeze experts and routers"),
    "granite router": (_only(granite_moe, "router"), "router.*Freeze experts and routers"),
    "load balancing loss": (
        lambda: _attention_lora(lambda: mixtral(output_router_logits=True)),
        "Set config.output_router_logits = False",
    ),
    "adalora": (
        _adapted(
            peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10, target_modules=["query"], task_type="SEQ_CLS")
        ),
        "AdaLoRA.*Use LoRA",
    ),
    "alora": (
        _adapted(peft.LoraConfig(r=2, target_modules=["query"], alora_invocation_tokens=[3])),
        "^Adapter 'default' is aLoRA, which mixes the tokens of all records. Set alora_invocation_tokens=None.$",
    ),
    "asa": (
        _adapted(peft.AdamssConfig(r=4, num_subspaces=2, target_modules=["query"], task_type="SEQ_CLS", use_asa=True)),
        "freezes parameters while it is trained.*Set use_asa=False",
    ),
    "velora": (
        _adapted(peft.LoraConfig(r=2, target_modules=["query"], velora_config={"num_groups": 4})),
        "VeLoRA.*Set velora_config=None",
    ),
    "eva": (_initialised_as("eva"), "initialised from data.*'eva'.*Use init_lora_weights=True"),
    "max_norm": (_embedding_with(max_norm=1.0), "word_embeddings renormalises.*Set max_norm=None"),
    "scale_grad_by_freq": (_embedding_with(scale_grad_by_freq=True), "word_embeddings.*Set scale_grad_by_freq=False"),
    "sparse": (_embedding_with(sparse=True), "word_embeddings.*Set sparse=False"),
    "tensor beside dropout": (
        lambda: small(_ScaledForSequenceClassification, hidden_dropout_prob=0.1),
        r"^The model \(_ScaledForSequenceClassification\) draws at random.*Set its dropout to 0, or freeze",
    ),
    "gradient hook": (
        _bert_with(lambda m: m.classifier.weight.register_hook(lambda grad: grad)),
        "classifier.weight.*Remove the hook",
    ),
    "post-accumulate hook": (
        _bert_with(lambda m: m.classifier.weight.register_post_accumulate_grad_hook(lambda p: None)),
        "classifier.weight.*Remove the hook",
    ),
    "nothing to train": (_bert_with(lambda m: m.requires_grad_(False)), "no trainable parameter.*LoRA"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, arguments, refused):
    make, mend = MODELS[case]
    model, args, dataset = make(), arguments(), records()
    with refused(mend, UnsupportedModuleError):
        DPTrainer(model, args, train_dataset=dataset)


ALLOWED_MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention LoRA beside frozen experts": lambda: _attention_lora(mixtral),
    "weights-only initialisation": _initialised_as("pissa"),
    "checkpointing without reentrance": _bert_with(lambda m: m.gradient_checkpointing_enable()),
    "checkpointing that was switched off": _bert_with(
        lambda m: (m.gradient_checkpointing_enable({"use_reentrant": True}), m.gradient_checkpointing_disable())
    ),
    "one device": _bert_with(lambda m: setattr(m, "hf_device_map", {"bert": "cpu", "classifier": "cpu"})),
    "tensor of its own": lambda: small(_ScaledForSequenceClassification),
    "frozen tensor of its own": _only(lambda: small(_ScaledForSequenceClassification), "classifier"),
    "frozen scaled embedding": lambda: _only(_embedding_with(scale_grad_by_freq=True), "classifier")(),
}


@pytest.mark.parametrize("case", ALLOWED_MODELS)
def test_neighbours_of_refused_models_are_allowed(case, arguments):
    model = ALLOWED_MODELS[case]()
    trainer = DPTrainer(model, arguments(), train_dataset=records())
    assert trainer.model is model and trainer.plan.num_examples == NUM_RECORDS


def test_a_model_made_by_model_init_is_checked_when_it_is_there(arguments, refused_in_training):
    trainer = DPTrainer(
        None,
        arguments(),
        model_init=lambda: small(_BatchNormedForSequenceClassification),
        train_dataset=records(),
    )
    with refused_in_training("extra_norm.*Replace it by GroupNorm", trainer.model, error=UnsupportedModuleError):
        trainer.train()


def test_a_model_with_tokens_in_the_first_dimension(arguments, refused):
    config = tf.XLNetConfig(vocab_size=tiny.VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=16, num_labels=2)
    args, model, dataset = arguments(), tf.XLNetForSequenceClassification(config), records()
    with refused("XLNet computes with the tokens in the first dimension.*freeze model.transformer"):
        DPTrainer(model, args, train_dataset=dataset)
    model.transformer.requires_grad_(False)  # and the way out works
    assert DPTrainer(model, args, train_dataset=dataset).train().global_step == 2


def test_float16_parameters(arguments):
    with pytest.raises(UnsupportedModuleError, match="float32 or bfloat16"):
        DPTrainer(bert().half(), arguments(), train_dataset=records())
