"""Makes any config of transformers tiny: one rule per name of a size, and a table of those that need their own."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 96
ORDINARY = 48  # ids from here on are no special token of any tiny config
PAD, BOS, EOS = 0, 1, 2
IMAGE, PATCH = 32, 8
LAYERS = 2

# Name of an integer -> its tiny value. `None` stands for the class's own default, which the constructor then works out.
SIZES: dict[str, Any] = {}


def _sizes(value: Any, *names: str) -> None:
    SIZES.update(dict.fromkeys(names, value))


_sizes(32, "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "d_embed", "emb_dim", "projection_dim", "embedding_size",
       "word_embed_proj_dim", "out_hidden_size", "hidden_dim", "text_hidden_size", "encoder_hidden_size", "output_dim",
       "decoder_hidden_size", "classifier_proj_size", "pooler_output_size", "output_hidden_size", "hidden_size_per_layer_input",
       "projector_hidden_size", "cross_hidden_size", "pooler_hidden_size", "lru_width", "text_embed_dim", "d_text",
       "attention_hidden_size", "projection_size", "head_hidden_size", "backbone_hidden_size", "image_text_hidden_size",
       "adapter_out_dim", "adapter_in_dim", "conv_dim", "model_dim", "tdnn_dim", "patch_embed_hidden_size")  # fmt: skip
_sizes(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
       "attention_heads", "cross_num_attention_heads", "decoder_num_attention_heads", "num_kv_heads",
       "swa_num_attention_heads", "conf_num_attention_heads", "linear_num_heads")  # fmt: skip
_sizes(2, "num_key_value_heads", "cross_num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads")
_sizes(4, "linear_num_value_heads")
_sizes(8, "head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "kv_channels", "d_head",
       "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "swa_head_dim", "attention_head_dim",
       "index_head_dim", "cross_head_dim", "linear_head_dim")  # fmt: skip
_sizes(16, "qk_head_dim", "q_lora_rank", "kv_lora_rank")
_sizes(4, "rotary_dim")
_sizes(48, "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "d_inner", "mlp_dim",
       "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "dim_feedforward", "hidden_dim_ffn",
       "shared_intermediate_size", "dim_ff", "dff", "encoder_intermediate_size", "dense_intermediate_size",
       "speech_encoder_intermediate_size", "projection_intermediate_size", "alignment_intermediate_size",
       "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "decoder_intermediate_size")  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_sizes(LAYERS, *DEPTHS, "encoder_layers", "decoder_layers", "depth", "num_decoder_layers", "num_encoder_layers", "layers",
       "conf_num_hidden_layers", "speech_encoder_layers", "num_attention_layers", "resampler_depth", "t2u_encoder_layers",
       "t2u_decoder_layers", "decoder_num_hidden_layers", "max_window_layers")  # fmt: skip
_sizes(VOCABULARY, "vocab_size", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size", "text_vocab_size",
       "t2u_vocab_size", "unpadded_vocab_size")  # fmt: skip
_sizes(128, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions",
       "max_target_positions", "max_2d_position_embeddings", "max_sequence_length", "seq_length")  # fmt: skip
_sizes(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_sizes(2, "num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")
_sizes(1, "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts", "num_dense_layers",
       "mamba_n_groups", "n_groups", "moe_num_shared_experts", "num_expert_group")  # fmt: skip
_sizes(
    8,
    "sliding_window",
    "sliding_window_size",
    "mamba_chunk_size",
    "chunk_size",
    "local_attention",
    "attention_chunk_size",
)
_sizes(8, "mamba_d_state", "state_size", "ssm_state_size", "time_step_rank")
_sizes(8, "mamba_n_heads", "mamba_num_heads")
_sizes(IMAGE, "image_size", "img_size", "resolution", "crop_size", "pretrain_image_size")
_sizes(PATCH, "patch_size")
_sizes(16, "num_mel_bins", "feature_projection_input_dim_", "input_feat_per_channel")
# model_type -> arguments of the default config (`first`), and of the tiny one beside those of the rules (`then`).
# `None` in `then` takes a value away, so that the constructor works it out.
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 1}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"then": {"attn_layer_indices": [1]}},
    "blt": {"then": {"use_cache": False}},
    "dbrx": {"then": {"attn_config": None, "ffn_config": None}},
    "deepseek_v2": {"then": {"num_experts_per_tok": 2}},
    "dots1": {"then": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}},
    "esm": {"then": {"vocab_size": VOCABULARY}},
    "falcon_h1": {"then": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}},
    "gemma3n_text": {"then": {"num_kv_shared_layers": 0}},
    "granitemoehybrid": {"then": {"layer_types": ["mamba", "attention"]}},
    "jamba": {"then": _JAMBA},
    "layoutlmv3": {"then": {"coordinate_size": 6, "shape_size": 4}},
    "lilt": {"then": {"hidden_size": 48}},
    "lfm2_moe": {"then": {"layer_types": ["conv", "full_attention"]}},
    "mamba2": {"then": _MAMBA2},
    "neomme": {"then": {"head_dim": 16}},
    "nemotron": {"then": {"num_key_value_heads": 2, "head_dim": 8}},
    "recurrent_gemma": {"then": {"block_types": ["recurrent", "attention"]}},
    "reformer": {"then": {"axial_pos_embds": False}},
    "wav2vec2-bert": {"then": {"vocab_size": VOCABULARY}},
    "wav2vec2-conformer": {"then": {"vocab_size": VOCABULARY}},
    "xmod": {"then": {"default_language": "en_XX"}},
}
STDDEV = 0.2  # of fresh weights: with 0.02 the attention of so narrow a model is uniform, and mixing hard to see
DROPOUT = re.compile(r"(drop|layerdrop|noise|jitter|mask_time_prob|mask_feature_prob|apply_spec_augment)")
TOKEN = re.compile(r"((?<!num)_token_id|_token_index|_token_ids|_bos_id|_eos_id)$")
ALWAYS = re.compile(
    r"layer|depth|vocab|expert|image_size|max_position|token"
)  # what even the mild shrinking makes small


def overrides(config: PreTrainedConfig, level: int = 2) -> dict[str, Any]:
    """Arguments of the constructor of `config`'s class that make it tiny.

    Args:
        config: the class's default.
        level: 2 shrinks all sizes; 1 leaves the widths, for configs whose sizes have to fit each other.
    """
    return _Shrinking(level).of(config)


class _Shrinking:
    def __init__(self, level: int):
        self.level = level
        self.token_ids: dict[str, int] = {}

    def of(self, config: PreTrainedConfig) -> dict[str, Any]:
        values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
        made: dict[str, Any] = {}
        layers = self._layers(values)
        for name, value in values.items():
            if isinstance(value, PreTrainedConfig):
                made[name] = {"model_type": value.model_type, **self.of(value)}
            else:
                new = self._value(name, value, values, layers)
                if new is not None:
                    made[name] = new
        return made

    def _layers(self, values: dict[str, Any]) -> list[int] | None:
        """Numbers of the layers that are kept: one of each kind that a list by layer names, and two at least."""
        num = next(
            (
                values[n]
                for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
                if isinstance(values.get(n), int)
            ),
            None,
        )
        if num is None or num <= LAYERS:
            return None
        kept = set(range(LAYERS))
        for value in values.values():
            if isinstance(value, (list, tuple)) and len(value) == num:
                kept |= {value.index(kind) for kind in value if isinstance(kind, (str, int))}
        return sorted(kept) if len(kept) <= 8 else list(range(LAYERS))

    def _value(self, name: str, value: Any, values: dict[str, Any], layers: list[int] | None) -> Any:
        if name in ("initializer_range", "init_std") and isinstance(value, float):
            return max(value, STDDEV)
        if name == "head_dim" and value is None and self.level == 2:
            return SIZES[name]
        if name in ("pad_index", "bos_index", "eos_index"):
            return {"pad_index": PAD, "bos_index": BOS, "eos_index": EOS}[name]
        if DROPOUT.search(name) and isinstance(value, (int, float)):
            return type(value)(0)
        if TOKEN.search(name):
            return self._token(name, value)
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return self._size(name, value, values, layers)
        if self.level == 2 and isinstance(value, dict) and isinstance(value.get("mrope_section"), list):
            num = len(value["mrope_section"])  # they share the head_dim / 2 frequencies
            return {**value, "mrope_section": [SIZES["head_dim"] // 2 - num + 1, *[1] * (num - 1)]}
        if isinstance(value, (list, tuple)) and value:
            return self._list(name, value, values, layers)
        return None

    def _token(self, name: str, value: Any) -> Any:
        if value is None and name != "pad_token_id":
            return None
        fixed = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS}
        made = fixed.get(name) if name in fixed else self.token_ids.setdefault(name, 3 + len(self.token_ids))
        return [made] if isinstance(value, (list, tuple)) and name.endswith("_ids") else made

    def _size(self, name: str, value: int, values: dict[str, Any], layers: list[int] | None) -> Any:
        if self.level < 2 and not ALWAYS.search(name):
            return None
        if name not in SIZES:
            return None
        small = SIZES[name]
        if small == VOCABULARY:
            return VOCABULARY
        if name in DEPTHS and layers and value > LAYERS:
            return len(layers)
        if name.endswith("num_key_value_heads") and value == values.get(name.replace("key_value", "attention")):
            small = SIZES["num_attention_heads"]  # no grouped queries by default, and maybe none allowed
        return min(small, value) if value > 0 else None

    def _list(self, name: str, value: Any, values: dict[str, Any], layers: list[int] | None) -> Any:
        num = next(
            (values[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in values), None
        )
        if layers and len(value) == num:
            return type(value)(value[i] for i in layers)
        if name in ("depths", "stage_num_blocks"):
            return [1] * len(value)
        if self.level < 2:
            return None
        if name in ("hidden_sizes", "encoder_hidden_sizes", "neck_hidden_sizes") or (name == "embed_dim"):
            return [16 * (i + 1) for i in range(len(value))]
        if name == "num_heads":
            return [2] * len(value)
        if name == "conv_dim":
            return [16] * len(value)
        if name == "tdnn_dim":
            return [16] * len(value)
        if name == "image_size":
            return [IMAGE] * len(value)
        if name == "patch_size" and len(value) == 2 and isinstance(value[0], int):
            return [PATCH] * 2
        return None


def tiny_config(config_class: Any, level: int = 2) -> PreTrainedConfig:
    """A config of that class with tiny sizes, no dropout and special tokens below `ORDINARY`."""
    special = SPECIAL.get(config_class.model_type, {})
    default = config_class(**special.get("first", {}))
    config = config_class(**_merged(overrides(default, level), special.get("then", {})))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = PAD  # as T5 does; the checkpoints say it, the defaults do not
    if getattr(config, "pad_token_id", PAD) is None:
        config.pad_token_id = PAD
    return config


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    joined = {name: value for name, value in {**base, **more}.items() if more.get(name, 0) is not None}
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            joined[name] = _merged(base[name], value)
    return joined
