"""Tiny models of the families and adapters people finetune, with batches that have uneven lengths.

`FAMILIES`, `ADAPTERS` and `ADAPTERS_RUN_WHOLE` are the rows of docs/support.md (`python -m tests.grads.support_table` writes it).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as tf
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from torch import nn

VOCABULARY, NUM_RECORDS, NUM_TOKENS = 60, 5, 12
LENGTHS = [12, 7, 3, 9, 2]
END = 2  # BART classifies at this token
Make = Callable[[], nn.Module]

_ENCODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=80, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_DECODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0,
)  # fmt: skip
_BART: dict[str, Any] = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=80, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, decoder_start_token_id=END,
)  # fmt: skip


def _made(model: Any, sizes: dict[str, Any], **more: Any) -> Make:
    return lambda: model(model.config_class(**sizes | more))


_DISTIL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0,
    seq_classif_dropout=0.0, max_position_embeddings=80,
)  # fmt: skip
_DEBERTA: dict[str, Any] = _ENCODER | dict(
    relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], share_att_key=True,
    norm_rel_ebd="layer_norm", position_biased_input=False, pooler_hidden_size=32, pooler_dropout=0.0,
)  # fmt: skip
_GPT2: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=80, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
_OPT: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=2,
    max_position_embeddings=80, dropout=0.0, word_embed_proj_dim=16,
)  # fmt: skip
_NEOX: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2,
)  # fmt: skip
_T5: dict[str, Any] = dict(
    vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip
bert = _made(tf.BertForSequenceClassification, _ENCODER)
roberta = _made(tf.RobertaForSequenceClassification, _ENCODER, pad_token_id=1)
albert = _made(
    tf.AlbertForSequenceClassification, _ENCODER, num_hidden_layers=3, embedding_size=16, classifier_dropout_prob=0.0
)
gpt2 = _made(tf.GPT2LMHeadModel, _GPT2)
llama = _made(tf.LlamaForCausalLM, _DECODER, tie_word_embeddings=True)
t5 = _made(tf.T5ForConditionalGeneration, _T5)


def _fill(model: nn.Module) -> nn.Module:
    """A fresh LoRA B is 0 and fresh (IA)^3 scales are 1: values of which some gradients are 0 or special."""
    special = ("lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l")
    for name, p in model.named_parameters():
        if p.requires_grad and any(kind in name for kind in special):
            nn.init.normal_(p, std=0.1)
    return model


def with_adapter(make: Make, config: Callable[[], Any]) -> Make:
    return lambda: _fill(get_peft_model(make(), config()))


def lora(make: Make, targets: list[str], **settings: Any) -> Make:
    return with_adapter(make, lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings))


def _only_biases() -> nn.Module:
    model = roberta()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name or "classifier" in name)
    return model


def _xlora() -> nn.Module:
    """A classifier that mixes two saved adapters token by token, and the adapters, trained together."""
    saved = lora(llama, ["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("0", "1"):
            saved().save_pretrained(f"{folder}/{name}")
        model = llama()
        model.config.use_cache = False  # X-LoRA asks for that
        return get_peft_model(model, peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=32, xlora_depth=2, xlora_size=8, xlora_dropout_p=0.0,
            use_trainable_adapters=True, adapters={name: f"{folder}/{name}" for name in ("0", "1")},
        ))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the support table."""

    label: str
    full: Make
    targets: list[str]
    why: str = ""

    @property
    def with_lora(self) -> Make:
        classifies = "Sequence" in type(self.full()).__name__
        head = ["classification_head" if "bart" in self.label.lower() else "classifier"] if classifies else None
        return lora(self.full, self.targets, modules_to_save=head)


FAMILIES: dict[str, Family] = {
    "bert": Family("BERT", bert, ["query", "value"]),
    "roberta": Family("RoBERTa", roberta, ["query", "value", "dense"]),
    "roberta-mlm": Family(
        "RoBERTa, masked LM", _made(tf.RobertaForMaskedLM, _ENCODER, pad_token_id=1), ["query"], "tied head"
    ),
    "distilbert": Family("DistilBERT", _made(tf.DistilBertForSequenceClassification, _DISTIL), ["q_lin", "v_lin"]),
    "albert": Family("ALBERT", albert, ["query"], "one layer used many times"),
    "deberta-v2": Family(
        "DeBERTa-v2 / v3",
        _made(tf.DebertaV2ForSequenceClassification, _DEBERTA),
        ["query_proj", "key_proj"],
        "relative embeddings of the batch; `pos_dropout` has to be 0 (p = 0 on those modules): records share its mask",
    ),
    "mpnet": Family(
        "MPNet",
        _made(tf.MPNetForSequenceClassification, _ENCODER, pad_token_id=1),
        ["attn.q", "attn.v"],
        "relative bias of the batch",
    ),
    "gpt2": Family("GPT-2", gpt2, ["c_attn", "mlp.c_proj"], "Conv1D, tied head, broadcast positions"),
    "opt": Family(
        "OPT",
        _made(tf.OPTForCausalLM, _OPT),
        ["q_proj", "fc1", "fc2"],
        "flattened tokens, offset positions, projections",
    ),
    "gpt-neox": Family("GPT-NeoX, Pythia", _made(tf.GPTNeoXForCausalLM, _NEOX), ["query_key_value"]),
    "llama": Family("Llama", llama, ["q_proj", "down_proj"], "RMSNorm, grouped queries, tied head"),
    "llama-untied": Family("Llama, untied", _made(tf.LlamaForCausalLM, _DECODER), ["q_proj"]),
    "qwen2": Family("Qwen2", _made(tf.Qwen2ForCausalLM, _DECODER, tie_word_embeddings=True), ["q_proj"]),
    "qwen3": Family("Qwen3", _made(tf.Qwen3ForCausalLM, _DECODER), ["q_proj"], "norms of queries and keys"),
    "gemma": Family("Gemma", _made(tf.GemmaForCausalLM, _DECODER), ["q_proj"], "scaled words, 1 + weight"),
    "gemma2": Family("Gemma 2", _made(tf.Gemma2ForCausalLM, _DECODER), ["q_proj"], "softcapped logits"),
    "mistral": Family("Mistral", _made(tf.MistralForCausalLM, _DECODER), ["q_proj"]),
    "t5": Family("T5", t5, ["q", "v"], "relative bias of the batch, shared embeddings, cross-attention"),
    "bart": Family(
        "BART", _made(tf.BartForConditionalGeneration, _BART), ["q_proj", "fc1"], "shared embeddings, cross-attention"
    ),
    "bart-classifier": Family("BART, classification", _made(tf.BartForSequenceClassification, _BART), ["q_proj"]),
}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A row of the table of adapters."""

    label: str
    make: Make


_VIRTUAL: dict[str, Any] = dict(num_virtual_tokens=4)
ADAPTERS: dict[str, Adapter] = {
    "lora-embedding": Adapter("LoRA on embeddings", lora(gpt2, ["wte", "c_attn"], fan_in_fan_out=True)),
    "lora-padded-embedding": Adapter(
        "LoRA on embeddings with a padding row", lora(bert, ["word_embeddings"], modules_to_save=["classifier"])
    ),
    "modules-to-save": Adapter(
        "`modules_to_save`, embeddings included", lora(bert, ["query"], modules_to_save=["classifier", "word_embeddings"])
    ),
    "rslora": Adapter("rank-stabilised LoRA", lora(llama, ["q_proj", "down_proj"], use_rslora=True)),
    "lora-bias": Adapter("LoRA with biases", lora(bert, ["query"], bias="lora_only", lora_bias=True)),
    "qa-lora": Adapter("QA-LoRA", lora(llama, ["q_proj", "down_proj"], use_qalora=True, qalora_group_size=8)),
    "bd-lora": Adapter(
        "BD-LoRA", lora(llama, ["q_proj", "down_proj"], use_bdlora=dict(
            target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2
        )),
    ),
    "mica": Adapter("MiCA", lora(llama, ["q_proj", "down_proj"], init_lora_weights="mica")),
    "dora": Adapter("DoRA", lora(llama, ["q_proj", "down_proj"], use_dora=True)),
    "dora-bias": Adapter("DoRA on layers with a bias", lora(bert, ["query", "dense"], use_dora=True)),
    "dora-conv1d": Adapter("DoRA on Conv1D", lora(gpt2, ["c_attn"], use_dora=True, fan_in_fan_out=True)),
    "ia3": Adapter(
        "(IA)^3",
        with_adapter(bert, lambda: peft.IA3Config(
            target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"], task_type="SEQ_CLS"
        )),
    ),
    "ia3-conv1d": Adapter(
        "(IA)^3 on Conv1D",
        with_adapter(gpt2, lambda: peft.IA3Config(
            target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
        )),
    ),
    "prompt": Adapter(
        "prompt tuning",
        with_adapter(gpt2, lambda: peft.PromptTuningConfig(**_VIRTUAL, task_type="CAUSAL_LM")),
    ),
    "prompt-classifier": Adapter(
        "prompt tuning, classification",
        with_adapter(bert, lambda: peft.PromptTuningConfig(**_VIRTUAL, task_type="SEQ_CLS")),
    ),
    "prompt-multitask": Adapter(
        "multitask prompt tuning, with `task_ids` in the records",
        with_adapter(gpt2, lambda: peft.MultitaskPromptTuningConfig(
            **_VIRTUAL, task_type="CAUSAL_LM", num_tasks=2, num_ranks=1
        )),
    ),
    "p-tuning": Adapter(
        "P-tuning",
        with_adapter(gpt2, lambda: peft.PromptEncoderConfig(
            **_VIRTUAL, task_type="CAUSAL_LM", encoder_hidden_size=16
        )),
    ),
    "prefix": Adapter(
        "prefix tuning", with_adapter(gpt2, lambda: peft.PrefixTuningConfig(**_VIRTUAL, task_type="CAUSAL_LM"))
    ),
    "prefix-projected": Adapter(
        "prefix tuning with a projection",
        with_adapter(llama, lambda: peft.PrefixTuningConfig(
            **_VIRTUAL, task_type="CAUSAL_LM", prefix_projection=True, encoder_hidden_size=16
        )),
    ),
    "bitfit": Adapter("BitFit (biases only)", _only_biases),
    "xlora": Adapter("X-LoRA, its adapters trained, too", _xlora),
    "ln-tuning": Adapter(
        "LN tuning",
        with_adapter(bert, lambda: peft.LNTuningConfig(target_modules=["LayerNorm"], task_type="SEQ_CLS")),
    ),
}  # fmt: skip

_ENCODER_LAYERS = ("query", "value")
_WHOLE: dict[str, tuple[str, dict[str, Any]]] = {  # kind of peft -> its name in the table, and its options
    "ADAMSS": ("AdaMSS", dict(r=8, num_subspaces=2)),
    "BEFT": ("BEFT", {}),
    "BOFT": ("BOFT", dict(boft_block_size=4)),
    "C3A": ("C3A", dict(block_size=4)),
    "DEFT": ("DEFT", dict(r=2)),
    "DELORA": ("DeLoRA", dict(r=2)),
    "FOURIERFT": ("FourierFT", dict(n_frequency=20)),
    "FROD": ("FRoD", dict(progressbar=False)),
    "GLORA": ("GLoRA", dict(r=2)),
    "GRALORA": ("GraLoRA", dict(r=2, gralora_k=2)),
    "HIRA": ("HiRA", dict(r=2)),
    "HRA": ("HRA", dict(r=2)),
    "LOHA": ("LoHa", dict(r=2)),
    "LOKR": ("LoKr", dict(r=2)),
    "MISS": ("MiSS", dict(r=2)),
    "OFT": ("OFT", dict(oft_block_size=4)),
    "PEANUT": ("PEANuT", dict(r=2)),
    "PSOFT": ("PSOFT", dict(r=2)),
    "RANDLORA": ("RandLoRA", dict(r=2)),
    "ROAD": ("RoAd", dict(group_size=2)),
    "SHIRA": ("SHiRA", dict(r=2)),
    "SUPERTUNING": ("SuperTuning", {}),
    "TINYLORA": ("TinyLoRA", dict(r=2)),
    "TRAINABLE_TOKENS": ("trainable tokens", dict(token_indices=[*range(3, 40)], target_modules=["word_embeddings"])),
    "UNILORA": ("Uni-LoRA", dict(r=2, theta_d_length=32)),
    "VBLORA": ("VB-LoRA", dict(r=2, num_vectors=4, vector_length=4)),
    "VERA": ("VeRA", dict(r=2)),
    "WAVEFT": ("WaveFT", dict(n_frequency=20)),
}  # fmt: skip


def _whole(kind: str, **options: Any) -> Make:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]]
    targets = {"target_modules": list(_ENCODER_LAYERS)} | options
    return with_adapter(bert, lambda: config(task_type="SEQ_CLS", **targets))


# Their layers are run whole, a record at a time: exact by one rule, whatever they compute.
ADAPTERS_RUN_WHOLE = {
    **{kind.lower(): Adapter(label, _whole(kind, **options)) for kind, (label, options) in _WHOLE.items()},
    "adaption-prompt": Adapter(
        "LLaMA-Adapter (adaption prompt)",
        with_adapter(llama, lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")),
    ),
    "cartridge": Adapter(
        "Cartridge",
        with_adapter(
            llama, lambda: PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.CARTRIDGE](**_VIRTUAL, task_type="CAUSAL_LM")
        ),
    ),
    "kasa": Adapter("KaSA", lora(llama, ["q_proj", "down_proj"], kasa_config={})),
    "lora-tokens": Adapter(
        "LoRA with `trainable_token_indices`", lora(bert, ["query"], trainable_token_indices=[3, 4])
    ),
    "lora-tokens-tied": Adapter(
        "LoRA with `trainable_token_indices`, tied head", lora(gpt2, ["c_attn"], trainable_token_indices=[3, 4])
    ),
}

MODELS: dict[str, Make] = {
    **{name: family.full for name, family in FAMILIES.items()},
    **{f"{name}-lora": family.with_lora for name, family in FAMILIES.items()},
    **{name: adapter.make for name, adapter in ADAPTERS.items()},
}


def base_of(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def batch_for(model: nn.Module, lengths: list[int] | None = None, width: int = NUM_TOKENS) -> dict[str, torch.Tensor]:
    """A padded batch: random tokens, uneven lengths, one label per record or per token."""
    lengths = LENGTHS if lengths is None else lengths
    base = base_of(model)
    ids_BT = torch.randint(3, VOCABULARY, (len(lengths), width))
    mask_BT = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    ids_BT = ids_BT.masked_fill(mask_BT == 0, base.config.pad_token_id or 0)
    if "Sequence" not in type(base).__name__:
        prompts = getattr(model, "active_peft_config", None)
        tasks = {"task_ids": torch.randint(0, 2, (len(lengths),))} if hasattr(prompts, "num_tasks") else {}
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "labels": ids_BT.masked_fill(mask_BT == 0, -100),
            **tasks,
        }
    if "Bart" in type(base).__name__:
        ids_BT[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = END
    labels_B = torch.randint(0, 2, (len(lengths),))
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_B}
