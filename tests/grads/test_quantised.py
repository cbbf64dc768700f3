"""LoRA on quantised base weights (QLoRA): exact where the base keeps records apart, refused where it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

from hf_dpopt import UnsupportedModuleError, clipped_gradient_sum
from hf_dpopt.huggingface.refusals.model import check_model
from tests.grads.models import FAMILIES, VOCABULARY, batch_for
from tests.reference.clipping import clipped_sum, relative_error

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

BASES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "nf4, twice": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = tf.LlamaConfig(  # quantised in blocks of 64
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantised(folder, **config):
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=tf.BitsAndBytesConfig(**config), dtype=torch.float32
    )


def with_lora(model):
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.mark.parametrize("base", BASES)
def test_lora_on_a_quantised_base_is_exact(base, llama_dir):
    model = with_lora(quantised(llama_dir, **BASES[base]))
    check_model(model)
    batch = batch_for(model)
    got = clipped_gradient_sum(model, batch, clipping_norm=0.05)
    assert relative_error(got, clipped_sum(model, batch, 0.05)) <= 1e-5


def test_outliers_of_one_record_change_the_others_and_are_refused(llama_dir):
    """LLM.int8() with its threshold, here low enough for so small a model; 6.0 is the default."""
    ids = torch.randint(3, 60, (8, 6))
    for threshold, couples in ((0.0, False), (1.0, True)):
        model = quantised(llama_dir, load_in_8bit=True, llm_int8_threshold=threshold).eval()
        with torch.no_grad():
            first = torch.stack([model(torch.stack([ids[0], other])).logits[0] for other in ids[1:]])
        assert (not torch.equal(first, first[:1].expand_as(first))) == couples
    with pytest.raises(UnsupportedModuleError, match="outliers over the whole batch.*llm_int8_threshold=0.0"):
        check_model(with_lora(quantised(llama_dir, load_in_8bit=True)))


@pytest.mark.parametrize("config", [{"quant_method": "fp8"}, SimpleNamespace(quant_method="gptq")])
def test_other_quantisations_are_refused_by_name(config):
    model = FAMILIES["llama"].with_lora()
    model.config.quantization_config = config
    with pytest.raises(UnsupportedModuleError, match="quantised by (fp8|gptq).*load_in_4bit=True"):
        check_model(model)
