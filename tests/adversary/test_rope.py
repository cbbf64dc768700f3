"""Rotary embeddings that follow the longest record of a batch, hidden in the config of a part of the model."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from hf_dpopt.huggingface.refusals.model import check_model
from tests.adversary.harness import REFUSALS, assert_refused, making
from tests.helpers import tiny

ORIGINAL = 8  # positions the model was trained for; longer batches get other frequencies
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
TEXT = dict(
    vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=ORIGINAL, pad_token_id=0,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


def _llava(rope: dict) -> torch.nn.Module:
    text = tf.LlamaConfig(**TEXT, rope_parameters=rope)
    config = tf.LlavaConfig(
        text_config=text, vision_config=tf.CLIPVisionConfig(**VISION), image_token_index=tiny.VOCABULARY - 1
    )
    model = tf.LlavaForConditionalGeneration(config)
    for name, p in model.named_parameters():
        p.requires_grad_("language_model.layers" in name)
    return model


def _records() -> list[dict]:
    torch.manual_seed(0)
    lengths = [3, 4, 5, 40]
    rows = [torch.randint(3, tiny.VOCABULARY - 1, (n,)).tolist() for n in lengths]
    return [{"input_ids": ids, "label": ids} for ids in rows]


def _collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = tiny.collate([row | {"label": 0} for row in rows])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"labels": labels}


def test_dynamic_positions_inside_a_text_config_are_refused(tmp_path):
    """One record of 40 tokens changes the frequencies, and with them the gradients of all short ones."""
    make = making(lambda: _llava(DYNAMIC), data_collator=_collate)
    assert_refused(make, _records(), tmp_path, match="dynamic depends on the longest record.*another rope_type")


def _qwen_vl() -> torch.nn.Module:
    text = TEXT | {"rope_parameters": DYNAMIC | {"mrope_section": [1, 1, 2]}}
    vision = dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, patch_size=4)
    return tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(text_config=text, vision_config=vision))


def _gemma3() -> torch.nn.Module:
    rope = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TEXT | {"num_hidden_layers": 2}, rope_parameters=rope))


def _as_dict() -> torch.nn.Module:
    """A config of remote code may keep the settings of its halves as dicts in lists."""
    model = tiny.model()
    model.config.halves = [{"of_text": {"decoder": {"rope_scaling": {"type": "longrope"}}}}]
    return model


def _module_alone() -> torch.nn.Module:
    """The config was edited after the model was made: the modules still do what they were made for."""
    model = _llava(DYNAMIC)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model.config.text_config.rope_parameters = rope
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "rope_parameters"):
            module.config.rope_parameters = rope
    return model


def _class_of_remote_code() -> torch.nn.Module:
    class LlamaDynamicNTKScalingRotaryEmbedding(torch.nn.Module):
        pass

    model = tiny.model()
    model.bert.rotary = LlamaDynamicNTKScalingRotaryEmbedding()
    return model


@pytest.mark.parametrize(
    "make", [lambda: _llava(DYNAMIC), _qwen_vl, _gemma3, _as_dict, _module_alone, _class_of_remote_code],
    ids=["text_config", "multimodal", "by layer type", "dicts in lists", "modules alone", "class"],
)  # fmt: skip
def test_it_is_found_in_whatever_depth(make):
    with pytest.raises(REFUSALS, match="(dynamic|longrope).*depends on the longest record"):
        check_model(make())


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_static_positions_pass(kind):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0} | (more if kind == "llama3" else {})
    check_model(_llava(rope))
